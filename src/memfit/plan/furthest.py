"""How far one option of a job can go: along the line of the live peak, then back until the
allocator has room."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Protocol

from memfit.constants import setting
from memfit.estimate import shortfall, surplus
from memfit.hardware import Cluster
from memfit.job import Job
from memfit.model.model import Model
from memfit.plan.advice import Setting, bound_shortfall
from memfit.plan.memory_lower_bounds import Holds
from memfit.plan.reverse import Points, last
from memfit.strategy import Strategy

UNIT: Annotated[int, setting("tokens of which a longest context is a multiple")] = 256
SHARE: Annotated[int, setting("part of a length to which its live peak is followed")] = 8
EXACT: Annotated[int, setting("part of a unit to which a live peak lies on a line")] = 16
BACK: Annotated[int, setting("part of a number that a step back may have been too long")] = 16
TRIES: Annotated[int, setting("precise estimates of what a line promises, at most")] = 6


class Look:
    """By how many bytes a job does not fit: by its live peak, or with the allocator replayed."""

    def __init__(self, model: Model, cluster: Cluster, strategy: Strategy) -> None:
        self.model, self.cluster, self.strategy = model, cluster, strategy
        self.holds = Holds(model)

    def never(self, job: Job) -> bool:
        """Whether a lower bound on the live peak says already that it does not fit."""
        return (bound_shortfall(self.holds, Setting(job, self.strategy), self.cluster) or 0) > 0

    def short(self, job: Job, precise: bool = False) -> int:
        return shortfall(self.model, job, self.cluster, self.strategy, replayed=precise)

    def over(self, job: Job) -> int:
        return surplus(self.model, job, self.cluster, strategy=self.strategy)


def furthest(look: Look, job: Job, name: str, top: int, step: int) -> int:
    """The largest value of an option that fits, 0 where none does: along the line of the live peak,
    then back until the allocator has room. `step` 0: round numbers of tokens."""
    seen: dict[int, int] = {}
    unit = step or UNIT
    ends = max(1, top // unit)
    if step == 0 and top < unit:
        unit, ends = 1, top

    def short(count: int, precise: bool = False) -> int:
        if count not in seen:
            seen[count] = look.short(job.replace(**{name: count * unit}), precise)
        return seen[count]

    start = min(ends, max(1, getattr(job, name) // unit))
    if look.never(job.replace(**{name: unit})):
        return 0
    good: int = 0
    if start > 1 and short(start) > 0:  # even the smallest may not fit
        if short(1) > 0:
            return 0
        good = 1
    known = ((1, seen[1]),) if good else ()
    found = live_end(short, seen, ends, start, known) if step else 0  # lengths are no line
    found = found or last(short, ends, start, good, known, share=SHARE)
    if found == ends and top % unit and look.over(job.replace(**{name: top})) <= 0:
        return top
    refused, excess = found, 0
    for _ in range(TRIES):
        if found < 1:
            break
        over = look.over(job.replace(**{name: found * unit}))
        if over <= 0:
            return nearer(look, job, name, unit, (found, over), (refused, excess)) * unit
        refused, excess = found, over
        slope = rise(seen, found)
        found -= max(1, -(-over // slope) if slope > 0 else found // 8)
    return halved(lambda count: look.over(job.replace(**{name: count * unit})), refused) * unit


def nearer(
    look: Look, job: Job, name: str, unit: int, fits: tuple[int, int], not_fits: tuple[int, int]
) -> int:
    """A larger number of units where a step back went further than it had to, by the line between
    the two: the likely range may be wider than the live peak's slope says."""
    (low, room), (high, excess) = fits, not_fits
    if high <= low:
        return low
    count = low + (high - low) * -room // (excess - room)
    if (count - low) * BACK <= low or look.over(job.replace(**{name: count * unit})) > 0:
        return low
    return count


class Short(Protocol):
    """The bytes that this many units lack by their live peak; `precise`: by the walk whose
    allocations are replayed, if that is asked for next."""

    def __call__(self, count: int, precise: bool = False) -> int: ...


def live_end(short: Short, seen: dict[int, int], top: int, start: int, known: Points) -> int:
    """The last number of units whose live peak has room, where two values and the end that their
    line says are on one line; 0 where they are not."""

    def guess(count: int) -> int:
        return short(count) if count in seen or len(seen) < 2 else on_line(seen, count)

    found = last(guess, top, start, len(known), known, share=SHARE)
    if found in seen or found < 1:
        return 0
    off = on_line(seen, found) - short(found, True)
    return found if abs(off) * EXACT <= abs(rise(seen, found)) else 0


def on_line(seen: Mapping[int, int], count: int) -> int:
    """The line through the first two values."""
    (a, low), (b, high) = list(seen.items())[:2]
    return low + (high - low) * (count - a) // (b - a)


def rise(seen: Mapping[int, int], value: int) -> int:
    """Bytes for one more, by the two values seen that are nearest."""
    near = sorted(seen, key=lambda one: abs(one - value))[:2]
    if len(near) < 2:
        return 0
    return (seen[near[1]] - seen[near[0]]) // (near[1] - near[0])


def halved(over: Callable[[int], int], refused: int) -> int:
    """A number below `refused` that fits, near the largest; 0 where not even one does."""
    if refused < 2 or over(1) > 0:
        return 0
    low, high = 1, refused
    for _ in range(TRIES):
        middle = (low + high) // 2
        if middle == low:
            break
        low, high = (middle, high) if over(middle) <= 0 else (low, middle)
    return low


__all__ = ["TRIES", "UNIT", "Look", "furthest"]
