"""From words to things: options as they are written, names of models and GPUs, job files. What is
wrong is gathered, not thrown one by one."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from memfit import spellings
from memfit.errors import InputError, MissingExtra, Problem
from memfit.job import Job, field_problems, from_text, job_from, option
from memfit.lazy_dataclass import dataclass
from memfit.strategy import ONE, Strategy
from memfit.uses import strategy_from

if TYPE_CHECKING:  # each function imports what it needs, and no more
    from memfit.hardware import Cluster
    from memfit.model.modules import Model
    from memfit.model.source import Source
    from memfit.tape import Producer

T = TypeVar("T")
PRODUCERS = ("formula", "trace")
OUTPUT = ("format", "json", "explain")  # flags that say how an answer is written
AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(?:g|gb|gib)", re.IGNORECASE)  # of memory, not a GPU
JOB_FILE_LIMIT = 2**16  # bytes: an honest job file is a hundredth of it


@dataclass(frozen=True, kw_only=True)
class Ask:
    """The options of a question that are not part of the job: model, GPU, layout and what to
    find."""

    model: str = option(
        "",
        "hub id, folder, config.json, .safetensors or .gguf file, or catalog name",
        group="question",
    )
    gpu: str = option(
        "",
        "GPU or cloud machine, like `rtx-4090`, `8xh100`, `p5.48xlarge`, `auto`",
        group="question",
    )
    memory: str = option(
        "",
        "GPU memory, like `24GiB` (for a GPU that is not listed)",
        group="question",
    )
    use: str = option(
        "",
        ("layout on several GPUs: `ddp`, `fsdp=8`, `tp=4,pp=2`, `zero,stage=3` …"),
        group="question",
    )
    by: str = option(
        "auto",
        "how to predict: formulas, a trace of the real code, or whichever works",
        choices=("auto", *PRODUCERS),
        group="question",
    )
    like: str = option(
        "",
        "use this model's formulas with the sizes of the given config",
        group="question",
    )
    prune: str = option(
        "",
        "cut the model: `layers=24`, or shares like `layers=0.5,ffn=0.75`",
        group="question",
    )
    offline: bool = option(False, "do not use the network", group="question")
    largest_batch: bool = option(False, "find the largest batch that fits", group="question")
    longest_seq: bool = option(
        False,
        "find the longest sequence that fits",
        group="question",
    )
    smallest_gpu: bool = option(False, "find the smallest GPU that fits", group="question")
    cheapest_gpu: bool = option(False, "find the cheapest GPU that fits", group="question")
    cheapest_precision: bool = option(
        False, "find the highest precision that fits", group="question"
    )
    advise: bool = option(
        False,
        "find changes that make it fit, with what each saves and costs",
        group="question",
    )
    dataset_tokens: float = option(
        0.0,
        "training tokens like `2B`; also report hours, energy and cost",
        low=0.0,
        high=1e18,
        group="question",
    )
    examples: int = option(
        0,
        "training sequences; also report hours, energy and cost",
        low=0,
        high=10**15,
        group="question",
    )
    price: float = option(
        0.0,
        "dollars per GPU-hour; 0 means the public price",
        low=0.0,
        high=1e6,
        group="question",
    )
    lengths: str = option(
        "",
        "texts of a whole run: `data.jsonl`, `lengths.txt`, `lognormal:mean=400,p99=2000`",
        group="run",
    )
    steps: int = option(
        0,
        "optimizer steps of the run; 0 means one epoch, at most 1000",
        low=0,
        high=100_000,
        group="run",
    )
    seed: int = option(0, "seed of the order of the texts", low=0, high=2**32, group="run")
    order: str = option(
        "shuffled",
        "order of the texts; `grouped` is the Trainer's `group_by_length`",
        choices=("shuffled", "as-is", "sorted", "grouped", "bucketed"),
        group="run",
    )
    pad_to_multiple: int = option(
        1, "pad batches to a multiple of N tokens", low=1, high=2**16, group="run"
    )
    tokenizer: str = option(
        "", "tokenizer.json, or a folder with one, that counts the texts' tokens", group="run"
    )
    tokens_per_char: float = option(
        0.0,
        "tokens per character, instead of a tokenizer; about 0.25 for English",
        low=0.0,
        high=16.0,
        group="run",
    )
    text_key: str = option("", "key of the text in the lines of a .jsonl file", group="run")
    evaluate_every: int = option(
        0,
        "steps between evaluations; 0 means at the end, with `--evaluate`",
        low=0,
        high=10**9,
        group="run",
    )
    save_every: int = option(
        0, "steps between checkpoints; 0 means at the end", low=0, high=10**9, group="run"
    )


OTHERWISE = (
    "trace with another environment that has torch and transformers: `memfit trace … --python VENV`"
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The options of `memfit trace` that control how the trace runs."""

    python: str = option(
        "",
        "Python or virtual environment whose libraries run the trace",
        group="trace",
    )
    steps: int = option(
        3,
        "optimizer steps to trace; 0 means until the script ends",
        low=0,
        high=10**6,
        group="trace",
    )
    time_limit: float = option(
        300.0, "time limit of the trace in seconds", low=1.0, high=10**6, group="trace"
    )
    show_output: bool = option(False, "show the script's output on stderr", group="trace")
    network: bool = option(False, "let a script download files", group="trace")
    keep_env: bool = option(
        False, "let a script see tokens and passwords of your environment", group="trace"
    )
    ranks: int = option(
        1,
        "run a script as one rank of N, as under `torchrun`",
        low=1,
        high=2**20,
        group="trace",
    )
    rank: int = option(0, "rank to trace", low=0, high=2**20, group="trace")
    launcher: str = option(
        "", "words that start a script, like `torchrun --nproc-per-node 8`", group="trace"
    )
    tokens: int = option(
        512,
        "tokens of each text in a script's data set that was not found",
        low=1,
        high=2**20,
        group="trace",
    )
    image_size: int = option(
        256,
        "width and height of each picture in such a data set",
        low=1,
        high=2**14,
        group="trace",
    )
    assume: str = option(
        "false",
        "value of conditions that depend on data, like `loss < best`",
        choices=("false", "true"),
        group="trace",
    )
    isolation: str = option(
        "auto",
        "how a script is kept from changing files",
        choices=("auto", "namespaces", "landlock", "none"),
        group="trace",
    )


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """The options of `memfit measure` that are not part of the job."""

    out: str = option("", "folder for records (default for a campaign: `records`)", group="measure")
    budget: str = option("25m", "time limit of a campaign, like `25m` or `540s`", group="measure")
    case_limit: float = option(
        600.0, "time limit of one case in seconds", low=1.0, high=10**6, group="measure"
    )
    measured_steps: int = option(3, "optimizer steps to measure", low=1, high=1000, group="measure")
    history: bool = option(
        False, "save the CUDA allocator's history next to the record", group="measure"
    )
    use: str = option(
        "",
        ("measure one process of a layout like `fsdp=8`; collectives do nothing"),
        group="measure",
    )
    world: int = option(
        1,
        "short for `--use fsdp=N,param_dtype=bf16,reduce_dtype=fp32`",
        low=1,
        high=2**20,
        group="measure",
    )
    process: int = option(
        0, "which process of the layout to measure", low=0, high=2**24, group="measure"
    )
    engine: str = option(
        "",
        "serving engine instead of transformers, like `vllm`",
        group="measure",
    )


