"""Rules of thumb: a fixed number of bytes for each parameter."""

from __future__ import annotations

from memfit.hardware import GPU
from memfit.job import Job
from memfit.model.model import Model
from memfit.truth.baselines.base import Baseline, width


def weights_only(model: Model, job: Job, gpu: GPU | None) -> int | None:
    """X billion parameters need 2·X GB in 16 bits, 4·X GB in 32, X in 8, X/2 in 4; said of
    inference."""
    if job.training:
        return None
    bits = {"none": 8 * width(job), "int8": 8}.get(job.quantization, 4)
    return model.parameters * bits // 8


def eight(model: Model, job: Job, gpu: GPU | None) -> int | None:
    """Fine-tuning X billion parameters in bf16 needs about 8·X GB."""
    return 8 * model.parameters if job.training and job.method == "full" else None


TWO_FOUR = Baseline(
    name="2X/4X",
    cite="transformers docs/source/en/llm_tutorial_optimization.md, 2023-09",
    estimate=weights_only,
)
EIGHT = Baseline(
    name="8X",
    cite="blogs after that page: 56 GB to fine-tune 7 B parameters in bf16",
    estimate=eight,
)
