"""Gradient checkpointing: marked layers keep their input and run again in backward."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.job import Job
from memfit.program import Program
from memfit.registry import nearest
from memfit.techniques.base import Technique, names


def apply(program: Program) -> Program:
    job = program.job
    step = job.checkpoint_every if job.checkpointing == "every" else 1
    first = beginnings(program)
    own = [
        entry.number - first[place] for place, entry in enumerate(program.entries)
    ]  # in the stage, or in its turn of it
    most = job.recompute_layers or len(program.model.layers)
    entries = tuple(
        entry._replace(recompute=at % step == 0 and at < most)
        for at, entry in zip(own, program.entries, strict=True)
    )
    return program.replace(entries=entries, input_gradients=hooked(job))


def beginnings(program: Program) -> list[int]:
    """For each entry the number of the layer that its model, or its stage of a pipeline, begins
    with."""
    if program.stage is None:
        return [0] * len(program.entries)
    return [
        program.entries[chunk.first].number
        for chunk in program.stage.chunks
        for _ in range(chunk.first, chunk.last)
    ]


def hooked(job: Job) -> bool:
    """Is enable_input_require_grads called, which makes the embedding's output a leaf? From
    transformers 5 on always (modeling_utils.py _activation_checkpointing_enable); before, by PEFT
    and TRL, where reentrant checkpoints need it (peft 0.21 utils/other.py
    prepare_model_for_kbit_training)."""
    own = job.hugging
    return own and (job.version("transformers") >= (5, 0) or (job.adapters and job.reentrant))


MODULES = (
    "core_attn",
    "mlp",
    "moe",
    "moe_act",
    "shared_experts",
    "layernorm",
)  # of Megatron's; the first is its own default


def check(program: Program) -> Iterator[Problem]:
    """Which results a selective checkpoint keeps is a policy; transformers and TRL hand one on to
    torch as `context_fn` (torch 2.13 torch/utils/checkpoint.py
    create_selective_checkpoint_contexts), others say in their rows what they can do."""
    job = program.job
    if not program.model.checkpoints:
        message = f"the class of `{program.model.family}` has no gradient checkpointing"
        yield Problem(message=message, where="job.checkpointing", hint="use `none`")
    if job.checkpointing == "selective" and job.reentrant:
        yield Problem(message="selective checkpointing cannot be reentrant", where="job.reentrant")
    for name in names(job.recompute_modules):
        if name == "mla_up_proj":
            message = "not supported yet: recomputing the up-projection of latent attention"
            yield Problem(message=message, where="job.recompute_modules", hint="remove it")
        elif name not in MODULES:
            hint = "one of " + ", ".join(nearest(name, MODULES) or MODULES)
            yield Problem(
                message=f"Megatron cannot recompute a module `{name}`",
                where="job.recompute_modules",
                hint=hint,
            )


TECHNIQUE = Technique(
    name="recompute",
    order=200,
    cite="torch 2.13 torch/utils/checkpoint.py; transformers 5.23 modeling_layers.py",
    wanted=lambda job: job.training and job.checkpointing != "none",
    apply=apply,
    check=check,
)
