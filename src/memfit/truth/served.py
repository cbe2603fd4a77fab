"""Published start-up logs of serving engines against the engines' answers.

A row has `engine`, `options` and `figures`, as `data/README.md` describes; rows of the other form,
one figure each, are gathered by run.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from memfit.errors import InputError, MemfitError
from memfit.hardware import GPU, find_gpu
from memfit.hardware.gpu import variants
from memfit.lazy_dataclass import dataclass
from memfit.model.named import by_name, split_name
from memfit.serving import find_engine
from memfit.serving.base import Device, Question, Subject
from memfit.serving.separate_drafts import draft_name
from memfit.truth.llama_runs import FORK, MAIN, gather_llama, is_llama
from memfit.truth.rows import BUNDLED, LONGEST_LINE
from memfit.truth.statistics import middle, p95
from memfit.units import GIB, MIB

ROWS = Path(__file__).parent / "data" / "serving.jsonl.gz"
# Logs collected once the rules stood, and judged before a rule was changed for them; not among the
# bundled rows.
UNSEEN = ROWS.with_name("unseen.jsonl")
CONFIDENT = ("high", "medium")
# Constants were taken from them (ROCm's memory outside torch and of compiling, and up to which
# version; CUDA graphs; sums of ranks; from which version on a start copies its embeddings), or what
# a name means (the group size of cpatonn's GPTQ files was chosen by the logged weights, what the
# AWQ files of the same author quantize by the kernels that a log names): no evidence.
FITTED = (
    *("vllm-0013", "vllm-0030", "vllm-0031"),
    *("vllm-0090", "vllm-0091", "vllm-0092", "vllm-0093", "vllm-0104"),
    *("vllm-0105", "vllm-0106", "vllm-0111"),
    *("vllm-0115", "vllm-0119", "vllm-0123", "vllm-0127"),
    *("vllm-0024", "vllm-0029", "vllm-0036", "vllm-0048", "vllm-0049", "vllm-0085"),
    *("vllm-0110", "vllm-0112", "vllm-0114", "vllm-0116", "vllm-0126", "vllm-0128"),
    *("unseen-0033", "unseen-0051", "unseen-0115"),
    *("unseen-0089", "unseen-0130", "unseen-0131", "unseen-0137"),
    *("unseen-0152", "unseen-0153", "unseen-0154", "unseen-0155", "unseen-0156"),
    *("unseen-0169", "unseen-0185"),
)
# Figures that are compared, each with the keys under which rows have it; the first one counts.
COMPARED: dict[str, tuple[str, ...]] = {
    "weights_gib": ("weights_gib",),
    "model_gib": ("model_gib",),  # of all devices and the host
    "kv_gib": ("kv_gib", "available_kv_gib"),
    "kv_tokens": ("kv_tokens",),
    "activation_gib": ("activation_gib",),
    "compute_gib": (),
    "state_gib": (),
    "device_gib": ("device_gib",),
}
# Metrics of rows with one figure each, in the words of the other form.
METRICS = {
    "weights": "weights_gib",
    "available_kv_cache": "available_kv_gib",
    "kv_cache": "kv_gib",
    "activation_peak": "activation_gib",
    "non_torch": "non_torch_gib",
    "cuda_graph": "graph_gib",
}
# Scope of a figure that is left out: vLLM V0 samples on the first rank alone, whose cache decides.
OTHER_RANK = "another rank than the first"
PROFILED = 2  # times the last pool that a log prints: what it planned was allocated after its end
SMALLER = 0.95  # of a listed memory: a log that shows less is of another card of that name
PROMISED = 0.05  # more cache than the engine gave, by so much, is a broken promise


@dataclass(frozen=True, kw_only=True)
class ServedRow:
    """One start-up of one engine, as published."""

    id: str
    source: str
    engine: str
    version: str
    model: str
    gpu: str
    gpus: int
    options: Mapping[str, Any]
    figures: Mapping[str, Any]
    confidence: str
    notes: str = ""
    quantization: Mapping[str, Any] = field(default_factory=dict)  # as the log prints it

    @property
    def complete(self) -> bool:
        """Whether the row describes its run well enough to be judged by."""
        known = ("total_gpu_memory_gib", "gpu_total_mib", "avail_before_load_gb")
        return (
            self.confidence in CONFIDENT
            and bool(self.model)
            and bool(self.gpu or any(self.figures.get(one) for one in known))
        )


@dataclass(frozen=True, kw_only=True)
class ServedOutcome:
    """A row with what the engine's rules say of it; `reason` says why there is no answer."""

    row: ServedRow
    measured: Mapping[str, float] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def answered(self) -> bool:
        return not self.reason

    def error(self, figure: str) -> float | None:
        """Predicted over measured, less one."""
        ours, theirs = self.predicted.get(figure), self.measured.get(figure)
        return None if ours is None or not theirs else ours / theirs - 1