@dataclass(frozen=True, kw_only=True)
class Studying:
    """The options of `memfit study` that are not part of its jobs. Commas separate several
    values."""

    gpus: str = option(
        "8xa100-sxm-80gb",
        "machines, separated by commas: `8xa100-sxm-80gb,1xrtx-4090`",
        group="study",
    )
    lengths: str = option(
        "1024", "tokens per sequence, separated by commas: `512,2048,8192`", group="study"
    )
    methods: str = option("full,lora,qlora", "training methods, separated by commas", group="study")
    layouts: str = option(
        "", "layouts, separated by commas, like `DDP,ZeRO-3`; empty means all", group="study"
    )
    use: str = option(
        "", "one layout of your own in place of these, like `fsdp=8` or `tp=4`", group="study"
    )
    checkpointing: str = option(
        "none,full", "gradient checkpointing, separated by commas", group="study"
    )
    attention: str = option(
        "eager,sdpa", "attention kernels, separated by commas, like `flash-attn-2`", group="study"
    )
    measured: bool = option(True, "show published measurements of the same jobs", group="study")
    offline: bool = option(False, "do not use the network", group="study")


@dataclass(frozen=True, kw_only=True)
class Planning:
    """The options of `memfit plan` that are not part of the job. The job's own options may have
    several values here, separated by commas, or `any`."""

    global_batch: int = option(
        0,
        ("sequences per optimizer step on all GPUs; 0 means 64, or one per GPU"),
        low=0,
        high=2**32,
        group="plan",
    )
    tokens_per_step: int = option(
        0, "tokens per optimizer step on all GPUs", low=0, high=2**48, group="plan"
    )
    dataset_tokens: float = option(
        0.0,
        "training tokens like `2B`, for hours, energy and cost; 0 means 1M",
        low=0.0,
        high=1e18,
        group="plan",
    )
    examples: int = option(
        0, "training sequences; also report hours, energy and cost", low=0, high=2**48, group="plan"
    )
    network: str = option(
        "",
        ("network between nodes, like `ndr` or `ethernet-100`"),
        group="plan",
    )
    price: float = option(
        0.0,
        "dollars per GPU-hour; 0 means the public price",
        low=0.0,
        high=1e6,
        group="plan",
    )
    budget_money: float = option(
        0.0,
        "maximum cost of the run in dollars; 0 means no limit",
        low=0.0,
        high=1e15,
        group="plan",
    )
    budget_hours: float = option(
        0.0, "maximum hours of the run; 0 means no limit", low=0.0, high=1e9, group="plan"
    )
    policy: str = option("fastest", "what the best plan optimizes", group="plan")
    top: int = option(3, "number of plans to show per method", low=1, high=100, group="plan")
    offload: bool = option(True, "allow CPU offload", group="plan")
    front: bool = option(
        False,
        ("also show the best trade-offs of time, memory and cost (slow)"),
        group="plan",
    )
    verify: int = option(
        0,
        ("check the first N plans by a trace (`memfit[trace]`)"),
        low=0,
        high=100,
        group="plan",
    )
    measure: int = option(
        0,
        "measure the first N plans on this machine's GPU (`memfit[measure]`)",
        low=0,
        high=100,
        group="plan",
    )
    write: str = option(
        "",
        "write the best plan to this job file",
        group="plan",
    )


