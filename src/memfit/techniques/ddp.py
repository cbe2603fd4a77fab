"""Replicas: every rank has the whole model and its own sequences."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.program import Program
from memfit.techniques.base import Technique


def check(program: Program) -> Iterator[Problem]:
    job = program.job
    if job.framework == "megatron":
        message = "Megatron's own gradient buffers are not torch's DDP, and no formula knows them over several ranks yet"
        yield Problem(message=message, where="use ddp", hint="another `framework`")


TECHNIQUE = Technique(
    name="ddp", cite="torch 2.13 torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/reducer.cpp", layout="ddp",
    apply=lambda program: program, check=check,
)  # fmt: skip
