"""Families whose code came with their checkpoints (`trust_remote_code`) and calls torch by itself,
whatever transformers offers its own models."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.program import Program
from memfit.techniques.base import Technique

FAMILIES = {"qwen": "Qwen/Qwen-7B modeling_qwen.py"}
PLAIN = ("sdpa", "math", "efficient", "flash-attn-2")


def check(program: Program) -> Iterator[Problem]:
    job, code = program.job, FAMILIES.get(program.model.family)
    if code is None:
        return
    checkpointed = job.training and job.checkpointing != "none"
    if checkpointed and (job.checkpointing != "full" or job.recompute_layers):
        yield Problem(
            message=f"this model's own code checkpoints all layers or none ({code})",
            where="job.checkpointing",
            hint="`full`",
        )
    if checkpointed and not job.reentrant:
        message = f"this model's own code uses reentrant checkpointing ({code})"
        yield Problem(message=message, where="job.reentrant", hint="`--reentrant`")
    if job.attention not in PLAIN:
        message = (
            f"this model's own code does not support attention `{job.attention}`, "
            f"only flash-attn and masked SDPA ({code})"
        )
        yield Problem(
            message=message,
            where="job.attention",
            hint="one of " + ", ".join(f"`{one}`" for one in PLAIN),
        )
    if not job.training and job.cache != "dynamic":
        yield Problem(
            message=f"this model's own code keeps its KV cache in tuples ({code})",
            where="job.cache",
            hint="`dynamic`",
        )
    for name, layout in program.strategy.uses():
        if layout.size > 1 and name not in ("ddp", "fsdp", "zero", "split"):
            message = f"not supported yet: `{name}` of a model with its own code ({code})"
            yield Problem(
                message=message, where=f"use {name}", hint="use `ddp`, `fsdp`, `zero` or `split`"
            )


TECHNIQUE = Technique(
    name="brought",
    order=240,
    cite="Qwen/Qwen-7B modeling_qwen.py, December 2023",
    wanted=lambda job: job.hugging,
    apply=lambda program: program,
    check=check,
)