def options() -> dict[str, dataclasses.Field[Any]]:
    """Every option by its name, in the order in which people should read them."""
    return {one.name: one for one in (*dataclasses.fields(Ask), *dataclasses.fields(Job))}


def gather(problems: list[Problem], otherwise: Callable[[], T], make: Callable[[], T]) -> T:
    """Return what `make` returns. If it raises, add its problems to `problems` and return what
    `otherwise` returns."""
    try:
        return make()
    except InputError as bad:
        problems += [problem for problem in bad.problems if problem not in problems]
        return otherwise()


def one_model(words: tuple[str, ...]) -> str:
    """The one argument that is not an option."""
    if len(words) == 1:
        return words[0]
    listed = ", ".join(f"`{word[:40]}`" for word in words[:4])
    message = f"one model at a time, not {len(words)}: {listed}" if words else "no model is given"
    if names_gpu(words):
        gpu = f"--gpu {words[1]}"
        fix = (words[1], gpu)
        raise InputError(
            Problem(message=message, where="model", hint=f"did you mean `{gpu}`?", fix=fix)
        )
    if len(words) > 2 and is_gpu(words[-1]):
        hint = f"did you mean `memfit {words[0]} --gpu {words[-1]}`?"
        raise InputError.one(message, where="model", hint=hint)
    raise InputError.one(
        message,
        where="model",
        hint="give a hub id, a path, a name from `memfit models`, or a job file (*.yaml)",
    )


def names_gpu(words: tuple[str, ...]) -> bool:
    """Whether the second of two words is a GPU, or a machine with some."""
    return len(words) == 2 and is_gpu(words[1])


def is_gpu(word: str) -> bool:
    """Whether a word names a GPU, or a machine with some; a number below 100 does not."""
    if word.isdecimal() and len(word) < 3:
        return False
    try:
        return cluster_of(word, "") is not None
    except InputError:
        return False


def ask_from(values: Mapping[str, Any], problems: list[Problem]) -> Ask:
    """What can be read of `values`; the rest joins `problems`."""
    return read_into(Ask, values, problems)


def read_into(kind: type[T], values: Mapping[str, Any], problems: list[Problem]) -> T:
    fields = kind.__dataclass_fields__  # type: ignore[attr-defined]
    good = {}
    for name, value in values.items():
        read = from_text(value, str(fields[name].type)) if isinstance(value, str) else value
        if isinstance(value, (list, tuple)) and str(fields[name].type) == "str":
            read = " ".join(str(item) for item in value)
        if name == "memory" and isinstance(value, int) and not isinstance(value, bool):
            read = str(value)
        found = [
            dataclasses.replace(problem, where=name)
            for problem in field_problems(fields[name], read)
        ]
        problems += found
        if not found:
            good[name] = read
    return kind(**good)


