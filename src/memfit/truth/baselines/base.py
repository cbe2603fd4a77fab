"""What a baseline is: a published method of estimating, followed by the letter, only to be compared
with."""

from __future__ import annotations

from collections.abc import Callable

from memfit.hardware import GPU
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.strategy import Strategy

Estimator = Callable[[Model, Job, GPU | None], int | None]
Spread = Callable[[Model, Job, GPU | None, Strategy], int | None]
WIDTHS = {
    "fp32": 4,
    "autocast-bf16": 4,
    "autocast-fp16": 4,
}  # bytes of a weight, by precision; 2 for the others


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """`estimate` gives bytes, or None where the method does not apply; `spread` does of one of
    several GPUs. `margin`: it says no above this share of the memory."""

    name: str
    cite: str
    estimate: Estimator
    margin: float = 1.0
    spread: Spread | None = None


def width(job: Job) -> int:
    return WIDTHS.get(job.precision, 2)
