"""Best first through a space: what can be quickest is looked at first, and looked at more closely only while it may still be among the best.

A heap holds nodes by the least time that any candidate under them can take: kernels (a closed form), kernels with a micro-batch (the same
walked once on one GPU), a candidate (with its layout's share), a candidate with its formulas' time, and one whose allocator was replayed.
Nothing is dropped that could have been taken, so the answer is that of trying them all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memfit.band import spread
from memfit.errors import InputError
from memfit.estimate import Estimate, estimate, uncollected
from memfit.hardware import usable
from memfit.hardware.outside import context
from memfit.job import Job
from memfit.optimizers import OPTIMIZERS
from memfit.plan.bounds import BESIDE, Bounds, Like, alike, closest, sharing
from memfit.plan.holds import Kept, Walked
from memfit.plan.space import Space, label, turned
from memfit.simulate.pace import calls
from memfit.simulate.settings import ROUNDING
from memfit.simulate.time import PASSES
from memfit.tape import Alloc, Comm, Mark
from memfit.units import round_up

KERNELS, BATCH, CANDIDATE, TIMED = range(4)
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
    """Of a candidate whatever its optimizer: seconds of the passes, those of their kernels, bytes that they hold at most beside the
    optimizer's states; seconds of calls that the optimizer's step waits for."""

    seconds: float
    kernels: float
    held: int
    sent: float


class Beyond(NamedTuple):
    """What a layout adds to the passes of one GPU, seen with so many micro-batches: seconds of calls, and of kernels of its own."""

    times: int
    calls: float
    kernels: float


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
    called: dict[tuple[object, ...], float] = field(default_factory=dict)
    fixed: dict[tuple[object, ...], tuple[float, Kept]] = field(default_factory=dict)
    quick: dict[Node, Estimate] = field(default_factory=dict)  # asked for another's sake
    failed: set[tuple[object, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        gpu = self.space.cluster.gpu
        self.usable = min(usable(gpu), self.room or usable(gpu))
        self.outside = context(gpu).low
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
            each = walked.ideal / most + self.bounds.splitting(node.like, most)
            seconds = max(seconds, self.each_gpu * node.like.split * each)
        places = self.likes(node.kernels)[node.like]
        for order, size in enumerate(sorted({size for place in places for size in self.batches[place]}, reverse=True)):
            part = None if walked is None or not proportional(node.kernels, most, size) else shrunk(walked, size / most)
            one, holding = node._replace(batch=size), dict[tuple[int, int], tuple[int, int]]()
            fit = tuple(place for place in places if size in self.batches[place] and self.fits(one, place, part, holding))
            if fit:
                heapq.heappush(self.heap, node._replace(seconds=seconds, stage=BATCH, order=(*node.order, order), batch=size, places=fit))

    def open(self, node: Node) -> None:
        """Every layout and optimizer for this micro-batch, but those that do not fit for certain."""
        walked = None if node.like is None else self.bounds.walked(node.like, node.batch)
        self.counted.walked += walked is not None
        moments: dict[tuple[int, int], float] = {}
        holding: dict[tuple[int, int], tuple[int, int]] = {}
        for place in node.places:
            times = self.batches[place][node.batch]
            key = self.inner[place], times
            if key not in moments:
                moments[key] = self.passes(node, place, walked)
            calling = self.calling(node.kernels, place, times)
            passes = max(moments[key] + self.taken_share * calling, calling)
            held, between = self.passing(node, place, walked, holding)
            for at, optimizer in enumerate(self.space.optimizers):
                stepping, kept = self.static(node.kernels, place, optimizer)
                if self.lacking(kept.least(held, between, times), node.kernels, place) <= 0:
                    one = node._replace(stage=CANDIDATE, order=(*node.order, place, at), times=times, strategy=place, optimizer=optimizer)
                    heapq.heappush(self.heap, one._replace(seconds=passes + stepping))

    def passes(self, node: Node, place: int, walked: Walked | None) -> float:
        """Seconds of the kernels of all micro-batches, and of the sums that split products wait for."""
        if node.like is None or walked is None:
            return node.seconds
        strategy, times = self.space.strategies[place], self.batches[place][node.batch]
        share = self.bounds.staged(node.like, strategy, (node.batch, times), walked, closely=False)
        return max(node.seconds, times * share * (walked.seconds + node.batch * self.bounds.splitting(node.like, node.batch)))

    def passing(self, node: Node, place: int, walked: Walked | None, known: dict[tuple[int, int], tuple[int, int]]) -> tuple[int, int]:
        """What the passes hold, which is the same in all layouts that split the model alike."""
        times = self.batches[place][node.batch]
        if (self.inner[place], times) not in known:
            found = self.bounds.holds.passing(node.kernels, self.space.strategies[place], (node.batch, times), walked)
            known[self.inner[place], times] = found
        return known[self.inner[place], times]

    def calling(self, kernels: Job, place: int, times: int) -> float:
        key = (kernels.framework, kernels.method, kernels.precision, kernels.quant, place, times)
        if key not in self.called:
            self.called[key] = self.bounds.calling(kernels, self.space.strategies[place], times)
        return self.called[key]

    def static(self, kernels: Job, place: int, optimizer: str) -> tuple[float, Kept]:
        """What neither the micro-batch nor checkpointing changes."""
        key = (kernels.framework, kernels.method, kernels.precision, kernels.quant, place, optimizer)
        if key not in self.fixed:
            job, strategy = kernels.replace(optimizer=optimizer), self.space.strategies[place]
            self.fixed[key] = self.bounds.stepping(job, strategy), self.bounds.holds.kept(job, strategy)
        return self.fixed[key]

    def fits(self, node: Node, place: int, walked: Walked | None, known: dict[tuple[int, int], tuple[int, int]]) -> bool:
        times = self.batches[place][node.batch]
        held, between = self.passing(node, place, walked, known)
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
        seconds = max(seconds, self.later(node))
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
            lacking = self.lacking(known.held + kept.states, node.kernels, place) > 0
            return None if lacking else (known.seconds + known.sent + stepping) * (1 + 1e-9)  # behind its like, where it is no quicker
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
        calling = self.calling(node.kernels, place, node.times)
        return max(node.seconds, max(known.kernels + self.taken_share * calling, calling) + stepping)

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
        for checkpointing in {"none", node.kernels.checkpointing}:
            for one in self.beyond.get(self.adding(node, checkpointing), ()):
                sending = one.calls * min(1.0, node.times / one.times)
                more = ALIKE * one.kernels if node.times >= one.times else 0.0
                passes = max(passes, sending, kernels + more + self.taken_share * sending)
        return passes + stepping if passes else 0.0

    @staticmethod
    def adding(node: Node, checkpointing: str) -> tuple[object, ...]:
        """What tells what a layout adds: nothing is added without checkpoints that is not with them. Where numbers are cast, it may be the loss's."""
        job = node.kernels
        casts = (job.liger, job.loss) if job.autocast or job.quantization != "none" else ()
        return job.framework, job.method, job.precision, job.quant, *casts, checkpointing, node.strategy

    def asked(self, node: Node) -> Estimate | None:
        """By the formulas; what they say of the passes is kept."""
        found = self.quick.pop(node._replace(seconds=0.0), None) or self.ask(node, precise=False)
        if found is None:
            return None
        known = self.passed[self.passes_of(node)] = passed(found, node.seconds)
        walked = None if node.like is None else self.bounds.walked(node.like, node.batch)
        if found.time is not None and walked is not None and found.strategy.size("pp") == 1:
            sending = found.time.parts.get("communication", 0.0) - stepping_calls(found)
            sending += 0.0 if found.strategy.offloads else found.time.hidden  # with copies, which nobody waits for
            one = Beyond(node.times, max(0.0, sending), max(0.0, known.kernels - node.times * walked.seconds))
            self.beyond.setdefault(self.adding(node, node.kernels.checkpointing), []).append(one)
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
            states += round_up(event.size, ROUNDING) * often.get(place, 1)
    most = max((one.allocated for one in found.memory.timeline if one.moment == "steady step" and one.phase in PASSES), default=0)
    if found.time is None:
        return Passed(seconds, 0.0, most - states, 0.0)
    kernels = sum(value for kind, value in found.time.parts.items() if kind not in BESIDE)
    return Passed(found.time.seconds - found.time.stepping, kernels, most - states, waited(found))


