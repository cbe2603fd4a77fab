"""Gradient checkpointing: marked layers keep their input and run again in backward."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.job import Job
from memfit.program import Program
from memfit.techniques.base import Technique
from memfit.techniques.framework import FACTS


def apply(program: Program) -> Program:
    job = program.job
    step = job.checkpoint_every if job.checkpointing == "every" else 1
    entries = tuple(entry._replace(recompute=entry.number % step == 0) for entry in program.entries)
    return program.replace(entries=entries, input_gradients=hooked(job))


def hooked(job: Job) -> bool:
    """Is enable_input_require_grads called, which makes the embedding's output a leaf? From transformers 5 on always
    (modeling_utils.py _activation_checkpointing_enable); before, by PEFT and TRL, where reentrant checkpoints need it (peft 0.21
    utils/other.py prepare_model_for_kbit_training)."""
    own = job.framework in ("transformers", "trl")
    return own and (job.version("transformers") >= (5, 0) or (job.adapters and job.reentrant))


def check(program: Program) -> Iterator[Problem]:
    """Which operations' results are kept is a policy that the training code passes, and a Trainer passes none (torch 2.13
    torch/utils/checkpoint.py create_selective_checkpoint_contexts)."""
    job = program.job
    if job.checkpointing == "selective" and job.framework not in FACTS:  # others say in their rows what they can do
        message = f"{job.framework} has no policy for selective checkpointing"
        yield Problem(message=message, where="job.checkpointing", hint="`torchtitan` has one; `every` checkpoints one layer in so many")
    if job.checkpointing == "selective" and job.reentrant:
        yield Problem(message="selective checkpointing is not reentrant", where="job.reentrant")


TECHNIQUE = Technique(
    name="recompute", cite="torch 2.13 torch/utils/checkpoint.py; transformers 5.23 modeling_layers.py",
    wanted=lambda job: job.training and job.checkpointing != "none", apply=apply, check=check,
)  # fmt: skip