def job_of(values: Mapping[str, Any], problems: list[Problem]) -> Job:
    """Build the Job. If an option is wrong, add its problems and build the Job without it, so that
    the other checks can run."""
    try:
        return job_from(values)
    except InputError as bad:
        problems += bad.problems
        blamed = {problem.where for problem in bad.problems}
    return gather(
        [],
        Job,
        lambda: job_from(
            {name: value for name, value in values.items() if f"job.{name}" not in blamed}
        ),
    )


def cluster_of(gpu: str, memory: str) -> Cluster | None:
    """Where it runs; `memory` overrides what the record of `gpu` says."""
    if not gpu and not memory:
        return None
    from memfit.hardware import Cluster, auto_gpu, custom_gpu, parse_cluster
    from memfit.units import parse_bytes

    problems: list[Problem] = []
    if amount := AMOUNT.fullmatch(gpu.strip()):  # `--gpu 24GB`: as cards are labelled
        gpu, memory = "", memory or f"{amount[1]}GiB"
    size = gather(problems, lambda: 0, lambda: parse_bytes(memory, where="memory") if memory else 0)
    found: Cluster | None = None
    if gpu:
        nothing = gather(
            problems,
            lambda: None,
            lambda: Cluster(gpu=auto_gpu()) if gpu == "auto" else parse_cluster(gpu),
        )
        found = nothing
    if problems:
        raise InputError(*problems)
    if found is None:
        return Cluster(gpu=custom_gpu(size))
    if not size:
        return found
    told = dataclasses.replace(
        found.gpu,
        memory=size,
        memory_range=(size, size),
        held=0,
        status={**found.gpu.status, "memory": "given"},
        cites={**found.gpu.cites, "memory": "given by the user"},
    )
    return dataclasses.replace(found, gpu=told)


def gpu_notes(gpu: str) -> tuple[Problem, ...]:
    """What was assumed about the GPU as typed, as notes for the answer."""
    if not gpu or gpu == "auto":
        return ()
    from memfit.hardware import assumptions

    return assumptions(gpu)


def strategy_of(use: str, cluster: Cluster | None) -> Strategy:
    """How the work is spread; several GPUs and no word of it are replicas."""
    if not use.strip() and (cluster is None or cluster.gpus == 1):
        return ONE
    return strategy_from(use.split(), None if cluster is None else cluster.gpus)


def model_of(
    subject: Any, ask: Ask, reasons: list[Problem] | None = None
) -> tuple[Source | None, Model]:
    """The model that is named. Where no family knows it and a trace may answer, only its config;
    why then joins `reasons`."""
    from memfit.model.families import build
    from memfit.model.modules import Model

    if isinstance(subject, Model):
        if ask.prune:
            message = "a built Model cannot be pruned"
            raise InputError.one(message, where="prune", hint="pass its config, or its name")
        return None, subject
    if ask.like:
        from memfit.model.likeness import build_like

        build = partial(build_like, ask.like)
    if isinstance(subject, Mapping):
        config = cut_config(subject, ask)
        return None, otherwise(ask, config, ("", ""), lambda: build(config), reasons)
    if not isinstance(subject, (str, os.PathLike)):
        raise InputError.one(
            f"`{str(subject)[:60]}` is not a model",
            where="model",
            hint="pass a name, a path, a parsed config or a `Model`",
        )
    from memfit.model.source import read

    source = read(subject, offline=ask.offline)
    if ask.prune:
        source = dataclasses.replace(
            source,
            config=cut_config(source.config, ask),
            origin=f"{source.origin}, pruned: {ask.prune}",
            parameters=None,
            tensors=None,
        )
    made = lambda: exact(source, build(source.config, name=source.name, origin=source.origin))  # noqa: E731
    return source, otherwise(ask, source.config, (source.name, source.origin), made, reasons)


def cut_config(config: Mapping[str, Any], ask: Ask) -> Mapping[str, Any]:
    """What `--prune` leaves of a config."""
    if not ask.prune:
        return config
    from memfit.model.pruning import pruned

    return pruned(config, ask.prune)


