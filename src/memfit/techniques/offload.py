"""Activations that wait on the host between the passes: torch's hooks on saved tensors, as TRL and torchtune use them, and torch's own two."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.job import Job
from memfit.program import Program
from memfit.techniques.base import Technique

FORGETS = (1, 7)  # from here on TRL forgets a tensor that has left (trl 1.7 models/activation_offloading.py release_storage_key)


def check(program: Program) -> Iterator[Problem]:
    job, where = program.job, "job.activation_offload"
    streams = job.activation_offload == "streams"
    if streams and job.framework not in ("trl", "torchtune"):
        message = f"the hooks with a stream of their own are TRL's and torchtune's, not of `{job.framework}`"
        yield Problem(message=message, where=where, hint="`--framework trl`, or torch's own `wrapper` or `all`")
    if not streams and not job.hugging:
        message = f"no formula for `{job.activation_offload}` around the models of `{job.framework}`"
        yield Problem(message=message, where=where, hint="`streams` for torchtune, or `--framework transformers`")
    if streams and job.framework == "trl" and job.version("trl") < FORGETS:
        message = "TRL before 1.7 keeps on the GPU whatever lies at the address of a tensor that has left, which depends on the addresses"
        yield Problem(message=message, where="job.versions", hint="a newer `trl`, or `wrapper`")
    if streams and job.framework == "torchtune" and job.checkpointing == "none":
        message = "torchtune's recipes refuse activation offloading without checkpoints"
        yield Problem(message=message, where="job.checkpointing", hint="`full`")
    yield from beside(program, where)


def beside(program: Program, where: str) -> Iterator[Problem]:
    """Weights are told from activations by where they lie: under DeepSpeed and FSDP they lie elsewhere by then, and travel, too (trl 1.16
    models/activation_offloading.py update_model_params, called before the engine takes the weights)."""
    for name, layout in program.strategy.uses():
        if name != "ddp" and (layout.size > 1 or name == "zero"):
            message = f"no formula for activations on the host under `{name}`, where gathered or moved weights would travel with them"
            yield Problem(message=message, where=where, hint="one GPU or `ddp`")


def wanted(job: Job) -> bool:
    return job.training and job.activation_offload != "none"


TECHNIQUE = Technique(
    name="activation offload",
    cite="trl 1.16 models/activation_offloading.py; torchtune 0.6.1 training/_activation_offloading.py; torch 2.13 autograd/graph.py save_on_cpu",
    wanted=wanted, apply=lambda program: program, check=check,
)  # fmt: skip
