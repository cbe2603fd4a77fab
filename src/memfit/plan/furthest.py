"""How far one option of a job can go: along the live peak, which is quick to tell, then by as much
less as the allocator holds beyond it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

from memfit.constants import setting
from memfit.estimate import shortfall, surplus
from memfit.hardware import Cluster
from memfit.job import Job
from memfit.model.model import Model
from memfit.plan.advice import Setting, bound_shortfall
from memfit.plan.memory_lower_bounds import Holds
from memfit.plan.reverse import last
from memfit.strategy import Strategy

UNIT: Annotated[int, setting("tokens of which a longest context is a multiple")] = 256
SHARE: Annotated[int, setting("part of a length to which its live peak is followed")] = 8
BACK: Annotated[int, setting("part of a number that is not worth another replay")] = 16
FAR: Annotated[int, setting("times the first length from where on a curve is followed")] = 8
OVERHEAD: Annotated[
    float, setting("the allocator's overhead for each byte that grows, where a search begins")
] = 0.2
TRIES: Annotated[int, setting("replays of the allocator for one number, at most")] = 6


class Look:
    """By how many bytes a job does not fit: by its live peak, or with the allocator replayed.
    `overhead` is what the allocator holds beyond each byte that the live peak grows by: gaps and
    cache, as the last search found them."""

    overhead = OVERHEAD

    def __init__(self, model: Model, cluster: Cluster, strategy: Strategy) -> None:
        self.model, self.cluster, self.strategy = model, cluster, strategy
        self.holds = Holds(model)

    def never(self, job: Job) -> bool:
        """Whether a lower bound on the live peak says already that it does not fit."""
        return (bound_shortfall(self.holds, Setting(job, self.strategy), self.cluster) or 0) > 0

    def short(self, job: Job) -> int:
        return shortfall(self.model, job, self.cluster, self.strategy)

    def over(self, job: Job) -> int:
        return surplus(self.model, job, self.cluster, strategy=self.strategy)


class Values:
    """A function of a number of units, asked once for each."""

    def __init__(self, ask: Callable[[int], int]) -> None:
        self.ask: Callable[[int], int] = ask
        self.seen: dict[int, int] = {}

    def __call__(self, count: int) -> int:
        if count not in self.seen:
            self.seen[count] = self.ask(count)
        return self.seen[count]

    def rise(self, count: int) -> int:
        """Bytes for one more, by the two values seen that are nearest."""
        near = sorted(self.seen, key=lambda one: abs(one - count))[:2]
        if len(near) < 2:
            return 0
        return (self.seen[near[1]] - self.seen[near[0]]) // (near[1] - near[0])


class End(NamedTuple):
    """The last number that fits by its live peak, and by how many bytes one more is larger there.
    None beyond `most` is asked for."""

    last: int
    slope: int
    most: int

    def overhead(self, count: int, over: int) -> float:
        """The allocator's overhead at `count`, which lacks `over` bytes there."""
        beyond = over + self.slope * (self.last - count)
        return max(0.0, beyond / (self.slope * count)) if self.slope else 0.0

    def begin(self, overhead: float) -> int:
        """Where memory ends with this overhead. Large numbers begin a little lower, so that the
        first replay is more likely to fit."""
        if not self.slope:
            return self.most
        count = math.floor(self.last / (1 + overhead))
        return max(1, min(self.most, count - count // (2 * BACK)))


def furthest(look: Look, job: Job, name: str, top: int, step: int) -> int:
    """The largest value of an option that fits, 0 where none does. `step` 0: round numbers of
    tokens."""
    unit = step or UNIT
    ends = max(1, top // unit)
    if step == 0 and top < unit:
        unit, ends = 1, top
    if look.never(job.replace(**{name: unit})):
        return 0

    short = Values(lambda count: look.short(job.replace(**{name: count * unit})))
    over = Values(lambda count: look.over(job.replace(**{name: count * unit})))

    start = min(ends, max(1, getattr(job, name) // unit))
    if short(start) > 0:  # even the smallest may not fit
        if start == 1 or short(1) > 0:
            return 0
        first, second = 1, start
    else:
        first, second = start, min(2 * start, ends)
    end = live_end(short, first, second, ends, every=bool(step), curved=job.training)
    if end.last >= ends and top % unit and look.over(job.replace(**{name: top})) <= 0:
        return top
    begin = end.begin(look.overhead)
    if end.overhead(begin, over(begin)) > 1:  # neither a line nor a curve
        end = searched_end(short, first, second, ends)
    found = allocator_end(over, end, look.overhead)
    if found and end.slope:
        look.overhead = end.overhead(found, over(found))
    return found * unit


def live_end(
    short: Values, first: int, second: int, ends: int, *, every: bool, curved: bool
) -> End:
    """Where a live peak has no more room, of which two numbers are known, the first with room. A
    line through them tells it of batches (`every` number counts). Of lengths, a curve through three
    of them where training goes far (`curved`), else a search."""
    rise = (short(second) - short(first)) // max(1, second - first)
    if second == first:
        return End(ends, 0, ends)
    if rise <= 0:  # another phase is the peak still
        return searched_end(short, first, second, ends)
    line = first + -short(first) // rise
    if every:
        return End(line, rise, ends)
    third = 2 * second
    if curved and line >= FAR * first and third <= ends:
        at = (first, second, third)
        return curve_end([(count, short(count)) for count in at], ends)
    return searched_end(short, first, second, ends)


def searched_end(short: Values, first: int, second: int, ends: int) -> End:
    """Where a live peak that is neither a line nor a curve has no more room."""
    known = [(first, short(first))] if short(second) > 0 else []
    found = last(short, ends, second, first if known else 0, known, share=SHARE)
    slope = short.rise(found)
    if found == ends and slope > 0:
        return End(ends + -short(ends) // slope, slope, ends)
    return End(found, slope, found)


def curve_end(points: Sequence[tuple[int, int]], ends: int) -> End:
    """Where the parabola through three points crosses zero, all of them in rising order."""
    (a, low), (b, middle), (c, high) = points
    left, right = (middle - low) / (b - a), (high - middle) / (c - b)
    bend = max(0.0, (right - left) / (c - a))
    slope = left + bend * (2 * c - a - b) if bend else right  # at the last point
    # slope * x + bend * x * x = -high, in the form that does not cancel
    way = -2 * high / (slope + math.sqrt(max(0.0, slope * slope - 4 * bend * high)))
    count = max(1, c + math.floor(way))
    return End(count, max(1, round(slope + 2 * bend * (count - c))), ends)


def allocator_end(over: Callable[[int], int], end: End, overhead: float) -> int:
    """The largest number for which the allocator has room, 0 where none has: from where memory ends
    with the usual overhead, along the line through what was replayed. A sixteenth more is not
    looked for."""
    count, fits, refused = end.begin(overhead), 0, end.most + 1
    seen: list[tuple[int, int]] = []
    for _ in range(TRIES):
        value = over(count)
        seen.append((count, value))
        fits, refused = (count, refused) if value <= 0 else (fits, count)
        if refused == 1:
            return 0
        rise = end.slope * (1 + end.overhead(count, value))
        if len(seen) > 1:
            (one, before), (other, after) = seen[-2:]
            rise = (after - before) / (other - one) or rise
        if rise <= 0:
            rise = max(1, abs(value)) * SHARE / count  # nothing tells: an eighth up or down
        likely = round if len(seen) == 1 and value <= 0 else math.ceil
        count = max(1, min(count - likely(value / rise), refused - 1))
        if fits and (count - fits) * BACK <= fits:
            return fits
    return fits or halved(over, refused)


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
