"""Replicas: every rank has the whole model and its own sequences."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.program import Program
from memfit.techniques.base import Technique


def check(program: Program) -> Iterator[Problem]:
    ddp = program.strategy.ddp
    assert ddp is not None
    if ddp.distributed and not program.engine:
        message = "the distributed optimizer is Megatron's"
        yield Problem(message=message, where="use ddp.distributed", hint="`--framework megatron`, or `zero=8,stage=1` and `fsdp=8`")
    if program.engine and (ddp.bucket_mb or ddp.bucket_view or ddp.static_graph or ddp.find_unused):
        message = "these are settings of torch's DDP, and Megatron has buffers of its own"
        yield Problem(message=message, where="use ddp", hint="`distributed` is Megatron's")


TECHNIQUE = Technique(
    name="ddp",
    cite="torch 2.13 torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/reducer.cpp",
    layout="ddp", apply=lambda program: program, check=check,
)  # fmt: skip
