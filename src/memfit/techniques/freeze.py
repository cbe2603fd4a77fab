"""Only parts of the model are trained."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.program import Program
from memfit.techniques.base import Technique, names, numbered


def apply(program: Program) -> Program:
    parts = names(program.job.trainable)
    return numbered(program.replace(trained=parts), parts)


def check(program: Program) -> Iterator[Problem]:
    if not any(program.trains(weight) for weight in program.model.weights()):
        message = f"no parameter name contains any of `{program.job.trainable[:200]}`"
        yield Problem(
            message=message, where="job.trainable", hint="for example `lm_head` or `layers.31.`"
        )


TECHNIQUE = Technique(
    name="freeze",
    order=60,
    cite="requires_grad_(False) on all but the named parameters",
    wanted=lambda job: job.training and job.method == "freeze",
    apply=apply,
    check=check,
)
