"""One job at every length of a run: its tapes, live peaks and times, each worked out once."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import Annotated

from memfit.constants import assumed, setting
from memfit.estimate import Estimate, estimate, uncollected
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.lower import lower
from memfit.runs.batches import Batches, Sampling, epoch_steps
from memfit.runs.lengths import Lengths
from memfit.simulate.peaks import peaks
from memfit.simulate.run import Course, Cut, Replayed, cut, replay_run
from memfit.simulate.settings import Settings
from memfit.units import round_up

SHAPES: Annotated[
    int,
    assumed(
        "different lengths to which batches are rounded up; the longest is exact",
        "rounding adds at most 1/48 of the longest batch to a shorter one",
    ),
] = 48
MOST_STEPS: Annotated[int, setting("steps of a run, unless `--steps` says")] = 1000
GRID: Annotated[
    int,
    assumed(
        "lengths at which live peaks and times are computed; between them they are interpolated",
        "both are close to straight lines between a sixth and the next of the longest batch",
    ),
] = 6


@dataclass(frozen=True, kw_only=True)
class Given:
    """The dataset, how batches are made of it, and which part of the run is looked at. `compared`:
    also find what would change the run, as is always done where it may run out of memory."""

    lengths: Lengths
    sampling: Sampling
    steps: int = 0
    seed: int = 0
    evaluate_every: int = 0
    save_every: int = 0
    compared: bool = False

    @property
    def epoch(self) -> int:
        return epoch_steps(self.lengths.tokens, self.sampling, self.lengths.total)

    @property
    def count(self) -> int:
        """Steps that are looked at: one epoch, and no more than a thousand, unless stated."""
        return self.steps or min(MOST_STEPS, self.epoch)

    @property
    def top(self) -> int:
        """The longest batch that may come."""
        if self.sampling.packing:
            return self.sampling.limit
        return round_up(min(self.lengths.longest, self.sampling.limit), self.sampling.multiple)


class Walker:
    """`found`: an estimate of the job on the rank that needs the most; `top`: its longest batch."""

    def __init__(self, found: Estimate, job: Job, top: int, multiple: int = 1) -> None:
        self.found, self.job, self.top = found, dataclasses.replace(job, longest=0), top
        self.quantum = round_up(max(1, -(-top // SHAPES)), multiple)
        self.multiple = multiple
        # Blocks that live from step to step are known only to a tape that is cut as a whole
        self.whole = job.keep_outputs or job.zero_grad != "after_step"
        self.cuts = cache(self._cut)
        self.live = interpolated(self._live, top, multiple)

    def shape(self, tokens: int) -> int:
        return min(self.top, round_up(tokens, self.quantum))

    def _cut(self, tokens: int, first: bool) -> Cut:
        found = self.found
        job = dataclasses.replace(self.job, seq=tokens)
        tape = lower(found.model, job, found.strategy, found.cluster)
        return cut(tape, first=first or self.whole)

    def course(self, made: Batches, evaluate_every: int = 0) -> Course:
        steps = tuple(tuple(map(self.shape, lengths)) for lengths in made.steps)
        every = evaluate_every or len(steps)
        return Course(
            steps=steps,
            evaluate_every=every if self.job.evaluate else 0,
            longest=self.top,
            merged=self.job.merge and self.job.adapters,
        )

    def replay(self, course: Course, settings: Settings, capacity: int | None = None) -> Replayed:
        gpu = self.found.gpu
        total = gpu.memory if gpu is not None and settings.memory_fraction < 1 else None
        with uncollected():
            return replay_run(self.cuts, course, settings, capacity, total=total)

    def _live(self, tokens: int) -> int:
        """The live peak of a run of steps of one length; evaluations and the merge count apart."""
        found = self.found
        job = dataclasses.replace(self.job, seq=tokens, evaluate=False, merge=False)
        tape = lower(found.model, job, found.strategy, found.cluster, compact=True)
        return peaks(tape).allocated

    def seconds(self, tokens: int) -> float | None:
        """Of an optimizer step of one length."""
        found, job = self.found, dataclasses.replace(self.job, seq=tokens)
        timed = estimate(found.model, job, found.cluster, found.strategy, precise=False).time
        return None if timed is None else timed.seconds

    def total_seconds(self, made: Batches, ranks: int) -> float | None:
        """Seconds of all steps. On several GPUs a step takes as long as its longest micro-batch."""
        if self.found.cluster is None or self.seconds(self.top) is None:
            return None
        each = interpolated(lambda tokens: self.seconds(tokens) or 0.0, self.top, self.multiple)
        if ranks > 1:
            return sum(map(each, made.longest))
        return sum(sum(map(each, lengths)) / len(lengths) for lengths in made.steps)


def interpolated(value: Callable[[int], float], top: int, multiple: int) -> Callable[[int], float]:
    """Straight lines between the values at some lengths, which are worked out when first needed."""
    places = sorted(
        {round_up(max(1, top * number // GRID), multiple) for number in range(1, GRID + 1)}
    )
    known = cache(value)

    def between(tokens: int) -> float:
        if len(places) == 1:
            return known(places[0])
        at = min(max(1, bisect_left(places, tokens)), len(places) - 1)
        low, high = places[at - 1], places[at]
        share = (tokens - low) / (high - low)
        return known(low) + share * (known(high) - known(low))

    return between
