"""What would change a run: other settings of the allocator, packing, shorter texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated

from memfit.answers import COMPARED, RunChange
from memfit.constants import setting
from memfit.errors import MemfitError
from memfit.runs.batches import Batches
from memfit.runs.risk import Records, Risk
from memfit.runs.walker import Given, Walker
from memfit.simulate.run import Course
from memfit.simulate.settings import Settings

RARE: Annotated[
    float,
    setting(
        "probability to fail up to which a run fits, as the likely range has one in twenty above it"
    ),
] = 0.05
CONFS = ("expandable_segments:True", "max_split_size_mb:512")
SHARES: Annotated[tuple[float, ...], setting("of the longest batch, tried as a lower limit")] = (
    0.875,
    0.75,
    0.625,
    0.5,
    0.375,
    0.25,
)
AS_IT_IS = "as it is"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A run as it is: what it was replayed on, and how likely it runs out of memory."""

    walker: Walker
    given: Given
    made: Batches
    risk: Risk | None
    orders: Records
    seconds: float | None

    def chance(self, risk: Risk | None) -> float | None:
        return None if risk is None else risk.by(self.orders, self.given.count)[-1]

    def of(self, walker: Walker, settings: Settings) -> Risk | None:
        """The risk under other settings."""
        if self.risk is None:
            return None
        return Risk(walker, settings, self.risk.usual, self.risk.course)


def changes(setting: Setting, settings: Settings) -> Iterator[RunChange]:
    """The changes to a run, each with its reserved memory after the same number of steps."""
    walker, job = setting.walker, setting.walker.job
    course = walker.course(setting.made, setting.given.evaluate_every)
    steps = course.steps[:COMPARED]
    merged = course.merged and len(steps) == len(course.steps)
    course = dataclasses.replace(course, steps=steps, merged=merged)
    yield RunChange(
        name=AS_IT_IS,
        flags="",
        reserved=walker.replay(course, settings).reserved,
        probability=setting.chance(setting.risk),
    )
    for conf in CONFS if not job.alloc_conf else ():
        other = Settings.parse(conf, where="job.alloc_conf")
        yield RunChange(
            name=conf.partition(":")[0],
            flags=f"--alloc-conf {conf}",
            reserved=walker.replay(course, other).reserved,
            probability=setting.chance(setting.of(walker, other)),
        )
    if not job.packing:
        yield from packed(setting, settings)
    yield from shorter(setting)


def packed(setting: Setting, settings: Settings) -> Iterator[RunChange]:
    """Rows filled up to the limit: every step has the same shape, and there is no padding."""
    given, limit = setting.given, setting.given.sampling.limit
    job = dataclasses.replace(setting.walker.job, packing=True)
    walker = Walker(setting.walker.found, job, limit)
    try:
        shape = (limit,) * given.sampling.accumulate
        reserved = walker.replay(Course(steps=(shape,) * 3), settings).reserved
        risk = setting.of(walker, settings)
        one = walker.seconds(limit) if setting.seconds else None
    except (MemfitError, NotImplementedError):
        return  # this model does not take packed rows
    rows = given.sampling.batch * given.sampling.accumulate * given.sampling.ranks
    steps = setting.made.real / (rows * limit)
    yield RunChange(
        name="packing",
        flags="--packing",
        reserved=reserved,
        probability=None if risk is None else risk.by((((0, limit),),), given.count)[-1],
        slower=None if one is None or not setting.seconds else one * steps / setting.seconds - 1,
    )


def shorter(setting: Setting) -> Iterator[RunChange]:
    """The longest limit at which the run rarely runs out of memory, where it often does now."""
    risk, now = setting.risk, setting.chance(setting.risk)
    if risk is None or now is None or now <= RARE:
        return
    for share in SHARES:
        limit = max(1, int(setting.walker.top * share))
        chance = risk.by(setting.orders, setting.given.count, limit)[-1]
        if chance <= RARE:
            yield RunChange(
                name="shorter texts", flags=f"--seq {limit}", reserved=None, probability=chance
            )
            return