def planned_model(subject: Any, ask: Ask) -> Model:
    """The model of a plan or a study, which formulas alone can make."""
    try:
        return model_of(subject, dataclasses.replace(ask, by="formula"))[1]
    except InputError as bad:
        hint = "`memfit estimate` traces it; `--like NAME` takes the formulas of a known family"
        problems = [
            dataclasses.replace(one, hint=hint) if traced(one) else one for one in bad.problems
        ]
        raise type(bad)(*problems) from None


def otherwise(
    ask: Ask,
    config: Mapping[str, Any],
    named: tuple[str, str],
    made: Callable[[], Model],
    reasons: list[Problem] | None,
) -> Model:
    """The Model of the formulas; where these say that a trace can do what they cannot, and one may
    be run, only its config. `named`: the model's name and where its config is from."""
    try:
        return made()
    except InputError as bad:
        may = ask.by == "trace" or (ask.by == "auto" and reasons is not None)
        if (
            not may
            or not config.get("model_type")
            or not (all(traced(problem) for problem in bad.problems) or by_graphs(config))
        ):
            raise
        if reasons is not None:
            reasons += bad.problems
        return unbuilt(config, *named)


def by_graphs(config: Mapping[str, Any]) -> bool:
    """Whether captured graphs answer for this type: their map of sizes may not read what its own
    class reads (a default, a list under an older name), so that a trace has the last word."""
    from memfit.model.families import families

    known = families().get(str(config.get("model_type")))
    return known is not None and known.graphs


def traced(problem: Problem) -> bool:
    """Whether it is one of the formulas alone."""
    return "--by trace" in problem.hint


def exact(source: Source, model: Model) -> Model:
    """A GGUF's tensors in place of the weights that its config would have in 16 bits."""
    from memfit.model.stored import with_blocks

    packing = source.config.get("quantization_config")  # may be null
    gguf = isinstance(packing, Mapping) and packing.get("quant_method") == "gguf"
    return with_blocks(model, source.tensors) if gguf and source.tensors else model


def compared(source: Source, model: Model) -> tuple[Problem, ...]:
    """What the exact tensors of a file say of the model that its config describes."""
    from memfit.model.stored import doubts

    if source.tensors is None and source.parameters is None and model.assumed:
        said = ", ".join(f"`{key}` as {json.dumps(value)}" for key, value in model.assumed)
        message = f"the config leaves open what decides much; taken, as transformers does: {said}"
        return (Problem(message=message, where="config", level="note"),)
    if (
        model.stored
        or source.tensors is None
        or source.config.get("quantization_config")
        or not model.layers
    ):
        return ()
    return tuple(doubts(model, source.tensors))


def unbuilt(config: Mapping[str, Any], name: str, origin: str) -> Model:
    """A model that no family knows: only its config, for the trace."""
    from memfit.model.config import LARGEST_LAYERS, Fields
    from memfit.model.modules import Linear, Model

    fields = Fields(config)
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if fields.value(key, default=None) is not None:
            fields.count(key, high=LARGEST_LAYERS)  # each would be built
    fields.done()
    kind = str(config.get("model_type"))
    head = Linear(name="lm_head", inputs=1, outputs=1)
    return Model(
        name=name or kind,
        family=kind,
        prefix="",
        embed=(),
        layers=(),
        final=(),
        head=head,
        tied=True,
        vocab=1,
        width=1,
        positions=0,
        config=config,
        origin=origin,
    )


def is_program(subject: str) -> bool:
    """Whether it is a script, a notebook, a module (`-m package.module`) or a command (`-- trl`),
    and no model."""
    return subject.endswith((".py", ".ipynb")) or subject.startswith(("-m ", "-- "))


def script_model(path: str) -> Model:
    """A placeholder for the model where a script builds its own."""
    from memfit.model.modules import Linear, Model

    head = Linear(name="", inputs=1, outputs=1)
    return Model(
        name=Path(path).name,
        family="script",
        prefix="",
        embed=(),
        layers=(),
        final=(),
        head=head,
        tied=True,
        vocab=1,
        width=1,
        positions=0,
        config={},
        origin=path,
    )


def producer_of(by: str) -> Producer | None:
    """None means the formulas, which `estimate` knows itself."""
    if by != "trace":
        return None
    from importlib.util import find_spec

    if not all(find_spec(name) for name in ("torch", "transformers")):
        raise MissingExtra("`--by trace`", "trace", OTHERWISE)
    from memfit.trace import trace

    return trace