def waited(found: Estimate) -> float:
    """Seconds of the step's calls that run beside nothing, whatever the optimizer."""
    assert found.cluster is not None
    call, tape, sums, step = calls(found.cluster, found.strategy), found.memory.tape, dict[int, float](), 0
    often = {place: repeat.times for repeat in tape.repeats for place in range(repeat.first, repeat.last)}
    for place, event in enumerate(tape):
        if type(event) is Mark:
            step = event.step if event.phase == "step" else 0
        elif step and type(event) is Comm and not event.stream and event.group != "host":
            sums[step] = sums.get(step, 0.0) + (call(event) or 0.0) * often.get(place, 1)
    return sums.get(max(sums), 0.0) if sums else 0.0


def stepping_calls(found: Estimate) -> float:
    """All calls of the optimizer's step, with those that copies were waited for."""
    assert found.time is not None
    return max(0.0, found.time.stepping - found.time.parts.get("optimizer", 0.0))


def numbered(things: Sequence[Hashable]) -> list[int]:
    """The same number for what is the same."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(one, len(numbers)) for one in things]


def proportional(job: Job, most: int, size: int) -> bool:
    """Whether a smaller micro-batch holds no less than its share of what the largest does: the chunks of Liger's loss are powers of two."""
    return job.loss not in CHUNKED or (most % size == 0 and (most // size).bit_count() == 1)


def shrunk(walked: Walked, share: float) -> Walked:
    return walked._replace(held=int(walked.held * share), between=int(walked.between * share))


__all__ = ["Counted", "Found", "Kind", "Lost", "Search"]
