"""What a whole run needs: thousands of steps of different lengths, replayed through the allocator,
and how likely it is that one of them runs out of memory."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate

from memfit.answers import RunStep, Texts, WholeRun, WorstBatch
from memfit.band import exceeding
from memfit.estimate import Estimate, estimate, uncollected
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.lower import lower
from memfit.runs.batches import Batches, Sampling, batches, epoch_steps, longest_batches
from memfit.runs.lengths import Lengths
from memfit.simulate.peaks import peaks
from memfit.simulate.run import Course, Cut, Replayed, cut, replay_run
from memfit.simulate.settings import Settings
from memfit.units import round_up

# Lengths are rounded up to so many different ones: each is walked once. The last step up costs at
# most 1/48 of the longest batch, and the longest itself is exact.
SHAPES = 48
MOST_STEPS = 1000  # where nobody says how many
ORDERS, LOOKED_AT = 100, 5_000_000  # seeded orders, and texts in all of them together
GRID = 6  # lengths at which live peaks and times are worked out; between them they are interpolated
NARROW = 6  # halvings of what a step needs at least
CHECKPOINTS = (1, 2, 5)  # steps at which the probability is reported, times powers of ten


@dataclass(frozen=True, kw_only=True)
class Given:
    """The dataset, how batches are made of it, and which part of the run is looked at."""

    lengths: Lengths
    sampling: Sampling
    steps: int = 0
    seed: int = 0
    evaluate_every: int = 0

    @property
    def epoch(self) -> int:
        return epoch_steps(self.lengths.tokens, self.sampling)

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
    """Tapes of one job for every length, each written once."""

    def __init__(self, found: Estimate, job: Job, top: int) -> None:
        self.found, self.job, self.top = found, dataclasses.replace(job, longest=0), top
        self.quantum = max(1, -(-top // SHAPES))
        # Blocks that live from step to step are known only to a tape that is cut as a whole
        self.whole = job.keep_outputs or job.zero_grad != "after_step"
        self.cuts = cache(self._cut)

    def shape(self, tokens: int) -> int:
        return min(self.top, round_up(tokens, self.quantum))

    def _cut(self, tokens: int, first: bool) -> Cut:
        found = self.found
        job = dataclasses.replace(self.job, seq=tokens)
        return cut(
            lower(found.model, job, found.strategy, found.cluster), first=first or self.whole
        )

    def course(self, made: Batches, evaluate_every: int = 0) -> Course:
        steps = tuple(tuple(map(self.shape, lengths)) for lengths in made.steps)
        return Course(steps=steps, evaluate_every=evaluate_every)

    def replay(self, course: Course, settings: Settings, capacity: int | None = None) -> Replayed:
        gpu = self.found.gpu
        total = gpu.memory if gpu is not None and settings.memory_fraction < 1 else None
        with uncollected():
            return replay_run(self.cuts, course, settings, capacity, total=total)

    def live(self, tokens: int) -> int:
        """The live peak of a run of steps of one length."""
        found, job = self.found, dataclasses.replace(self.job, seq=tokens)
        return peaks(lower(found.model, job, found.strategy, found.cluster, compact=True)).allocated

    def seconds(self, tokens: int) -> float | None:
        found, job = self.found, dataclasses.replace(self.job, seq=tokens)
        timed = estimate(found.model, job, found.cluster, found.strategy, precise=False).time
        return None if timed is None else timed.seconds


def whole_run(found: Estimate, job: Job, given: Given) -> WholeRun:
    """`found`: the estimate of the run's usual and longest batch, on the rank that needs the most;
    `job` has the length at which texts are cut."""
    tokens, sampling, count = given.lengths.tokens, given.sampling, given.count
    walker = Walker(found, job, given.top)
    settings = Settings.parse(job.alloc_conf, where="job.alloc_conf")
    made = batches(tokens, sampling, count, given.seed)
    course = walker.course(made, given.evaluate_every)
    free = walker.replay(course, settings)
    limited, room = None, None
    if found.usable is not None:
        room = max(0, found.usable[0] - found.outside)
        limited = walker.replay(course, settings, room) if free.reserved > room else None
    risk = Risk(walker, given, settings, free)
    by = risk.by(count) if room is not None else ()
    seconds = total_seconds(walker, made, given)
    return WholeRun(
        texts=texts_of(given),
        order=sampling.order,
        seed=given.seed,
        epoch=given.epoch,
        steps=tuple(
            RunStep(step=number, tokens=longest, allocated=one.allocated, reserved=one.reserved)
            for number, (one, longest) in enumerate(zip(free.steps, made.longest, strict=True))
        ),
        worst=worst_of(made, free, given),
        evaluation=None if free.evaluation is None else free.evaluation.allocated,
        reserved=free.reserved,
        allocated=free.allocated,
        probability=by[-1] if by else None,
        by=tuple((step, by[step - 1]) for step in checkpoints(count)) if by else (),
        half=half_of(by),
        orders=risk.orders,
        died=None if limited is None else limited.died,
        retries=0 if limited is None else limited.retries,
        squeezed=None if limited is None or limited.died is not None else limited.reserved,
        padding=made.padding,
        seconds=seconds,
        tokens_per_second=None if not seconds else made.real / seconds,
        replays=free.replays,
    )


def texts_of(given: Given) -> Texts:
    lengths, limit = given.lengths, given.sampling.limit
    return Texts(
        origin=lengths.origin,
        total=lengths.total,
        mean=lengths.mean,
        median=lengths.quantile(0.5),
        p99=lengths.quantile(0.99),
        longest=lengths.longest,
        limit=limit,
        cut=sum(one > limit for one in lengths.tokens) / len(lengths.tokens),
        empty=lengths.empty,
    )


def worst_of(made: Batches, free: Replayed, given: Given) -> WorstBatch:
    step = max(range(len(made.longest)), key=made.longest.__getitem__)
    text, lines = made.texts[step], given.lengths.lines
    return WorstBatch(
        step=step,
        tokens=made.longest[step],
        line=lines[text] if lines and text >= 0 else 0,
        allocated=free.steps[step].allocated,
    )


class Risk:
    """How likely a run dies: a step of so many tokens does where its need, times how far published
    peaks were off, is more than the GPU offers."""

    def __init__(self, walker: Walker, given: Given, settings: Settings, free: Replayed) -> None:
        self.walker, self.given, self.settings, self.free = walker, given, settings, free
        looked = given.count * given.sampling.batch * given.sampling.accumulate
        each = max(1, looked * given.sampling.ranks)
        if given.sampling.order not in ("shuffled",):
            each = max(each, len(given.lengths.tokens))
        fixed = given.sampling.order in ("as-is", "sorted") or given.sampling.packing
        self.orders = 1 if fixed else max(3, min(ORDERS, LOOKED_AT // each))
        self.live = interpolated(walker.live, walker.top)

    def by(self, count: int) -> list[float]:
        """The probability that the run has died after each step."""
        gaps = self.gaps()
        found, changes = self.walker.found, [0.0] * count
        usable = found.usable
        assert usable is not None
        chance = cache(
            lambda tokens: exceeding(usable[0] / (gaps * self.live(tokens) + found.outside))
        )
        for order in range(self.orders):
            longest, known = 0, 0.0
            rows = longest_batches(
                self.given.lengths.tokens, self.given.sampling, count, self.given.seed + order
            )
            for step, tokens in enumerate(rows):
                if tokens > longest:
                    longest, before = tokens, known
                    known = chance(tokens)
                    changes[step] += (known - before) / self.orders
        return [min(1.0, max(0.0, one)) for one in accumulate(changes)]

    def gaps(self) -> float:
        """The least memory in which the longest step goes through, over its live peak: the
        allocator gives back what is free as a whole, not the gaps between live blocks."""
        walker, top = self.walker, self.walker.top
        usual = walker.shape(sorted(one.tokens for one in self._steps())[len(self.free.steps) // 2])
        many = self.given.sampling.accumulate
        course = Course(steps=((usual,) * many, (usual,) * many, (top,) * many))
        free = walker.replay(course, self.settings)
        low, high = free.allocated, free.reserved
        for _ in range(NARROW):
            middle = (low + high) // 2
            if walker.replay(course, self.settings, middle).died is None:
                high = middle
            else:
                low = middle
        return high / free.allocated

    def _steps(self) -> Iterator[RunStep]:
        made = batches(
            self.given.lengths.tokens, self.given.sampling, self.given.count, self.given.seed
        )
        for number, longest in enumerate(made.longest):
            yield RunStep(step=number, tokens=longest, allocated=0, reserved=0)


def checkpoints(count: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 … and the last step."""
    found = [one * 10**power for power in range(8) for one in CHECKPOINTS]
    return (*(one for one in found if one < count), count)


