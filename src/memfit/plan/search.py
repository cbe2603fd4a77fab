"""Best first through a space: what can be quickest is looked at first, and looked at more closely only while it may still be among the best.

A heap holds nodes by the least time that any candidate under them can take: kernels (a closed form), kernels with a micro-batch (the same
walked once on one GPU), a candidate (with its layout's share), a candidate with its formulas' time, and one whose allocator was replayed.
Nothing is dropped that could have been taken, so the answer is that of trying them all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from memfit.band import spread
from memfit.errors import InputError
from memfit.estimate import Estimate, estimate
from memfit.hardware import usable
from memfit.hardware.outside import context
from memfit.job import Job
from memfit.optimizers import OPTIMIZERS
from memfit.plan.bounds import BESIDE, Bounds, Like, alike, closest
from memfit.plan.holds import Kept, Walked
from memfit.plan.space import Space, label, turned
from memfit.simulate.time import PASSES
from memfit.tape import Alloc

KERNELS, BATCH, CANDIDATE, TIMED = range(4)
CHUNKED = ("liger", "chunked")  # losses that go through a batch in chunks
Progress = Callable[["Counted"], None]


class Node(NamedTuple):
    """`seconds`: no candidate below takes less. `order` makes the search the same each time."""

    seconds: float
    stage: int
    order: tuple[int, ...]
    kernels: Job
    like: Like | None  # whose kernels are among those of a rank
    batch: int = 0
    places: tuple[int, ...] = ()
    times: int = 0
    strategy: int = -1
    optimizer: str = ""


class Kind(NamedTuple):
    """What is ranked apart: the best of each is shown."""

    method: str
    layout: str
    framework: str


@dataclass
class Counted:
    """How far a search went."""

    size: int = 0
    walked: int = 0
    estimated: int = 0
    replayed: int = 0
    best: float | None = None


@dataclass
class Lost:
    """Of a kind that was not taken: the least time it can take (None: not known), the least memory that was found to be needed, a refusal."""

    seconds: float | None = None
    needs: int | None = None
    refused: str = ""


class Passed(NamedTuple):
    """Of a candidate whatever its optimizer: seconds of the passes, those of their kernels, and bytes that they hold at most beside the
    optimizer's states."""

    seconds: float
    kernels: float
    held: int


@dataclass(frozen=True, kw_only=True)
class Found:
    kind: Kind
    estimate: Estimate

    @property
    def seconds(self) -> float | None:
        return None if self.estimate.time is None else self.estimate.time.seconds


