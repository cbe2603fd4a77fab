"""Only parts of the model are trained."""

from __future__ import annotations

from memfit.program import Program
from memfit.techniques.base import Technique, names

TECHNIQUE = Technique(
    name="freeze", cite="requires_grad_(False) on all but the named parameters",
    wanted=lambda job: job.training and job.method == "freeze", apply=lambda program: program.replace(trained=names(program.job.trainable)),
)  # fmt: skip
__all__ = ["Program", "TECHNIQUE"]
