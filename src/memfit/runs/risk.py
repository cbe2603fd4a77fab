"""How likely a run runs out of memory, and by which step: over seeded orders of its texts, and over
how far estimates are off."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Annotated

from memfit.band import exceeding
from memfit.constants import setting
from memfit.runs.batches import longest_batches
from memfit.runs.walker import Given, Walker
from memfit.simulate.run import Course
from memfit.simulate.settings import Settings

ORDERS: Annotated[int, setting("seeded orders of the texts, at most")] = 100
LOOKED_AT: Annotated[int, setting("texts in all seeded orders together")] = 5_000_000
FIXED = ("as-is", "sorted")  # orders that are the same for every seed
NARROW: Annotated[int, setting("halvings in the search of the least memory of a step")] = 6
CHECKPOINTS: Annotated[
    tuple[int, ...],
    setting("steps at which the probability is reported, times powers of ten"),
] = (1, 2, 5)

Records = tuple[tuple[tuple[int, int], ...], ...]


def records(given: Given) -> Records:
    """(step, tokens) of every batch that is longer than all before it, for each seeded order."""
    tokens, sampling, count = given.lengths.tokens, given.sampling, given.count
    each = count * sampling.batch * sampling.accumulate * sampling.ranks
    if sampling.order != "shuffled":
        each = max(each, len(tokens))  # all texts are sorted
    fixed = sampling.order in FIXED or sampling.packing
    orders = 1 if fixed else max(3, min(ORDERS, LOOKED_AT // each))
    found = []
    for order in range(orders):
        longest, own = 0, []
        for step, size in enumerate(longest_batches(tokens, sampling, count, given.seed + order)):
            if size > longest:
                longest = size
                own.append((step, size))
        found.append(tuple(own))
    return tuple(found)


class Risk:
    """The probability of running out of memory. A step fails if its predicted memory, times the
    error of published peaks, exceeds usable memory; so do an evaluation and the merge at the end.
    `course`: the run, with its evaluations."""

    def __init__(self, walker: Walker, settings: Settings, usual: int, course: Course) -> None:
        found = walker.found
        assert found.usable is not None
        self.walker, self.settings, self.course = walker, settings, course
        self.usual, self.accumulate = walker.shape(usual), len(course.steps[0])
        self.usable, self.outside = found.usable[0], found.outside
        self.gaps = self._gaps()
        self.chance = cache(self._chance)
        self.of_evaluation, self.of_merge = cache(self._of_evaluation), cache(self._of_merge)

    def _chance(self, tokens: int) -> float:
        return self._beyond(self.gaps * self.walker.live(tokens))

    def _beyond(self, need: float) -> float:
        return exceeding(self.usable / (need + self.outside))

    def _of_evaluation(self, tokens: int) -> float:
        """Probability that evaluating a batch of texts of this length runs out of memory."""
        steps = ((self.usual,) * self.accumulate,) * 2
        return self._beyond(self._least(Course(steps=steps, evaluate_every=2, longest=tokens))[1])

    def _of_merge(self) -> float:
        steps = ((self.usual,) * self.accumulate,) * 2
        return self._beyond(self._least(Course(steps=steps, merged=True))[1])

    def ends(self, count: int, limit: int | None) -> list[tuple[int, float]]:
        """(step, probability) of the first evaluation, which is as large as all later ones, and of
        the merge."""
        every, found = self.course.evaluate_every, list[tuple[int, float]]()
        if 0 < every <= count:
            longest = self.course.longest or self.walker.top
            found.append((every - 1, self.of_evaluation(min(longest, limit or longest))))
        if self.course.merged:
            found.append((count - 1, self.of_merge()))
        return found

    def by(self, orders: Records, count: int, limit: int | None = None) -> list[float]:
        """The probability that the run has ended after each step; `limit`: with texts cut there."""
        changes, ends = [0.0] * count, self.ends(count, limit)
        for order in orders:
            known = 0.0
            steps = (
                (step, self.chance(tokens if limit is None else min(tokens, limit)))
                for step, tokens in order
            )
            for step, chance in sorted((*steps, *ends)):
                if chance > known:
                    changes[step] += (chance - known) / len(orders)
                    known = chance
        return [min(1.0, max(0.0, one)) for one in accumulate(changes)]

    def _gaps(self) -> float:
        """The least memory in which the longest step goes through, over its live peak: the
        allocator gives back what is free as a whole, not the gaps between live blocks."""
        walker, many = self.walker, self.accumulate
        steps = ((self.usual,) * many, (self.usual,) * many, (walker.top,) * many)
        live, least = self._least(Course(steps=steps))
        return least / live

    def _least(self, course: Course) -> tuple[int, int]:
        """The live peak, and the least memory in which the course goes through."""
        walker = self.walker
        free = walker.replay(course, self.settings)
        low, high = free.allocated, free.reserved
        for _ in range(NARROW):
            middle = (low + high) // 2
            if walker.replay(course, self.settings, middle).died is None:
                high = middle
            else:
                low = middle
        return free.allocated, high


def checkpoints(count: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 … and the last step."""
    found = [one * 10**power for power in range(8) for one in CHECKPOINTS]
    return (*(one for one in found if one < count), count)


def half_of(by: Sequence[float]) -> int | None:
    """The step until which half of the runs that run out of memory have done so; from 1."""
    if not by or by[-1] <= 0:
        return None
    return bisect_left(by, by[-1] / 2) + 1