def read_served(path: str | Path | None = None) -> list[ServedRow]:
    """Every row of a serving engine in a file; None: the bundled collections."""
    if path is None:
        return [*rows_of(lines(ROWS)), *rows_of(lines(BUNDLED))]
    return list(rows_of(lines(Path(path))))


def lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """JSON objects of a file, one a line; other readers name the lines that are none."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line in iter(lambda: file.readline(LONGEST_LINE + 1), b""):
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(value, dict):
                    yield value
    except (OSError, EOFError) as error:
        raise InputError.one(
            f"`{str(path)[:200]}` cannot be read: {str(error)[:120]}", where="path"
        ) from None


def rows_of(values: Iterable[Mapping[str, Any]]) -> Iterator[ServedRow]:
    gathered: dict[tuple[str, ...], dict[str, Any]] = {}
    for value in values:
        engine = str(value.get("engine") or "").lower()
        figures = value.get("figures")
        if isinstance(figures, Mapping) and engine:
            yield served_row(value, engine, figures)
        elif engine in ("vllm", "sglang") and value.get("metric") in METRICS:
            gather(gathered, value)
        elif is_llama(value):
            gather_llama(gathered, value)
    for value in gathered.values():
        yield served_row(value, str(value["engine"]).lower(), value["figures"])


def gather(gathered: dict[tuple[str, ...], dict[str, Any]], value: Mapping[str, Any]) -> None:
    """One figure of a run joins the others of it."""
    names = ("source", "model", "engine", "engine_version", "gpu", "gpus", "seq", "parallel")
    extra = value.get("extra") if isinstance(value.get("extra"), Mapping) else {}
    key = (*(str(value.get(name)) for name in names), json.dumps(extra, sort_keys=True))
    run = gathered.setdefault(
        key,
        {**value, "figures": {}, "options": parted(value, extra or {})},
    )
    size = value.get("value_gib")
    if isinstance(size, (int, float)) and OTHER_RANK not in str(value.get("scope")):
        run["figures"][METRICS[value["metric"]]] = size
    for name, ours in (
        ("pool_tokens", "kv_tokens"),
        ("total_GiB", "total_gpu_memory_gib"),
        ("cuda_blocks", "gpu_blocks"),
        ("gpu_blocks", "gpu_blocks"),
    ):
        if isinstance((extra or {}).get(name), (int, float)):
            run["figures"][ours] = extra[name]  # type: ignore[index]


def parted(value: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a run whose row tells them in words: `tp2`, `max_model_len 16000 (…)`."""
    found = {name: one for name, one in extra.items() if isinstance(one, (int, float))}
    text = f"{value.get('seq') or ''} {value.get('parallel') or ''}"
    for name, pattern in (
        ("max_model_len", r"max_model_len (\d+)"),
        ("max_num_seqs", r"max_num_seqs (\d+)"),
        ("tensor_parallel_size", r"\btp ?(\d+)"),
        ("pipeline_parallel_size", r"\bpp ?(\d+)"),
    ):
        match = re.search(pattern, text, re.IGNORECASE)
        if match:
            found[name] = int(match[1])
    found.pop("block_size", None)
    return found


def served_row(value: Mapping[str, Any], engine: str, figures: Mapping[str, Any]) -> ServedRow:
    gpus = value.get("gpus")
    options = value.get("options")
    quantization = value.get("quantization_config")
    return ServedRow(
        id=str(value.get("id") or "?")[:80],
        source=str(value.get("source") or "unnamed")[:400],
        engine=engine,
        version=version_by_form(
            version_of(str(value.get("engine_version") or dated(value)), engine), engine, figures
        ),
        model=str(value.get("model") or ""),
        gpu=str(value.get("gpu") or ""),
        gpus=gpus if isinstance(gpus, int) and 0 < gpus < 10_000 else 1,
        options=options if isinstance(options, Mapping) else {},
        figures=figures,
        confidence=str(value.get("confidence") or ""),
        notes=str(value.get("notes") or "")[:400],
        quantization=quantization if isinstance(quantization, Mapping) else {},
    )


# Releases of vLLM by month, for rows that give a date in place of a version.
RELEASES = (
    ("2026-01", "0.14.0"),
    ("2025-10", "0.11.0"),
    ("2025-07", "0.9.2"),
    ("2025-04", "0.8.5"),
    ("2025-02", "0.7.2"),
    ("2024-11", "0.6.4"),
    ("2024-07", "0.5.3"),
)


MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def dated(value: Mapping[str, Any]) -> str:
    """The month that a row's notes name (`July 2025`), as `2025-07`; else nothing."""
    found = re.search(r"\b([A-Z][a-z]{2})[a-z]* (20\d\d)\b", str(value.get("notes") or ""))
    if not found or found[1] not in MONTHS:
        return ""
    return f"{found[2]}-{MONTHS.index(found[1]) + 1:02}"


def version_of(text: str, engine: str) -> str:
    """The version of a row, or nothing for the newest, as which a build from a branch (`0.1.dev1`)
    counts. A month in its place means vLLM's release of that month; for other engines it means
    nothing."""
    found = re.match(r"(20\d\d-\d\d)", text)
    if found and engine != "vllm":
        return ""
    if found:
        return next((version for month, version in RELEASES if found[1] >= month), "0.5.3")
    return "" if text.startswith("0.1.dev") else text


# A release whose log has the tokens of blocks (rules.py: from 0.20.1 on it has concurrency ×
# length), for rows without a version whose log prints tokens of blocks.
OF_BLOCKS = "0.19.0"


def version_by_form(version: str, engine: str, figures: Mapping[str, Any]) -> str:
    """The version of a row, or the newest that prints tokens as the row has them."""
    many, length = (number(figures.get(f"max_concurrency{end}")) for end in ("", "_len"))
    tokens = number(figures.get("kv_tokens"))
    if version or engine != "vllm" or not (many and length and tokens):
        return version
    return OF_BLOCKS if abs(many * length / tokens - 1) > PROMISED else version


def judge(row: ServedRow) -> ServedOutcome:
    """The engine's answer beside what its log said."""
    measured = measured_figures(row)
    try:
        engine = find_engine(MAIN if row.engine == FORK else row.engine)
        measured |= engine.row_figures(row.figures)
        name = split_name(row.model)[0] if row.quantization else row.model
        subject = engine.row_subject(name, row.options) or subject_of(name)
        if row.quantization:
            config = {**subject.config, "quantization_config": row.quantization}
            subject = replace(subject, config=config)
        draft = draft_of(row)
        question = Question(
            subject=subject,
            draft=draft,
            draft_left_out=draft is None,
            devices=(device_of(row, needed=engine.needs_memory),) * max(1, row.gpus),
            options=engine.row_options(
                {
                    **unsloth(row),
                    "figures": row.figures,
                    "source": row.source,
                    "version": row.version,
                }
            ),
            version=row.version,
        )
        answer = engine.answer(question)
    except MemfitError as error:
        return ServedOutcome(row=row, measured=measured, reason=str(error).splitlines()[0][:160])
    predicted = {name: float(answer.figures[name]) for name in answer.figures}
    if "host_model_mib" in predicted:
        predicted["model_gib"] = (predicted["model_mib"] + predicted["host_model_mib"]) / 1024
    predicted.setdefault("device_gib", predicted.get("used_gib", answer.device / GIB))
    return ServedOutcome(row=row, measured=measured, predicted=predicted)


# What Unsloth passes to vLLM as `max_num_seqs`, by GiB that its model leaves of the budget, and its
# limit of images (unsloth_zoo/vllm_utils.py load_vllm, 2025).
UNSLOTH = ((2, 128), (4, 160), (8, 192), (12, 224), (16, 256), (24, 288), (40, 320), (48, 226))
UNSLOTH_ITEMS = {"image": 1, "video": 0}


def unsloth(row: ServedRow) -> Mapping[str, Any]:
    """The options of a row; Unsloth, which starts vLLM itself, chooses the number of requests and
    of images."""
    if "nsloth" not in row.notes:
        return row.options
    budget, held = number(row.figures.get("budget_gib")), number(row.figures.get("weights_gib"))
    options = {"limit_mm_per_prompt": UNSLOTH_ITEMS, **row.options}
    if options.get("max_num_seqs") or not budget:
        return options
    left = budget - held
    return {
        **options,
        "max_num_seqs": next((count for most, count in UNSLOTH if left <= most), 368),
    }


def subject_of(name: str) -> Subject:
    """The model of a row, from the catalog or by its name; never from a network."""
    from memfit.model import catalog
    from memfit.model.source import from_catalog
    from memfit.serving.subject import subject_from

    if not name:
        raise InputError.one("the model is not named", where="model")
    key = catalog.find(name)
    source = from_catalog(key) if key is not None else by_name(name)
    if source is None:
        raise InputError.one(f"the catalog has no model `{name[:80]}`", where="model")
    return subject_from(source)


def draft_of(row: ServedRow) -> Subject | None:
    """The separate draft model of a row, where the catalog has it."""
    name = draft_name(row.options)
    try:
        return subject_of(name) if name else None
    except InputError:
        return None


