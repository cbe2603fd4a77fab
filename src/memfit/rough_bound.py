"""A model that neither formulas nor a trace know: weights by its own parameter count, everything
else as the families that can read its config have it, from the least to the most."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from memfit.answers import Band, Parameters
from memfit.band import spread
from memfit.errors import InputError, Problem
from memfit.estimate import Estimate, estimate
from memfit.hardware import Cluster
from memfit.job import Job
from memfit.model.families import families
from memfit.model.likeness import build_like
from memfit.model.model import Model
from memfit.model.source import Source
from memfit.strategy import Strategy
from memfit.verdicts import PASSING, verdict_of

FEWEST = 3  # families; of fewer a range says nothing
FARTHEST = 3  # times as many parameters as the model has, or as few
STATES = ("gradients", "optimizer", "master")  # as many as weights, where all are trained


class Sized(NamedTuple):
    """An estimate by one family, and what it holds with the model's own number of weights."""

    allocated: int
    parts: dict[str, int]
    found: Estimate


def bound(
    model: Model, job: Job, cluster: Cluster | None, strategy: Strategy, total: int
) -> Estimate:
    """The estimate of the family that needs most, its band down to the one that needs least."""
    sized = sorted(_sized(model, job, cluster, strategy, total), key=lambda one: one.allocated)
    if len(sized) < FEWEST:
        raise InputError.one(
            f"too few families can read the config of `{model.name}` for a range",
            where="config.model_type",
            hint="`--like NAME` takes the formulas of a family that you name",
        )
    least, most = sized[0], sized[-1]
    one, said = most.found, spread()
    outside = (one.context.low + one.nccl.low, one.context.high + one.nccl.high)
    passing = sum(most.parts.get(part, 0) for part in PASSING)
    band = Band(
        low=round(said.floor * least.allocated) + outside[0],
        least=round(said.floor * least.allocated) + outside[0],
        high=round(said.high * most.allocated) + outside[1] + passing // 4,
        origin=f"from the least to the most of {len(sized)} families with these sizes",
    )
    memory = dataclasses.replace(
        one.memory, allocated=most.allocated, parts=most.parts, timeline=()
    )
    trained = total if job.training and job.method == "full" else one.parameters.trainable
    return dataclasses.replace(
        one,
        model=model,
        memory=memory,
        band=band,
        verdict=verdict_of(band, one.usable),
        parameters=Parameters(total=total, trainable=trained, active=total),
        source="bound",
        ranks=(),
        problems=one.problems,
    )


def _sized(
    model: Model, job: Job, cluster: Cluster | None, strategy: Strategy, total: int
) -> Iterator[Sized]:
    for name in sorted({one.name for one in families().values()}):
        try:
            like = build_like(name, model.config)
            if not total / FARTHEST <= like.parameters <= total * FARTHEST:
                continue
            found = estimate(like, job, cluster, strategy, precise=False)
        except InputError:
            continue
        share = total / like.parameters
        scaled = ("weights", *(STATES if job.training and job.method == "full" else ()))
        parts = {
            part: round(size * share) if part in scaled else size
            for part, size in found.memory.parts.items()
        }
        yield Sized(sum(parts.values()), parts, found)


def counted(source: Source | None) -> int:
    """The model's parameters: those on record, else those of its file's headers, where they are
    not packed; 0 where nobody knows."""
    if source is None:
        return 0
    if source.parameters or source.tensors is None or source.config.get("quantization_config"):
        return source.parameters or 0
    return sum(one.count for one in source.tensors)


def remark(model: Model, reasons: tuple[Problem, ...]) -> Problem:
    """What such an answer is."""
    why = reasons[0]
    return Problem(
        message=f"{why.message.partition(';')[0]}: weights are exact, the rest is a range over the "
        "families that can read its sizes, not this model's code",
        where=why.where,
        hint=why.hint,
        level="warning",
    )


__all__ = ["bound", "counted", "remark"]