def given_values(
    model: Any, given: Mapping[str, Any], known: Collection[str], problems: list[Problem]
) -> tuple[Any, dict[str, Any]]:
    """The model and the options that were named, each by its own name; those of a job file where
    the model is one."""
    values = {name: value for name, value in given.items() if value is not None}
    values = spellings.plain(values, known, problems)
    if isinstance(model, (str, os.PathLike)) and os.fspath(model).lower().endswith(
        (".yaml", ".yml")
    ):
        values = {**job_file(Path(model), problems), **values}
        return values.get("model"), values
    return model, values


def job_file(path: Path, problems: list[Problem]) -> dict[str, Any]:
    """The usable keys of a job file, written with dashes or underscores; the problems of others
    join `problems`. A model given as `./…` or `../…` is relative to the file."""
    read: dict[str, Any] = {}
    known = options()
    for key, value in mapping(path, text_of(path)).items():
        name, where = str(key).replace("-", "_"), f"{path.name}: {str(key)[:60]}"
        if name in read:
            problems.append(Problem(message=f"`{name[:60]}` is given twice", where=where))
        elif name in OUTPUT and name not in known:
            message = f"`{name}` is an option of the command line, not of a job file"
            problems.append(
                Problem(message=message, where=where, hint=f"remove it and pass `--{name}`")
            )
        elif plain(value):
            read[name] = value
        else:
            wrong = "has no value" if value is None else "must be one value or a list of values"
            problems.append(Problem(message=f"`{str(key)[:60]}` {wrong}", where=where))
    found = spellings.plain(read, known, problems, f"{path.name}: ")
    named = found.get("model")
    if named is None:
        problems.append(
            Problem(
                message="`model` is missing",
                where=path.name,
                hint="add a line like `model: meta-llama/Llama-3.1-8B`",
            )
        )
    elif isinstance(named, str) and named.startswith(("./", "../")):
        found["model"] = str(path.parent / named)
    return found


def text_of(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "not a regular file (a pipe, socket or device)"
            raise InputError.one(f"`{path}` is {what}", where="job file")
        with path.open("rb") as file:
            raw = file.read(JOB_FILE_LIMIT + 1)
        if len(raw) > JOB_FILE_LIMIT:
            raise InputError.one(
                f"`{path}` is too long for a job file",
                where="job file",
                hint=f"the limit is {JOB_FILE_LIMIT} bytes",
            )
        return raw.decode()
    except OSError as error:
        raise InputError.one(
            f"`{path}` cannot be read: {(error.strerror or 'unknown failure').lower()}",
            where="job file",
        ) from None
    except UnicodeDecodeError:
        raise InputError.one(
            f"`{path}` is not a text file", where="job file", hint="a job file is YAML in UTF-8"
        ) from None


def mapping(path: Path, text: str) -> dict[Any, Any]:
    """Parse a YAML file. A key that is given twice is a problem, and tags create no objects."""
    import yaml

    from memfit.yaml12 import loader

    try:
        node = yaml.compose(text, Loader=loader())
        keys = (
            [key.value for key, _ in node.value if isinstance(key.value, str)]
            if isinstance(node, yaml.MappingNode)
            else []
        )
        values = yaml.load(text, Loader=loader())  # noqa: S506 - a subclass of the safe one
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        message = (
            f"`{path}` is not valid YAML: "
            f"{getattr(error, 'problem', None) or 'it cannot be parsed'}"
        )
        raise InputError.one(message, where=f"job file{line}") from None
    except (RecursionError, ValueError):
        raise InputError.one(
            (
                f"`{path}` is not a job file: it is nested too deeply or has a number "
                "that is too large"
            ),
            where="job file",
        ) from None
    if not isinstance(values, dict):
        raise InputError.one(
            f"`{path}` has no keys",
            where="job file",
            hint="write lines like `model: meta-llama/Llama-3.1-8B`",
        )
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise InputError(
            *(
                Problem(message=f"`{key[:60]}` is given twice", where=f"{path.name}: {key[:60]}")
                for key in twice
            )
        )
    return values


def plain(value: Any) -> bool:
    scalar = (str, int, float, bool)
    return isinstance(value, scalar) or (
        isinstance(value, list) and all(isinstance(item, scalar) for item in value)
    )


def matches(pattern: str, text: str) -> bool:
    low = text.lower()
    return all(fnmatch.fnmatchcase(low, f"*{word}*") for word in pattern.lower().split())


def offer(close: list[str]) -> str:
    return "did you mean " + ", ".join(f"`{one}`" for one in close) + "?" if close else ""
