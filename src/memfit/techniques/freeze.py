"""Only parts of the model are trained."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.program import Program, placed
from memfit.techniques.base import Technique, names


def apply(program: Program) -> Program:
    """A part with a number may mean some layers and not others, so none stands for its neighbours then."""
    parts = names(program.job.trainable)
    if any(sign.isdigit() for part in parts for sign in part) and any(entry.times > 1 for entry in program.entries):
        program = program.replace(entries=placed(program.model.layers, False))
    return program.replace(trained=parts)


def check(program: Program) -> Iterator[Problem]:
    if not any(program.trains(weight) for weight in program.model.weights()):
        message = f"no parameter's name contains any of `{program.job.trainable[:200]}`"
        yield Problem(message=message, where="job.trainable", hint="for example `lm_head` or `layers.31.`")


TECHNIQUE = Technique(
    name="freeze", cite="requires_grad_(False) on all but the named parameters",
    wanted=lambda job: job.training and job.method == "freeze", apply=apply, check=check,
)  # fmt: skip
