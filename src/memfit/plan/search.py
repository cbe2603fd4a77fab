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
from memfit.plan.bounds import Bounds, Like, alike
from memfit.plan.space import Space, label, turned

KERNELS, BATCH, CANDIDATE, TIMED = range(4)
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
    passed: dict[tuple[Job, int, int], float] = field(default_factory=dict)
    cast: dict[Like, Job] = field(default_factory=dict)
    fixed: dict[tuple[object, ...], tuple[float, tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        gpu = self.space.cluster.gpu
        self.usable = min(usable(gpu), self.room or usable(gpu))
        self.outside = context(gpu).low
        self.taken_share = 0.0 if self.bounds.rates is None else self.bounds.rates.taken
        self.labels = [label(one) for one in self.space.strategies]
        self.batches = [self.space.batches(one) for one in self.space.strategies]
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
                if like is None or not like.sharded or self.cast.setdefault(like, job) == job:  # ZeRO makes one of several precisions
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
        seconds, held = node.seconds, 0.0
        if node.like is not None:
            most = self.most(node.kernels, node.like)
            walked = self.bounds.walked(node.like, most)
            self.counted.walked += 1
            if walked is None:
                return
            each = walked.ideal / most + self.bounds.splitting(node.like)
            seconds, held = max(seconds, self.each_gpu * node.like.split * each), walked.held / most
        places = self.likes(node.kernels)[node.like]
        for order, size in enumerate(sorted({size for place in places for size, _ in self.batches[place]}, reverse=True)):
            fit = tuple(place for place in places if self.times(place, size) and self.fits(node, place, size, int(held * size)))
            if fit:
                heapq.heappush(self.heap, node._replace(seconds=seconds, stage=BATCH, order=(*node.order, order), batch=size, places=fit))

    def open(self, node: Node) -> None:
        """Every layout and optimizer for this micro-batch, but those that do not fit for certain."""
        walked = None if node.like is None else self.bounds.walked(node.like, node.batch)
        self.counted.walked += walked is not None
        summed = 0.0 if node.like is None else node.batch * self.bounds.splitting(node.like)
        for place in node.places:
            strategy, times = self.space.strategies[place], self.times(place, node.batch)
            passes = node.seconds if walked is None else max(node.seconds, times * (walked.seconds + summed))
            calling = self.bounds.calling(node.kernels, strategy, times)
            passes += self.taken_share * calling
            for at, optimizer in enumerate(self.space.optimizers):
                stepping, (kept, _) = self.static(node.kernels, place, optimizer)
                if walked is None or self.lacking(kept + walked.held, node.kernels, place) <= 0:
                    one = node._replace(stage=CANDIDATE, order=(*node.order, place, at), times=times, strategy=place, optimizer=optimizer)
                    heapq.heappush(self.heap, one._replace(seconds=max(passes, calling) + stepping))

    def times(self, place: int, batch: int) -> int:
        """How many such micro-batches make a rank's share; 0: not a whole number."""
        return next((times for size, times in self.batches[place] if size == batch), 0)

    def static(self, kernels: Job, place: int, optimizer: str) -> tuple[float, tuple[int, int]]:
        """What neither the micro-batch nor checkpointing changes."""
        key = (kernels.framework, kernels.method, kernels.precision, kernels.quant, place, optimizer)
        if key not in self.fixed:
            job, strategy = kernels.replace(optimizer=optimizer), self.space.strategies[place]
            self.fixed[key] = self.bounds.stepping(job, strategy), self.bounds.kept(job, strategy)
        return self.fixed[key]

    def fits(self, node: Node, place: int, batch: int, held: int) -> bool:
        held = max(held, self.bounds.activations(node.kernels, self.space.strategies[place], batch))
        known = (self.static(node.kernels, place, one)[1] for one in self.space.optimizers)
        return self.lacking(min(kept + max(gradients, held) for kept, gradients in known), node.kernels, place) <= 0

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
        known = self.passed.get((node.kernels, node.batch, node.strategy))  # an optimizer changes nothing of the passes
        if known is not None and (seconds := known + self.static(node.kernels, node.strategy, node.optimizer)[0]) > node.seconds * (
            1 + 1e-9
        ):
            heapq.heappush(self.heap, node._replace(seconds=seconds))
            return
        found = self.ask(node, precise=False)
        if found is not None and found.time is not None:
            passes = found.time.seconds - found.time.stepping
            self.passed[node.kernels, node.batch, node.strategy] = passes
        if found is not None and self.short(found, lost) <= 0:
            seconds = found.time.seconds if found.time is not None else node.seconds
            lost.seconds = min(seconds, lost.seconds or seconds) if found.time is not None else None
            heapq.heappush(self.heap, node._replace(seconds=seconds, stage=TIMED))

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
        if self.done(node):
            return
        found = self.ask(node, precise=True)
        if found is None:
            return
        kind, lost = self.kind(node.kernels, node.strategy), self.lost_of(node.kernels, node.strategy)
        if found.verdict != "fits" or found.band.high > self.usable:
            lost.needs = min(found.band.high, lost.needs or found.band.high)
            return
        self.taken.append(Found(kind=kind, estimate=found))
        if self.counted.best is None:
            self.counted.best = node.seconds


__all__ = ["Counted", "Found", "Kind", "Lost", "Search"]
