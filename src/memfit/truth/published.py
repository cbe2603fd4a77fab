"""A published row -> a `Case`, or `Refused` with the reason. What all sources share is here; what
one publisher means by his words is in `sources/`, a file each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import field
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from memfit.errors import InputError
from memfit.job import Job, job_from
from memfit.lazy_dataclass import dataclass
from memfit.optimizers import OPTIMIZERS
from memfit.strategy import ONE as ONE_GPU
from memfit.strategy import Strategy
from memfit.truth import single, words
from memfit.truth.case import (
    KERNEL,
    METRICS,
    ONE,
    SERVED,
    SEVERAL,
    SPEED,
    Case,
    Refused,
    Unfit,
)
from memfit.truth.models import built
from memfit.truth.plain import options_of, strategy_of
from memfit.truth.rows import Row, count, read_rows
from memfit.truth.words import Options

SERVING = (
    "vllm",
    "sglang",
    "llama.cpp",
    "ollama",
    "tensorrt",
    "mlx",
    "exllama",
    "ctranslate",
    "ctransformers",
    "onnx",
    "deepspeed-inference",
    "gptq-for-llama",
    "nvidia",
)
PARTS = (
    "kv_cache",
    "compute_buffer",
    "activation_peak",
    "non_torch",
    "cuda_graph",
    "available_kv_cache",
    "weights_gpu",
    "peak_torch_profile",
)
TWICE = "an id for the second time"
PURE = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of every number that is trained


@dataclass(kw_only=True)
class Reading:
    """What a source makes of a row: options of the Job, and what it had to assume."""

    options: Options
    notes: list[str] = field(default_factory=list)
    strategy: Strategy = ONE_GPU
    rank: int | None = None  # whose memory the figure is,
    alike: int = 1  # or the most of so many ranks from it on
    gpu: str = ""  # where the name that was published leaves it open
    attention: str = ""  # the operator that ran, where no option of a job names it
    config: str = ""  # of a model that is in no catalog, as JSON
    added_tokens: int = 0  # that the program adds to the vocabulary before it trains


Reader = Callable[[Row], Reading]
_READERS: dict[str, Reader] = {}
_LAYOUTS: set[str] = set()


def reader(*origins: str, layouts: bool = False) -> Callable[[Reader], Reader]:
    """Decorator: the function that reads rows of these repositories. `layouts`: those of several
    GPUs too."""

    def add(function: Reader) -> Reader:
        _READERS.update(dict.fromkeys(origins, function))
        _LAYOUTS.update(origins if layouts else ())
        return function

    return add


@cache
def readers() -> dict[str, Reader]:
    folder = import_module("memfit.truth.sources")
    for module in iter_modules(folder.__path__):
        import_module(f"{folder.__name__}.{module.name}")
    return _READERS


def read(path: str | Path | None = None) -> Iterator[Case | single.Kernel | Refused]:
    """Every row of a file, understood or refused; None: the bundled collection."""
    seen: set[str] = set()
    for row in read_rows(path):
        if row.id in seen:
            yield Refused(id=row.id, source=row.source, reason=TWICE)
            continue
        seen.add(row.id)
        yield row if isinstance(row, Refused) else understand(row)


def understand(row: Row) -> Case | single.Kernel | Refused:
    """Refusals are about what memfit cannot do before they are about what the publisher left
    out."""
    try:
        beyond(row)
        if kind(row) == KERNEL:
            return single.read(row)
        reading = readers().get(row.origin, plain)(row)
        model = words.model(row) if not reading.config else str(row.model).partition(":")[0]
        stored = words.stored(row.text("dtype"), str(row.model), str(row.more("kernel") or ""))
        device, remark = words.gpu(reading.gpu or row.gpu)
        value = measured(row)
        if device is None and row.metric in ("nvidia-smi", "oom", "peak_allocated_plus_context"):
            raise Unfit("the GPU is not named", row.gpu)
        if stored and reading.options.get("method") == "qlora":
            reading.options["method"] = (
                "lora"  # the checkpoint is quantized already: no bitsandbytes
            )
        job = job_from(known_targets(reading.options, model))
        if (
            value is not None
            and str(row.metric).startswith("peak")
            and not reading.strategy
            and value < least(job, model)
        ):
            raise Unfit(
                "the figure is smaller than what the stated job keeps",
                f"{value} < {least(job, model)} bytes",
            )
    except Unfit as why:
        return refused(row, why.reason, why.detail)
    except InputError as bad:
        first = bad.problems[0]
        old = first.where == "job.versions"
        reason = (
            "a version that memfit does not know" if old else "the options contradict each other"
        )
        return refused(row, reason, str(first))
    return Case(
        id=row.id,
        source=row.origin,
        model=model,
        job=job,
        gpu=device,
        metric=str(row.metric),
        value=value,
        scope=str(row.scope or ""),
        confidence=str(row.confidence or ""),
        notes=tuple(filter(None, (*reading.notes, remark))),
        stored=json.dumps(stored, sort_keys=True) if stored else "",
        strategy=reading.strategy,
        rank=reading.rank,
        alike=reading.alike,
        config=reading.config,
        added_tokens=reading.added_tokens,
        attention=reading.attention,
        lengths_vary=row.lengths_vary,
    )


def refused(row: Row, reason: str, detail: str) -> Refused:
    return Refused(
        id=row.id,
        source=row.origin,
        reason=reason,
        detail=detail,
        metric=str(row.metric),
        confidence=str(row.confidence or ""),
        task=str(row.task or ""),
        kind=kind(row),
    )


def kind(row: Row) -> str:
    """What it would take to answer the row, whether or not it can be."""
    if row.metric == "throughput_only":
        return SPEED
    if str(row.model).startswith("single kernel"):
        return KERNEL
    if server(row) or row.metric in PARTS:
        return SERVED
    return (
        SEVERAL if (count(row.gpus) or 1) > 1 or row.text("parallel") not in ("", "none") else ONE
    )


def server(row: Row) -> str | None:
    """The engine that served, if one did."""
    engine = row.text("engine")
    return next((name for name in SERVING if name in engine), None)


def beyond(row: Row) -> None:
    """Raise for what no reader needs to look at."""
    if row.metric == "throughput_only":
        raise Unfit("speed only: waits for the time model")
    if not isinstance(row.metric, str) or (row.metric not in METRICS and row.metric not in PARTS):
        raise Unfit("unknown metric", row.metric)
    if kind(row) == KERNEL:
        return
    served = server(row)
    if served:
        raise Unfit("serving engines: not yet", served)
    if row.metric in PARTS:
        raise Unfit("a part that only serving engines report", row.metric)
    gpus = count(row.gpus)
    if gpus is None:
        raise Unfit("no GPU" if row.gpus == 0 else "the number of GPUs is not stated", row.gpus)
    if row.origin in _LAYOUTS or row.origin not in readers():
        return
    if gpus > 1:
        raise Unfit("several GPUs: not yet", f"{gpus} GPUs")
    parallel = row.text("parallel")
    if parallel not in ("", "none"):
        raise Unfit("a strategy for several GPUs: not yet", parallel)


def known_targets(options: Options, model: str) -> Options:
    """A list of targets may serve several models: PEFT takes those that a model has (peft 0.13
    tuners/tuners_utils.py inject_adapter)."""
    wanted = options.get("targets", "all-linear")
    if options.get("method") not in ("lora", "qlora") or wanted == "all-linear":
        return options
    try:
        known = built(model)
    except InputError:
        return options  # the job says what is wrong with the model
    modules = (*known.layers, *known.final, known.head)
    names = {linear.name.rpartition(".")[2] for module in modules for linear in module.linears()}
    there = [one for one in wanted.split(",") if one.rpartition(".")[2] in names]
    return {**options, "targets": ",".join(there)} if there else options


def measured(row: Row) -> int | None:
    """The figure in bytes; an OOM has none."""
    if row.metric == "oom":
        return None
    found = row.bytes
    if not found:
        raise Unfit("the unit or the value is not settled", f"{row.value} {row.unit}")
    return found


def least(job: Job, model: str) -> int:
    """Bytes that no run of full training can do without while its optimizer steps: parameters,
    gradients and states of one dtype."""
    size, states = PURE.get(job.precision), OPTIMIZERS[job.optimizer].states
    if (
        not job.training
        or job.method != "full"
        or size is None
        or any(state != "like" for state in states)
    ):
        return 0
    try:
        return built(model).parameters * size * (2 + len(states))
    except InputError:
        return 0


def plain(row: Row) -> Reading:
    """A source that nobody knows."""
    notes: list[str] = []
    strategy = strategy_of(row, notes)
    return Reading(options=options_of(row, notes), strategy=strategy, notes=notes)
