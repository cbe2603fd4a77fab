"""What a question leaves open about torch's DDP, and the framework sets."""

from __future__ import annotations

from dataclasses import replace

from memfit.job import Job
from memfit.libraries.trl.trainer import finds_unused
from memfit.strategy import Strategy


def resolved(strategy: Strategy, job: Job, *, tower: bool) -> Strategy:
    """The layouts with DDP's `find_unused` as `yes` or `no`; `tower`: the model has one."""
    ddp = strategy.ddp
    if ddp is None or ddp.find_unused != "auto":
        return strategy
    looks = "yes" if finds_unused(job, tower=tower) else "no"
    return replace(strategy, ddp=replace(ddp, find_unused=looks))


__all__ = ["resolved"]