def half_of(by: Sequence[float]) -> int | None:
    """The step until which half of the runs that die have died; from 1."""
    if not by or by[-1] <= 0:
        return None
    return bisect_left(by, by[-1] / 2) + 1


def interpolated(value: Callable[[int], int], top: int) -> Callable[[int], float]:
    """Straight lines between the values at some lengths."""
    places = sorted({max(1, top * number // GRID) for number in range(1, GRID + 1)})
    values = [value(place) for place in places]

    def between(tokens: int) -> float:
        if len(places) == 1:
            return float(values[0])
        at = min(max(1, bisect_left(places, tokens)), len(places) - 1)
        low, high = places[at - 1], places[at]
        share = (tokens - low) / (high - low)
        return values[at - 1] + share * (values[at] - values[at - 1])

    return between


def total_seconds(walker: Walker, made: Batches, given: Given) -> float | None:
    """Of all steps: on one GPU those of its own micro-batches, on several those of the longest."""
    if walker.found.cluster is None or walker.seconds(walker.top) is None:
        return None
    each = interpolated(lambda tokens: round(1e9 * (walker.seconds(tokens) or 0.0)), walker.top)
    if given.sampling.ranks > 1:
        return sum(map(each, made.longest)) / 1e9
    return sum(sum(map(each, lengths)) / len(lengths) for lengths in made.steps) / 1e9
