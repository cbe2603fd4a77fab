"""What TRL's trainers ask of the wrapper around a model: as transformers' Trainer does."""

from __future__ import annotations

from memfit.job import Job


def finds_unused(job: Job) -> bool:
    """Whether DDP looks for parameters without a gradient although nobody asked for it: with
    adapters, and without checkpointing (transformers 5.23 trainer.py _build_accelerator_args)."""
    return job.framework == "trl" and (job.adapters or job.checkpointing == "none")


__all__ = ["finds_unused"]
