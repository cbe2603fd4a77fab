"""Activations that wait on the host between the passes: torch's hooks on saved tensors, as TRL and
torchtune use them, and torch's own two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from memfit.constants import counted
from memfit.errors import Problem
from memfit.job import Job
from memfit.program import Program
from memfit.strategy import DEFERRED, Strategy
from memfit.techniques.base import TRACE, Technique

HOOKS = {
    "trl": "streams",
    "torchtune": "streams",
    "transformers": "wrapper",
}  # by framework: the way that its users reach first
FORGETS: Annotated[
    tuple[int, int],
    counted(
        "the first version of TRL that forgets a tensor that has left the GPU",
        "trl 1.7 models/activation_offloading.py release_storage_key",
    ),
] = (1, 7)


def check(program: Program) -> Iterator[Problem]:
    job, where = program.job, "job.activation_offload"
    streams = job.activation_offload == "streams"
    if streams and job.framework not in ("trl", "torchtune"):
        message = f"`streams` is offload by TRL and torchtune, not `{job.framework}`"
        yield Problem(
            message=message,
            where=where,
            hint="use `--framework trl`, or `wrapper` or `all`",
        )
    if not streams and not job.hugging:
        message = (
            f"not supported yet: `{job.activation_offload}` around the models of `{job.framework}`"
        )
        yield Problem(
            message=message,
            where=where,
            hint="use `streams` for torchtune, or `--framework transformers`",
        )
    if streams and job.framework == "trl" and job.version("trl") < FORGETS:
        message = "not supported: TRL before 1.7, whose offload depends on memory addresses"
        yield Problem(message=message, where="job.versions", hint="use a newer `trl`, or `wrapper`")
    if streams and job.framework == "torchtune" and job.checkpointing == "none":
        message = "torchtune's activation offloading needs checkpointing"
        yield Problem(message=message, where="job.checkpointing", hint="`full`")
    yield from beside(program, where)


def beside(program: Program, where: str) -> Iterator[Problem]:
    """Layouts without a formula."""
    strategy, job = program.strategy, program.job
    yield from engines(job, strategy)
    if strategy.gemini is not None:
        yield Problem(
            message="not supported yet: activation offload with Gemini",
            where=where,
            hint="use `fsdp` or `zero`",
        )
    cut = [name for name in ("tp", "cp", "ep") if strategy.size(name) > 1]
    if job.activation_offload == "streams" and cut:
        message = f"not supported yet: `streams` under `{cut[0]}`"
        yield Problem(
            message=message,
            where=where,
            hint=f"use `wrapper` with `--checkpointing full`, or {TRACE}",
        )
    if strategy.pp is not None and strategy.pp.schedule in DEFERRED:
        message = (
            f"not supported yet: activation offload with schedule `{strategy.pp.schedule}`, "
            "which reads tensors twice"
        )
        yield Problem(message=message, where="use pp.schedule", hint="use `1f1b` or `interleaved`")


def engines(job: Job, strategy: Strategy) -> Iterator[Problem]:
    """What stops where it runs. torch's hooks copy a tensor into one that they make by its size
    alone, which is none of a mesh: aten.copy_.default got mixed torch.Tensor and DTensor (torch
    2.13 autograd/graph.py save_on_cpu). A layer that is checkpointed saves its input, a plain
    tensor."""
    kind, where = job.activation_offload, "job.activation_offload"
    if not wanted(job):
        return
    if kind == "streams" and strategy.size("pp") > 1:
        message = "`streams` needs a Trainer, which does not run pipeline stages"
        yield Problem(message=message, where=where, hint="use `wrapper`")
    ring = strategy.cp is not None and strategy.cp.size > 1 and strategy.cp.style != "ulysses"
    mesh = "tp" if strategy.size("tp") > 1 else "cp" if ring else ""
    inputs = job.checkpointing == "full" and (kind == "wrapper" or mesh != "tp")
    if kind != "streams" and mesh and not inputs:
        message = f"torch's `save_on_cpu` fails on the DTensors of `{mesh}`"
        yield Problem(
            message=message,
            where=where,
            hint="use `wrapper` with `--checkpointing full`",
        )


def wanted(job: Job) -> bool:
    return job.training and job.activation_offload != "none"


TECHNIQUE = Technique(
    name="activation offload",
    order=210,
    cite=(
        "trl 1.16 models/activation_offloading.py; torchtune 0.6.1 "
        "training/_activation_offloading.py; torch 2.13 autograd/graph.py save_on_cpu"
    ),
    wanted=wanted,
    apply=lambda program: program,
    check=check,
)
