"""Best first through a space: what can be quickest is looked at first, and looked at more closely only while it may still be among the best.

A heap holds nodes by the least time that any candidate under them can take: kernels (a closed form), kernels with a micro-batch (the same
walked once on one GPU), a candidate (with its layout's share), a candidate with its formulas' time, and one whose allocator was replayed.
Nothing is dropped that could have been taken, so the answer is that of trying them all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from memfit.band import spread
from memfit.errors import InputError
from memfit.estimate import Estimate, estimate, uncollected
from memfit.hardware import usable
from memfit.hardware.outside import context
from memfit.job import Job
from memfit.optimizers import OPTIMIZERS
from memfit.plan.bounds import Bounds, Like, alike, closest, sharing
from memfit.plan.holds import Held, Kept, Walked
from memfit.plan.learnt import Beyond, Passed, passed, sending
from memfit.plan.space import Space, label, turned

KERNELS, BATCH, CANDIDATE, TIMED = range(4)
TIED = 0.002  # of a step: steps of optimizers differ by more than their bounds do
ALIKE = 0.9  # of a layout's own kernels: of other sizes they reach other rates
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
    behind: Iterator[Entry] | None = None  # candidates with the same micro-batch that take no less

    @property
    def name(self) -> tuple[object, ...]:
        """Of a candidate."""
        return *self.order[:3], self.strategy, self.optimizer


class Entry(NamedTuple):
    """A candidate of a micro-batch: what `Node` says of it."""

    seconds: float
    place: int
    at: int
    times: int


class Known(NamedTuple):
    """Of a micro-batch, what layouts have in common: bytes of the passes, and the least at the peak."""

    passing: dict[tuple[int, int], tuple[int, int]]
    least: dict[tuple[int, int, int], int]


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
    passed: dict[tuple[object, ...], Passed] = field(default_factory=dict)
    cast: dict[Like, Job] = field(default_factory=dict)
    beyond: dict[tuple[object, ...], list[Beyond]] = field(default_factory=dict)
    called: dict[tuple[int, int, int], float] = field(default_factory=dict)
    sorts: dict[tuple[str, ...], int] = field(default_factory=dict)
    fixed: dict[tuple[int, int], tuple[tuple[float, Kept], ...]] = field(default_factory=dict)
    same: dict[tuple[tuple[float, Kept], ...], tuple[tuple[float, Kept], ...]] = field(default_factory=dict)  # what layouts have in common
    quick: dict[tuple[object, ...], Estimate] = field(default_factory=dict)  # asked for another's sake
    failed: set[tuple[object, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        gpu = self.space.cluster.gpu
        self.usable = min(usable(gpu), self.room or usable(gpu))
        self.outside, self.high = context(gpu).low, spread().high
        self.most_live = int((self.usable - self.outside) / self.high)  # bytes; more do not fit for certain
        self.taken_share = 0.0 if self.bounds.rates is None else self.bounds.rates.taken
        self.labels = [label(one) for one in self.space.strategies]
        self.batches = [dict(self.space.batches(one)) for one in self.space.strategies]
        self.inner = numbered([(one.tp, one.cp, one.pp) for one in self.space.strategies])
        places = {strategy: place for place, strategy in enumerate(self.space.strategies)}
        self.closest = [places.get(closest(one), place) for place, one in enumerate(self.space.strategies)]
        self.sharing: dict[tuple[object, ...], list[int]] = {}
        for place, strategy in enumerate(self.space.strategies):
            self.sharing.setdefault(sharing(strategy), []).append(place)
        self.each_gpu = self.space.work.sequences / self.space.cluster.gpus
        self.counted.size = self.space.size

    def run(self) -> None:
        """Until every method has its best kinds, or nothing is left."""
        for order, job in enumerate(self.space.kernels):
            for at, like in enumerate(self.likes(job)):
                heapq.heappush(self.heap, Node(self.floor(job, like), KERNELS, (order, at), job, like))
        with uncollected():
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
            for places in self.sharing.values():
                like = alike(job, self.space.strategies[places[0]])
                if like is None or not like.cast or self.cast.setdefault(like, job) == job:  # ZeRO makes one of several precisions
                    found.setdefault(like, []).extend(places)
            self.alike[job] = {like: sorted(places) for like, places in found.items()}
        return self.alike[job]

    def floor(self, job: Job, like: Like | None) -> float:
        """Seconds of the step that no candidate with these kernels goes below."""
        beside = 0.0 if like is None else self.bounds.moving(like, most := self.most(job, like)) + self.bounds.splitting(like, most)
        return self.each_gpu * (self.bounds.compute(job, job.seq) + (0.0 if like is None else like.split * beside))

    def most(self, job: Job, like: Like) -> int:
        """The largest micro-batch of any layout that the walk tells of."""
        return max(size for place in self.likes(job)[like] for size in self.batches[place])

    def full(self, method: str) -> bool:
        return sum(one.kind.method == method for one in self.taken) >= self.each

    def step(self, node: Node) -> None:
        if node.stage == KERNELS:
            self.walk(node)
        elif node.stage == BATCH:
            self.open(node)
        elif node.stage == CANDIDATE:
            if node.behind is not None:
                self.following(node, node.behind)
            self.look(node._replace(behind=None))
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
            each = walked.ideal / most + self.bounds.splitting(node.like, most)
            seconds = max(seconds, self.each_gpu * node.like.split * each)
        places = self.likes(node.kernels)[node.like]
        for order, size in enumerate(sorted({size for place in places for size in self.batches[place]}, reverse=True)):
            part = None if walked is None or not proportional(node.kernels, most, size) else shrunk(walked.room, size / most)
            one, holding = node._replace(batch=size), Known({}, {})
            fit = tuple(place for place in places if size in self.batches[place] and self.fits(one, place, part, holding))
            if fit:
                heapq.heappush(self.heap, node._replace(seconds=seconds, stage=BATCH, order=(*node.order, order), batch=size, places=fit))

    def open(self, node: Node) -> None:
        """Every layout and optimizer for this micro-batch, but those that do not fit for certain: the next of them waits behind the first."""
        walked = None if node.like is None else self.bounds.walked(node.like, node.batch)
        self.counted.walked += walked is not None
        moments: dict[tuple[int, int], float] = {}
        holding: dict[tuple[int, int], tuple[int, int]] = {}
        short: dict[str, int] = {}
        found: list[Entry] = []
        for place in node.places:
            times = self.batches[place][node.batch]
            key = self.inner[place], times
            if key not in moments:
                moments[key] = self.passes(node, place, walked)
            calling = self.calling(node.kernels, place, times)
            passes = max(moments[key] + self.taken_share * calling, calling)
            held, between = self.passing(node, place, None if walked is None else walked.room, holding)
            for at, (stepping, kept) in enumerate(self.statics(node.kernels, place)):
                if (least := kept.least(held, between, times)) <= self.most_live:
                    found.append(Entry(passes + stepping, place, at, times))
                else:
                    short[self.labels[place]] = min(least, short.get(self.labels[place], least))
        for name, least in short.items():
            self.lack(Kind(node.kernels.method, name, node.kernels.framework), least)
        self.following(node, iter(sorted(found)))

    def following(self, node: Node, entries: Iterator[Entry]) -> None:
        """The next of a micro-batch's candidates."""
        one = next(entries, None)
        if one is not None:
            optimizer, order = self.space.optimizers[one.at], (*node.order[:3], one.place, one.at)
            heapq.heappush(
                self.heap,
                Node(one.seconds, CANDIDATE, order, node.kernels, node.like, node.batch, (), one.times, one.place, optimizer, entries),
            )

    def passes(self, node: Node, place: int, walked: Walked | None) -> float:
        """Seconds of the kernels of all micro-batches, and of the sums that split products wait for."""
        if node.like is None or walked is None:
            return node.seconds
        strategy, times = self.space.strategies[place], self.batches[place][node.batch]
        share = self.bounds.staged(node.like, strategy, (node.batch, times), walked, closely=False)
        return max(node.seconds, times * share * (walked.seconds + node.batch * self.bounds.splitting(node.like, node.batch)))

    def passing(self, node: Node, place: int, walked: Held | None, known: dict[tuple[int, int], tuple[int, int]]) -> tuple[int, int]:
        """What the passes hold, which is the same in all layouts that split the model alike."""
        times = self.batches[place][node.batch]
        if (self.inner[place], times) not in known:
            found = self.bounds.holds.passing(node.kernels, self.space.strategies[place], (node.batch, times), walked)
            known[self.inner[place], times] = found
        return known[self.inner[place], times]

    def calling(self, kernels: Job, place: int, times: int) -> float:
        key = (self.sort(kernels), place, times)
        if key not in self.called:
            self.called[key] = self.bounds.calling(kernels, self.space.strategies[place], times)
        return self.called[key]

    def sort(self, kernels: Job) -> int:
        """The number of what neither the micro-batch nor checkpointing changes."""
        return self.sorts.setdefault((kernels.framework, kernels.method, kernels.precision, kernels.quant), len(self.sorts))

    def statics(self, kernels: Job, place: int) -> tuple[tuple[float, Kept], ...]:
        """Of each optimizer: seconds of its step, and bytes that are kept, whatever the micro-batch."""
        key = self.sort(kernels), place
        if key not in self.fixed:
            strategy, bounds = self.space.strategies[place], self.bounds
            jobs = [kernels.replace(optimizer=optimizer) for optimizer in self.space.optimizers]
            found = tuple((bounds.stepping(job, strategy), bounds.holds.kept(job, strategy)) for job in jobs)
            self.fixed[key] = self.same.setdefault(found, found)
        return self.fixed[key]

    def static(self, kernels: Job, place: int, optimizer: str) -> tuple[float, Kept]:
        return self.statics(kernels, place)[self.space.optimizers.index(optimizer)]

    def fits(self, node: Node, place: int, walked: Held | None, known: Known) -> bool:
        times, statics = self.batches[place][node.batch], self.statics(node.kernels, place)
        key = id(statics), self.inner[place], times
        if key not in known.least:
            held, between = self.passing(node, place, walked, known.passing)
            known.least[key] = min(kept.least(held, between, times) for _, kept in statics)
        return self.lacking(known.least[key], node.kernels, place) <= 0

    def lacking(self, least: int, kernels: Job, place: int) -> int:
        """By how much so many live bytes are too many to fit for certain; what a kind lacks is remembered."""
        return least - self.most_live if least <= self.most_live else self.lack(self.kind(kernels, place), least)

    def lack(self, kind: Kind, least: int) -> int:
        lost, needs = self.lost.setdefault(kind, Lost()), round(self.high * least) + self.outside
        lost.needs = needs if lost.needs is None else min(lost.needs, needs)
        return needs - self.usable

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
        if self.done(node) or (node.kernels, node.strategy) in self.refused or self.crowded(node):
            return
        seconds = 0.0 if node.name in self.quick else self.later(node)
        if node.name not in self.quick and seconds <= node.seconds * (1 + 1e-9):
            sooner = self.sooner(node)
            if sooner is None:
                return
            seconds = sooner
        if seconds > node.seconds * (1 + 1e-9):
            heapq.heappush(self.heap, node._replace(seconds=seconds))
            return
        found = self.asked(node)
        if found is not None and self.short(found, lost) <= 0:
            seconds = found.time.seconds if found.time is not None else node.seconds
            lost.seconds = min(seconds, lost.seconds or seconds) if found.time is not None else None
            heapq.heappush(self.heap, node._replace(seconds=seconds, stage=TIMED))

    def crowded(self, node: Node) -> bool:
        """Whether what the micro-batches under way leave on a pipeline's first stage is too much for certain."""
        strategy = self.space.strategies[node.strategy]
        walked = None if node.like is None or strategy.size("pp") == 1 else self.bounds.walked(node.like, node.batch)
        if node.like is None or walked is None:
            return False
        staying = self.bounds.staying(node.like, strategy, (node.batch, node.times), walked)
        kept = self.static(node.kernels, node.strategy, node.optimizer)[1]
        again = staying if node.times > strategy.size("pp") else 0  # behind a backward as many are under way once more
        return self.lacking(kept.least(staying, again, node.times), node.kernels, node.strategy) > 0

    def sooner(self, node: Node) -> float | None:
        """The least time that what is known of the same passes leaves it, under another optimizer or in a layout that holds less; None where it
        does not fit."""
        place, near = node.strategy, self.closest[node.strategy]
        stepping, kept = self.static(node.kernels, place, node.optimizer)
        if self.passes_of(node) not in self.passed and (first := self.plainer(node)) is not None:
            found = self.asked(first)
            if found is not None:
                self.quick[first.name] = found
        known = self.passed.get(self.passes_of(node))
        if known is not None:
            lacking = self.lacking(known.held + kept.states, node.kernels, place) > 0
            return None if lacking else (known.seconds + known.sent + known.rest + stepping) * (1 + 1e-9)  # behind its like, if no quicker
        if near == place:
            return node.seconds
        like = node._replace(strategy=near)
        if self.passes_of(like) not in self.passed and (found := self.asked(like)) is not None:
            self.quick[like.name] = found
        known, strategy = self.passed.get(self.passes_of(like)), self.space.strategies[place]
        if known is None:
            return node.seconds
        if not strategy.offloads and self.lacking(known.held + kept.states, node.kernels, place) > 0:
            return None
        if strategy.zero is not None:  # that sends the same, and copies beside it
            return max(node.seconds, known.seconds + stepping)
        calling = self.calling(node.kernels, place, node.times)
        return max(node.seconds, max(known.kernels + self.taken_share * calling, calling) + stepping)

    def plainer(self, node: Node) -> Node | None:
        """The same with an earlier optimizer that may be as quick: in a tie it is taken, so it is asked first."""
        statics = self.statics(node.kernels, node.strategy)
        own, when = self.space.optimizers.index(node.optimizer), OPTIMIZERS[node.optimizer].when
        for at, (stepping, kept) in enumerate(statics[:own]):
            near = stepping - statics[own][0] < TIED * node.seconds and kept.always <= self.most_live
            if near and OPTIMIZERS[self.space.optimizers[at]].when == when:
                return node._replace(optimizer=self.space.optimizers[at])
        return None

    def later(self, node: Node) -> float:
        """The least time with what the layout was seen to add to other kernels or micro-batches; of a pipeline, with its last stage's own work."""
        strategy, walked = self.space.strategies[node.strategy], None
        if node.like is not None:
            walked = self.bounds.walked(node.like, node.batch)
        if node.like is None or walked is None:
            return 0.0
        stepping, _ = self.static(node.kernels, node.strategy, node.optimizer)
        if strategy.size("pp") > 1:
            micro = node.batch, node.times
            share = self.bounds.staged(node.like, strategy, micro, walked)
            passes = node.times * share * (walked.seconds + node.batch * self.bounds.splitting(node.like, node.batch))
            passes += self.taken_share * self.calling(node.kernels, node.strategy, node.times)
            return max(passes, self.bounds.pipelined(node.like, strategy, micro, walked)) + stepping
        passes, kernels = 0.0, node.times * walked.seconds
        like = (node.strategy, self.closest[node.strategy]) if strategy.zero is not None else (node.strategy,)
        for place, checkpointing in product(dict.fromkeys(like), {"none", node.kernels.checkpointing}):
            for one in self.beyond.get(self.adding(node, place, checkpointing), ()):
                sending = one.calls * min(1.0, node.times / one.times)
                more = ALIKE * one.kernels if node.times >= one.times else 0.0
                passes = max(passes, sending, kernels + more + self.taken_share * sending)
        return passes + stepping if passes else 0.0

    @staticmethod
    def adding(node: Node, place: int, checkpointing: str) -> tuple[object, ...]:
        """What tells what a layout adds: nothing is added without checkpoints that is not with them. Where numbers are cast, it may be the loss's."""
        job = node.kernels
        casts = (job.liger, job.loss) if job.autocast or job.quantization != "none" else ()
        return job.framework, job.method, job.precision, job.quant, *casts, checkpointing, place

    def asked(self, node: Node) -> Estimate | None:
        """By the formulas; what they say of the passes is kept."""
        found = self.quick.pop(node.name, None) or self.ask(node, precise=False)
        if found is None:
            return None
        known = self.passed[self.passes_of(node)] = passed(found, node.seconds)
        walked = None if node.like is None else self.bounds.walked(node.like, node.batch)
        if found.time is not None and walked is not None and found.strategy.size("pp") == 1:
            one = Beyond(node.times, sending(found), max(0.0, known.kernels - node.times * walked.seconds))
            self.beyond.setdefault(self.adding(node, node.strategy, node.kernels.checkpointing), []).append(one)
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
        high = round(self.high * found.memory.allocated) + found.context.high + found.nccl.high
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


def numbered(things: Sequence[Hashable]) -> list[int]:
    """The same number for what is the same."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(one, len(numbers)) for one in things]


def proportional(job: Job, most: int, size: int) -> bool:
    """Whether a smaller micro-batch holds no less than its share of what the largest does: the chunks of Liger's loss are powers of two."""
    return job.loss not in CHUNKED or (most % size == 0 and (most // size).bit_count() == 1)


def shrunk(walked: Held, share: float) -> Held:
    return Held(int(walked.held * share), int(walked.between * share))


__all__ = ["Counted", "Found", "Kind", "Lost", "Search"]
