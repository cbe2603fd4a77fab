"""Published speeds of one request to a serving engine against the time of its steps.

Rows have the tokens of the prompt and of the answer (`seq`), and tokens per second of the answer,
or of both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

from memfit.constants import setting
from memfit.errors import InputError, MemfitError
from memfit.hardware import GPU, Cluster, find_gpu
from memfit.hardware.gpu import variants
from memfit.lazy_dataclass import dataclass
from memfit.plan.engine_search import prompt_seconds
from memfit.serving import find_engine
from memfit.serving.base import Device, Question
from memfit.serving.pace import Engine, Step, step_seconds
from memfit.serving.planned import PLANNED, find_planned
from memfit.truth.rows import BUNDLED
from memfit.truth.served import lines, number, subject_of
from memfit.truth.statistics import middle, p95

METRIC = "throughput_only"
ANSWER, BOTH = "tokens_per_s", "tokens_per_s_prompt_plus_generated"
# A constant was taken from them (vLLM's host, serving/vllm/planned.py): no evidence.
FITTED = ("qwenspeed-0230", "qwenspeed-0231")
MOST: Annotated[int, setting("tokens, and tokens per second, of a row that can be true")] = 10**8
APART: Annotated[float, setting("speeds that differ by more have an order")] = 0.1
# Endings of names for formats that a row has beside its model.
ENDINGS = {"FP8": "-FP8", "GPTQ-Int8": "-GPTQ-Int8", "GPTQ-INT4": "-GPTQ-Int4", "AWQ-INT4": "-AWQ"}


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """One request; `seconds` from its start to its last token."""

    id: str
    engine: str
    version: str
    model: str
    gpu: str
    gpus: int
    prompt: int
    output: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SpeedOutcome:
    """A row with the seconds that memfit says, or why it says none."""

    row: SpeedRow
    seconds: float = 0.0
    reason: str = ""

    @property
    def error(self) -> float:
        """Our tokens per second over theirs, less one."""
        return self.row.seconds / self.seconds - 1


def read_speeds(path: str | Path | None = None) -> list[SpeedRow]:
    """Every speed of one request in a file; None: the bundled collection."""
    found = (speed_row(value) for value in lines(BUNDLED if path is None else Path(path)))
    return [row for row in found if row is not None]


def speed_row(value: Mapping[str, Any]) -> SpeedRow | None:
    """A row as a `SpeedRow`; None where it is none."""
    engine = str(value.get("engine") or "").lower()
    length, speed = value.get("seq"), value.get("speed")
    ours = engine in PLANNED and value.get("metric") == METRIC and value.get("batch") == 1
    if not (ours and isinstance(length, Mapping) and isinstance(speed, Mapping)):
        return None
    prompt, output = (int(number(length.get(name))) for name in ("input", "new_tokens"))
    rate = number(speed.get(ANSWER)) or number(speed.get(BOTH))
    if not (0 < prompt < MOST and 0 < output < MOST and 0 < rate < MOST):
        return None
    gpus = value.get("gpus")
    version = re.search(r"\d+\.\d+[.\w]*", str(value.get("engine_version") or ""))
    model, _, variant = str(value.get("model") or "").partition(" (")
    return SpeedRow(
        id=str(value.get("id") or "?")[:80],
        engine=engine,
        version=version[0].replace(".x", ".0") if version else "",
        model=model + (ENDINGS.get(variant.partition(" ")[0], "") if variant else ""),
        gpu=str(value.get("gpu") or ""),
        gpus=gpus if isinstance(gpus, int) and 0 < gpus < 10_000 else 1,
        prompt=prompt,
        output=output,
        seconds=(output if ANSWER in speed else prompt + output) / rate,
    )


def gpu_of(name: str) -> GPU:
    """The GPU that a row names; of several, the one with the fastest memory."""
    try:
        return find_gpu(name)
    except InputError:
        several = variants(name)
        if not several:
            raise
    return max(several, key=lambda one: one.bandwidth or 0.0)


def judge_speed(row: SpeedRow) -> SpeedOutcome:
    """The prompt's steps, and one for each token of the answer."""
    try:
        gpu = gpu_of(row.gpu)
        planned = find_planned(row.engine, find_engine(row.engine))
        device = Device(name=gpu.name, total=gpu.memory, free=gpu.free, gpu=gpu)
        options = {planned.tensor: row.gpus} if row.gpus > 1 else {}
        found = planned.on_rank(
            Question(
                subject=subject_of(row.model),
                devices=(device,) * row.gpus,
                options=options,
                version=row.version,
            )
        )
    except MemfitError as error:
        return SpeedOutcome(row=row, reason=str(error).splitlines()[0][:160])
    engine = Engine(
        model=found.model,
        rank=found.rank,
        cluster=Cluster(gpu=gpu, gpus_per_node=row.gpus),
        cached=found.cached,
        host=found.host,
    )
    middle_of = row.prompt + row.output // 2
    token = step_seconds(engine, Step(decoding=1, context=middle_of))
    prompt = prompt_seconds(engine, row.prompt, max(1, found.chunk), 0, 0)
    if token is None or prompt is None:
        return SpeedOutcome(row=row, reason="the GPU's rates are not known")
    return SpeedOutcome(row=row, seconds=prompt + row.output * token)


def summed_speeds(outcomes: Iterable[SpeedOutcome]) -> dict[str, dict[str, Any]]:
    """By engine: rows, those answered, the errors, and the share of pairs of one GPU and prompt
    whose order is right."""
    engines: dict[str, list[SpeedOutcome]] = {}
    for one in outcomes:
        engines.setdefault(one.row.engine, []).append(one)
    return {engine: figures(rows) for engine, rows in sorted(engines.items())}


def figures(rows: list[SpeedOutcome]) -> dict[str, Any]:
    answered = [one for one in rows if not one.reason]
    evidence = [one for one in answered if one.row.id not in FITTED]
    sizes = sorted(abs(one.error) for one in evidence)
    right = list(ordered(evidence))
    return {
        "rows": len(rows),
        "answered": len(answered),
        "median": middle(sizes) if sizes else None,
        "p95": p95(sizes) if sizes else None,
        "pairs": len(right),
        "pairs_in_order": sum(right) / len(right) if right else None,
    }


def ordered(rows: list[SpeedOutcome]) -> Iterator[bool]:
    """Whether ours have the order of theirs, for each pair of one version, GPU and load that
    differs."""
    for one, other in combinations(rows, 2):
        a, b = one.row, other.row
        alike = (a.version, a.gpu, a.prompt, a.output) == (b.version, b.gpu, b.prompt, b.output)
        if alike and abs(a.seconds - b.seconds) > APART * min(a.seconds, b.seconds):
            yield (a.seconds < b.seconds) == (one.seconds < other.seconds)


__all__ = ["SpeedOutcome", "judge_speed", "read_speeds", "summed_speeds"]
