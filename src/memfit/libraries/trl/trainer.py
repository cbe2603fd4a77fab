"""What TRL's trainers ask of the wrapper around a model: as transformers' Trainer does."""

from __future__ import annotations

from memfit.job import Job

TOWERS = (1, 16)  # first version seen to look for a tower's parameters; 1.10 does not


def finds_unused(job: Job, *, tower: bool) -> bool:
    """Whether DDP looks for parameters without a gradient although nobody asked for it: with
    adapters, without checkpointing (transformers 5.23 trainer.py _build_accelerator_args), and
    where a model has a vision tower (trl 1.16 trainer/sft_trainer.py, if not reentrant)."""
    if job.framework != "trl":
        return False
    sees = tower and job.version("trl") >= TOWERS and not job.reentrant
    return job.adapters or job.checkpointing == "none" or sees


__all__ = ["finds_unused"]
