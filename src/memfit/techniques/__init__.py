"""How a job is run: each technique, in its own file, marks the Program and nothing else."""

from __future__ import annotations

from memfit.errors import Problem, raise_errors
from memfit.program import Program
from memfit.techniques import attention, dequantize, experts, framework, freeze, inputs, liger, lora, precision, quantize, recompute, stored
from memfit.techniques.base import Technique

TECHNIQUES: tuple[Technique, ...] = (
    inputs.TECHNIQUE,
    precision.TECHNIQUE, stored.TECHNIQUE, dequantize.TECHNIQUE, freeze.TECHNIQUE, quantize.TECHNIQUE, lora.TECHNIQUE, framework.TECHNIQUE, attention.TECHNIQUE,
    liger.TECHNIQUE, recompute.TECHNIQUE, experts.TECHNIQUE,
)  # fmt: skip


def apply(program: Program) -> Program:
    """Every technique that the job asks for, in order; what is wrong with any of them is raised together."""
    return marked(program)[0]


def marked(program: Program) -> tuple[Program, tuple[Problem, ...]]:
    """The same, and beside it what is doubtful or assumed (notes and warnings)."""
    problems: list[Problem] = []
    for technique in TECHNIQUES:
        if technique.wanted(program.job):
            program = technique.apply(program)
            problems += technique.check(program)
    raise_errors(problems)
    return program, tuple(problems)