@dataclass(kw_only=True)
class Search:
    """`each`: how many kinds are taken of every method. `least_room`: bytes that a candidate may need at most, the GPU's own by default."""

    space: Space
    bounds: Bounds
    each: int = 3
    room: int | None = None
    progress: Progress | None = None
    counted: Counted = field(default_factory=Counted)
    taken: list[Found] = field(default_factory=list)
    lost: dict[Kind, Lost] = field(default_factory=dict)
    heap: list[Node] = field(default_factory=list)
    refused: dict[tuple[Job, int], str] = field(default_factory=dict)
    alike: dict[Job, dict[Like | None, list[int]]] = field(default_factory=dict)
    passed: dict[tuple[object, ...], Passed] = field(default_factory=dict)
    cast: dict[Like, Job] = field(default_factory=dict)
    fixed: dict[tuple[object, ...], tuple[float, Kept]] = field(default_factory=dict)
    quick: dict[Node, Estimate] = field(default_factory=dict)  # asked for another's sake
    failed: set[tuple[object, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        gpu = self.space.cluster.gpu
        self.usable = min(usable(gpu), self.room or usable(gpu))
        self.outside = context(gpu).low
        self.taken_share = 0.0 if self.bounds.rates is None else self.bounds.rates.taken
        self.labels = [label(one) for one in self.space.strategies]
        self.batches = [self.space.batches(one) for one in self.space.strategies]
        places = {strategy: place for place, strategy in enumerate(self.space.strategies)}
        self.closest = [places.get(closest(one), place) for place, one in enumerate(self.space.strategies)]
        self.each_gpu = self.space.work.sequences / self.space.cluster.gpus
        self.counted.size = self.space.size

    def run(self) -> None:
        """Until every method has its best kinds, or nothing is left."""
        for order, job in enumerate(self.space.kernels):
            for at, like in enumerate(self.likes(job)):
                heapq.heappush(self.heap, Node(self.floor(job, like), KERNELS, (order, at), job, like))
        while self.heap:
            node = heapq.heappop(self.heap)
            if self.full(node.kernels.method):
                continue
            self.step(node)
            if self.progress is not None:
                self.progress(self.counted)

    def likes(self, job: Job) -> dict[Like | None, list[int]]:
        """The layouts, by whose kernels those of a rank are."""
        if job not in self.alike:
            found: dict[Like | None, list[int]] = {}
            for place, strategy in enumerate(self.space.strategies):
                like = alike(job, strategy)
                if like is None or not like.cast or self.cast.setdefault(like, job) == job:  # ZeRO makes one of several precisions
                    found.setdefault(like, []).append(place)
            self.alike[job] = found
        return self.alike[job]

    def floor(self, job: Job, like: Like | None) -> float:
        """Seconds of the step that no candidate with these kernels goes below."""
        beside = 0.0 if like is None else self.bounds.moving(like, self.most(job, like)) + self.bounds.splitting(like)
        return self.each_gpu * (self.bounds.compute(job, job.seq) + (0.0 if like is None else like.split * beside))

    def most(self, job: Job, like: Like) -> int:
        """The largest micro-batch of any layout that the walk tells of."""
        return max(size for place in self.likes(job)[like] for size, _ in self.batches[place])

    def full(self, method: str) -> bool:
        return sum(one.kind.method == method for one in self.taken) >= self.each

    def step(self, node: Node) -> None:
        if node.stage == KERNELS:
            self.walk(node)
        elif node.stage == BATCH:
            self.open(node)
        elif node.stage == CANDIDATE:
            self.look(node)
        else:
            self.replay(node)

    # ------------------------------------------------------------------------------------------------ kernels, batch
    def walk(self, node: Node) -> None:
        """One walk, with the largest micro-batch, tells the least that a sequence takes and holds in any. What it is refused, layouts are too."""
        seconds, most, walked = node.seconds, 1, None
        if node.like is not None:
            most = self.most(node.kernels, node.like)
            walked = self.bounds.walked(node.like, most)
            self.counted.walked += 1
            if walked is None:
                return
            each = walked.ideal / most + self.bounds.splitting(node.like)
            seconds = max(seconds, self.each_gpu * node.like.split * each)
        places = self.likes(node.kernels)[node.like]
        for order, size in enumerate(sorted({size for place in places for size, _ in self.batches[place]}, reverse=True)):
            part = None if walked is None or not proportional(node.kernels, most, size) else shrunk(walked, size / most)
            fit = tuple(place for place in places if self.times(place, size) and self.fits(node, place, size, part))
            if fit:
                heapq.heappush(self.heap, node._replace(seconds=seconds, stage=BATCH, order=(*node.order, order), batch=size, places=fit))

    def open(self, node: Node) -> None:
        """Every layout and optimizer for this micro-batch, but those that do not fit for certain."""
        walked = None if node.like is None else self.bounds.walked(node.like, node.batch)
        self.counted.walked += walked is not None
        summed = 0.0 if node.like is None else node.batch * self.bounds.splitting(node.like)
        for place in node.places:
            strategy, times = self.space.strategies[place], self.times(place, node.batch)
            passes = node.seconds
            if node.like is not None and walked is not None:
                share = self.bounds.staged(node.like, strategy, (node.batch, times), walked)
                passes = max(passes, times * share * (walked.seconds + summed))
            calling = self.bounds.calling(node.kernels, strategy, times)
            passes += self.taken_share * calling
            held, between = self.bounds.holds.passing(node.kernels, strategy, (node.batch, times), walked)
            for at, optimizer in enumerate(self.space.optimizers):
                stepping, kept = self.static(node.kernels, place, optimizer)
                if self.lacking(kept.least(held, between, times), node.kernels, place) <= 0:
                    one = node._replace(stage=CANDIDATE, order=(*node.order, place, at), times=times, strategy=place, optimizer=optimizer)
                    heapq.heappush(self.heap, one._replace(seconds=max(passes, calling) + stepping))

    def times(self, place: int, batch: int) -> int:
        """How many such micro-batches make a rank's share; 0: not a whole number."""
        return next((times for size, times in self.batches[place] if size == batch), 0)

    def static(self, kernels: Job, place: int, optimizer: str) -> tuple[float, Kept]:
        """What neither the micro-batch nor checkpointing changes."""
        key = (kernels.framework, kernels.method, kernels.precision, kernels.quant, place, optimizer)
        if key not in self.fixed:
            job, strategy = kernels.replace(optimizer=optimizer), self.space.strategies[place]
            self.fixed[key] = self.bounds.stepping(job, strategy), self.bounds.holds.kept(job, strategy)
        return self.fixed[key]

    def fits(self, node: Node, place: int, batch: int, walked: Walked | None) -> bool:
        times = self.times(place, batch)
        held, between = self.bounds.holds.passing(node.kernels, self.space.strategies[place], (batch, times), walked)
        least = min(self.static(node.kernels, place, one)[1].least(held, between, times) for one in self.space.optimizers)
        return self.lacking(least, node.kernels, place) <= 0

    def lacking(self, least: int, kernels: Job, place: int) -> int:
        """By how much so many live bytes are too many to fit for certain; what a kind lacks is remembered."""
        over = round(spread().high * least) + self.outside - self.usable
        if over > 0:
            lost = self.lost_of(kernels, place)
            needs = self.usable + over
            lost.needs = needs if lost.needs is None else min(lost.needs, needs)
        return over

    # ------------------------------------------------------------------------------------------------ candidates
    def kind(self, kernels: Job, place: int) -> Kind:
        return Kind(kernels.method, self.labels[place], kernels.framework)

    def lost_of(self, kernels: Job, place: int) -> Lost:
        return self.lost.setdefault(self.kind(kernels, place), Lost())

    def job(self, node: Node) -> Job:
        return self.space.work.job_of(node.kernels, node.optimizer, node.batch, node.times)

    def done(self, node: Node) -> bool:
        return any(one.kind == self.kind(node.kernels, node.strategy) for one in self.taken)

    def look(self, node: Node) -> None:
        """Its time by formulas, if it may fit."""
        kind = self.kind(node.kernels, node.strategy)
        lost = self.lost.setdefault(kind, Lost())
        if self.done(node) or (node.kernels, node.strategy) in self.refused:
            return
        seconds = self.sooner(node)
        if seconds is None:
            return
        if seconds > node.seconds * (1 + 1e-9):
            heapq.heappush(self.heap, node._replace(seconds=seconds))
            return
        found = self.asked(node)
        if found is not None and self.short(found, lost) <= 0:
            seconds = found.time.seconds if found.time is not None else node.seconds
            lost.seconds = min(seconds, lost.seconds or seconds) if found.time is not None else None
            heapq.heappush(self.heap, node._replace(seconds=seconds, stage=TIMED))

    def sooner(self, node: Node) -> float | None:
        """The least time that what is known of the same passes leaves it, under another optimizer or in a layout that holds less; None where it
        does not fit."""
        place, near = node.strategy, self.closest[node.strategy]
        stepping, kept = self.static(node.kernels, place, node.optimizer)
        known = self.passed.get(self.passes_of(node))
        if known is not None:
            return None if self.lacking(known.held + kept.states, node.kernels, place) > 0 else known.seconds + stepping
        if near == place:
            return node.seconds
        like = node._replace(strategy=near)
        if self.passes_of(like) not in self.passed and (found := self.asked(like)) is not None:
            self.quick[like._replace(seconds=0.0)] = found
        known, strategy = self.passed.get(self.passes_of(like)), self.space.strategies[place]
        if known is None:
            return node.seconds
        if not strategy.offloads and self.lacking(known.held + kept.states, node.kernels, place) > 0:
            return None
        calling = self.bounds.calling(node.kernels, strategy, node.times)
        return max(node.seconds, max(known.kernels + self.taken_share * calling, calling) + stepping)

    def asked(self, node: Node) -> Estimate | None:
        """By the formulas; what they say of the passes is kept."""
        found = self.quick.pop(node._replace(seconds=0.0), None) or self.ask(node, precise=False)
        if found is not None:
            self.passed[self.passes_of(node)] = passed(found, node.seconds)
        return found

    @staticmethod
    def passes_of(node: Node) -> tuple[object, ...]:
        """What tells the passes: of the optimizer only when it steps."""
        return node.kernels, node.batch, node.strategy, OPTIMIZERS[node.optimizer].when

    def ask(self, node: Node, *, precise: bool) -> Estimate | None:
        work = self.space.work
        try:
            strategy = turned(self.space.strategies[node.strategy], node.times)
            found = estimate(work.model, self.job(node), self.space.cluster, strategy, precise=precise)
        except InputError as bad:
            self.refused[node.kernels, node.strategy] = bad.problems[0].message
            self.lost_of(node.kernels, node.strategy).refused = bad.problems[0].message
            return None
        if precise:
            self.counted.replayed += 1
        else:
            self.counted.estimated += 1
        return found

    def short(self, found: Estimate, lost: Lost) -> int:
        """By how much the band of the live peak alone is too large."""
        high = round(spread().high * found.memory.allocated) + found.context.high + found.nccl.high
        over = high - self.usable
        if over > 0:
            lost.needs = min(high, lost.needs or high)
        return over

    def replay(self, node: Node) -> None:
        """The best that is left of all: taken if it fits with the allocator replayed."""
        if self.done(node) or self.passes_of(node) in self.failed:
            return
        found = self.ask(node, precise=True)
        if found is None:
            return
        kind, lost = self.kind(node.kernels, node.strategy), self.lost_of(node.kernels, node.strategy)
        if found.verdict != "fits" or found.band.high > self.usable:
            lost.needs = min(found.band.high, lost.needs or found.band.high)
            if self.space.strategies[node.strategy].offloads:  # nor with another optimizer, which is on the host
                self.failed.add(self.passes_of(node))
            return
        self.taken.append(Found(kind=kind, estimate=found))
        if self.counted.best is None:
            self.counted.best = node.seconds


def passed(found: Estimate, seconds: float) -> Passed:
    """An optimizer that steps behind the passes changes nothing of them but what it keeps: not less than all that it ever made."""
    often = {place: repeat.times for repeat in found.memory.tape.repeats for place in range(repeat.first, repeat.last)}
    states = 0
    for place, event in enumerate(found.memory.tape):
        if type(event) is Alloc and event.part == "optimizer":
            states += (event.size + 511 & -512) * often.get(place, 1)
    most = max((one.allocated for one in found.memory.timeline if one.moment == "steady step" and one.phase in PASSES), default=0)
    if found.time is None:
        return Passed(seconds, 0.0, most - states)
    kernels = sum(value for kind, value in found.time.parts.items() if kind not in BESIDE)
    return Passed(found.time.seconds - found.time.stepping, kernels, most - states)


def proportional(job: Job, most: int, size: int) -> bool:
    """Whether a smaller micro-batch holds no less than its share of what the largest does: the chunks of Liger's loss are powers of two."""
    return job.loss not in CHUNKED or (most % size == 0 and (most // size).bit_count() == 1)


def shrunk(walked: Walked, share: float) -> Walked:
    return walked._replace(held=int(walked.held * share), between=int(walked.between * share))


__all__ = ["Counted", "Found", "Kind", "Lost", "Search"]
