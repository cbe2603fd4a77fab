"""Replicas: every rank has the whole model and its own sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memfit.errors import Problem
from memfit.job import Job
from memfit.parallel.ddp.settings import resolved
from memfit.program import Program
from memfit.strategy import DDP
from memfit.techniques.base import Engines, Technique


def check(program: Program) -> Iterator[Problem]:
    ddp = program.strategy.ddp
    assert ddp is not None
    if ddp.distributed and not program.engine:
        message = "`distributed` needs Megatron"
        yield Problem(
            message=message,
            where="use ddp.distributed",
            hint=("use `--framework megatron`, or `fsdp=8`, which also shards optimizer states"),
        )
    looks = ddp.find_unused == "yes"
    if program.engine and (ddp.bucket_mb or ddp.bucket_view or ddp.static_graph or looks):
        message = "these are settings of torch's DDP, which Megatron does not use"
        yield Problem(
            message=message, where="use ddp", hint="use `distributed`, which is Megatron's setting"
        )
    if program.strategy.fsdp is None and not program.engine:
        yield from stops(program.job, ddp)
        yield from waits(program, ddp)


def stops(job: Job, ddp: DDP) -> Iterator[Problem]:
    """What torch itself stops at, as its own code was seen to (torch 2.13 reducer.cpp
    delay_all_reduce, mark_variable_ready)."""
    if job.training and ddp.static_graph and job.accumulate > 1:
        message = "torch fails if a static graph's first backward accumulates gradients (`no_sync`)"
        yield Problem(message=message, where="use ddp.static_graph", hint="remove it")
    looks = ddp.find_unused == "yes"
    if job.training and looks and job.checkpointing != "none" and job.reentrant:
        message = (
            "torch fails with reentrant checkpointing and `find_unused_parameters`: "
            "a gradient is ready twice"
        )
        hint = f"remove `--reentrant`, or use `--use ddp={ddp.size},find_unused=no`"
        yield Problem(message=message, where="use ddp.find_unused", hint=hint)


def waits(program: Program, ddp: DDP) -> Iterator[Problem]:
    """A step that leaves out a trained parameter ends without its reduction, and the next forward
    fails (torch 2.13 reducer.cpp ensure_prior_reduction_finished)."""
    known = ddp.find_unused == "yes" or ddp.static_graph
    if program.job.training and ddp.size > 1 and not known and program.moving < program.trainable:
        message = (
            "torch's DDP fails at the second step: training on text gives the vision tower no "
            "gradient"
        )
        yield Problem(
            message=message,
            where="use ddp.find_unused",
            hint=f"use `ddp={ddp.size},find_unused=yes`",
        )


def apply(program: Program) -> Program:
    """With what the framework sets where the user does not."""
    strategy = resolved(program.strategy, program.job, tower=bool(program.model.towers))
    return replace(program, strategy=strategy)


TECHNIQUE = Technique(
    name="ddp",
    order=250,
    cite="torch 2.13 torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/reducer.cpp",
    layout="ddp",
    apply=apply,
    check=check,
    engines=Engines(
        modules={"ddp": "memfit.parallel.ddp.engine"}, choose=lambda strategy: "ddp", precedence=5
    ),
)
