"""Gradient checkpointing: marked layers keep their input and run again in backward."""

from __future__ import annotations

from memfit.program import Program
from memfit.techniques.base import Technique


def apply(program: Program) -> Program:
    job = program.job
    step = job.checkpoint_every if job.checkpointing == "every" else 1
    return program.replace(entries=tuple(entry._replace(recompute=entry.number % step == 0) for entry in program.entries))


TECHNIQUE = Technique(
    name="recompute", cite="torch 2.13 torch/utils/checkpoint.py; transformers 5.23 modeling_layers.py",
    wanted=lambda job: job.training and job.checkpointing != "none", apply=apply,
)  # fmt: skip
