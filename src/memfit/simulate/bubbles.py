"""A pipeline's step: the slowest stage works without a pause, and waits while the first micro-batch
comes to it and the last one goes on.

With `m` micro-batches and `v` chunks on a rank the others' work of one chunk of a micro-batch
stands before and behind: the bubble of Megatron-LM (arXiv 2104.04473, section 2.2: (p - 1) / (v m)
of the work where stages are alike). GPipe's is that of 1F1B; only its memory differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memfit.lower.schedules import turns
from memfit.parallel.pipeline.check import LOOPED
from memfit.simulate.time import Duration
from memfit.strategy import PP


def standing(pp: PP, stage: int, micro_batches: int, whole: bool) -> float:
    """For how many passes of the schedule each one on the stage's tape stands: long steady phases
    are cut short there, unless it is `whole`."""
    written = sum(turn.forward for turn in turns(pp, stage, micro_batches, whole=whole))
    return micro_batches * chunks(pp) / written


def chunks(pp: PP) -> int:
    return pp.virtual if pp.schedule in LOOPED else 1


def pipelined(stages: Sequence[Duration], pp: PP, micro_batches: int) -> Duration:
    """All stages' steps together; arithmetic and kernels are those of the mean rank."""
    from statistics import fmean  # takes 2 ms to import, for pipelines alone

    working = [stage.seconds - stage.stepping for stage in stages]
    slowest = max(range(len(stages)), key=lambda place: working[place])
    bubble = (sum(working) - working[slowest]) / (micro_batches * chunks(pp))
    bubble += max(stage.stepping for stage in stages) - stages[slowest].stepping
    found = stages[slowest]
    parts = {**found.parts, "bubble": bubble}
    return dataclasses.replace(
        found,
        seconds=found.seconds + bubble,
        parts=dict(sorted(parts.items(), key=lambda one: -one[1])),
        flops=fmean(stage.flops for stage in stages),
        model_flops=fmean(stage.model_flops for stage in stages),
        kernels=round(fmean(stage.kernels for stage in stages)),
    )


__all__ = ["pipelined", "standing"]