def device_of(row: ServedRow, *, needed: bool = True) -> Device:
    """The GPU of a row: its total and what was free, as its log has them, else as listed; a total
    of 0 where it is unknown and not needed."""
    figures = row.figures
    gpu = gpu_of(row)
    said = re.search(r"\(([0-9.]+) GiB\b", row.gpu)
    total = number(figures.get("total_gpu_memory_gib")) * GIB or (
        float(said[1]) * GIB if said else 0.0
    )
    free = number(figures.get("free_at_start_gib") or figures.get("avail_before_load_gb")) * GIB
    shown = number(figures.get("gpu_total_mib")) * MIB  # nvidia-smi's, a little more than CUDA's
    if not total and gpu is not None and not 0 < shown < gpu.memory * SMALLER:
        total = gpu.memory
    total = total or shown
    if not total and not free and needed:
        raise InputError.one("neither the GPU nor its memory is known", where="gpu")
    return Device(
        name=gpu.name if gpu is not None else row.gpu,
        total=int(total or free),
        free=int(free) or None,
        gpu=gpu,
    )


def gpu_of(row: ServedRow) -> GPU | None:
    """The GPU that a row names; of several with one name, the smallest that holds what the log says
    was in use."""
    name = re.sub(r"\s*\(.*\)\s*$", "", row.gpu).strip()
    for candidate in (name, re.sub(r"\s+\d+\s*G[Bi]*B?$", "", name)):
        try:
            return find_gpu(candidate)
        except InputError:
            several = variants(candidate)
        if several:
            used = number(row.figures.get("weights_gib")) + max(
                number(row.figures.get("available_kv_gib")), number(row.figures.get("kv_gib"))
            )
            sized = sorted(several, key=lambda one: one.memory)
            return next((one for one in sized if one.memory > used * GIB), sized[-1])
    return None


def number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0


def measured_figures(row: ServedRow) -> dict[str, float]:
    """What the log said, under the names of `COMPARED`."""
    found = {}
    for name, keys in COMPARED.items():
        value = next((number(row.figures[key]) for key in keys if number(row.figures.get(key))), 0)
        if value:
            found[name] = value
    if number(row.figures.get("weights_mib")):
        found["weights_gib"] = number(row.figures["weights_mib"]) * MIB / GIB
    blocks = number(row.figures.get("gpu_blocks"))
    if blocks and "kv_tokens" not in found:
        found["kv_tokens"] = blocks * number(row.options.get("block_size") or 16)
    planned, made = found.get("kv_gib", 0.0), number(row.figures.get("available_kv_gib"))
    if made > PROFILED * planned > 0:  # the log ends with the pool of a profiling run
        found["kv_gib"] = made
        found.pop("kv_tokens", None)
    used, total = number(row.figures.get("gpu_used_mib")), number(row.figures.get("avail_end_gb"))
    if used:
        found["device_gib"] = used * MIB / GIB
    elif total and number(row.figures.get("avail_before_load_gb")):
        # what was free before the model was loaded, less what is free at the end
        found["device_gib"] = number(row.figures["avail_before_load_gb"]) - total
    return found


@dataclass(frozen=True, kw_only=True)
class ServedFigures:
    """Errors of one figure over complete rows of one engine."""

    n: int
    median: float
    p95: float
    promised_over_5_percent: float | None = None


def summed(outcomes: Iterable[ServedOutcome]) -> dict[str, dict[str, Any]]:
    """By engine: rows, those complete, those of them answered, and the errors of each figure."""
    engines: dict[str, list[ServedOutcome]] = {}
    for one in outcomes:
        engines.setdefault(one.row.engine, []).append(one)
    found = {}
    for engine, all_rows in sorted(engines.items()):
        complete = [one for one in all_rows if one.row.complete]
        evidence = [one for one in complete if one.row.id not in FITTED]
        found[engine] = {
            "rows": len(all_rows),
            "complete": len(complete),
            "answered": sum(one.answered for one in complete),
            "figures": {
                name: figure
                for name in COMPARED
                if (figure := figures_of(name, evidence)) is not None
            },
        }
    return found


def figures_of(name: str, outcomes: Iterable[ServedOutcome]) -> dict[str, Any] | None:
    errors = [error for one in outcomes if (error := one.error(name)) is not None]
    if not errors:
        return None
    sizes = sorted(map(abs, errors))
    made = {"n": len(errors), "median": middle(sizes), "p95": p95(sizes)}
    if name == "kv_tokens":
        made["promised_over_5_percent"] = sum(one > PROMISED for one in errors) / len(errors)
    return made
