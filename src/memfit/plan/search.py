"""Best first through a space: what can be quickest is looked at first, and looked at more closely
only while it may still be among the best.

A heap holds nodes by the least time that any candidate under them can take: kernels (a closed
form), kernels with a micro-batch (the same walked once on one GPU), a candidate (with its layout's
share), a candidate with its formulas' time, and one whose allocator was replayed. Nothing is
dropped that could have been taken, so the answer is that of trying them all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import field, replace
from typing import NamedTuple

from memfit.estimate import uncollected
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.plan.bounds import Bounds, Like, alike
from memfit.plan.evaluate_candidates import Asking
from memfit.plan.ledger import Counted, Entry, Found, Kind, Ledger, Lost, Node
from memfit.plan.memory_lower_bounds import Held, Walked, hosted
from memfit.plan.space import Space

KERNELS, BATCH, CANDIDATE, TIMED = range(4)
CHUNKED = ("liger", "chunked")  # losses that go through a batch in chunks
Progress = Callable[[Counted], None]


class Known(NamedTuple):
    """Of a micro-batch, what layouts have in common: bytes of the passes, and the least at the
    peak."""

    passing: dict[tuple[int, int], tuple[int, int]]
    least: dict[tuple[int, int, int], int]


@dataclass(kw_only=True)
class Search:
    """`each`: how many kinds are taken of every method; `enough`: of all methods together (0: no
    matter). `room`: bytes that a candidate may need at most, the GPU's own by default."""

    space: Space
    bounds: Bounds
    each: int = 3
    enough: int = 0
    room: int | None = None
    progress: Progress | None = None
    taken: list[Found] = field(default_factory=list)
    heap: list[Node] = field(default_factory=list)
    alike: dict[Job, dict[Like | None, list[int]]] = field(default_factory=dict)
    cast: dict[Like, Job] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ledger = Ledger(space=self.space, bounds=self.bounds, room=self.room)
        self.asking = Asking(ledger=self.ledger)
        self.counted = self.ledger.counted
        self.each_gpu = self.space.work.sequences / self.space.cluster.gpus

    def run(self) -> None:
        """Until every method has its best kinds, or nothing is left."""
        for order, job in enumerate(self.space.kernels):
            for at, like in enumerate(self.likes(job)):
                heapq.heappush(
                    self.heap, Node(self.floor(job, like), KERNELS, (order, at), job, like)
                )
        methods, seen = len({job.method for job in self.space.kernels}), 0
        with uncollected():
            while self.heap and not 0 < self.enough <= len(self.taken):
                node, seen = heapq.heappop(self.heap), seen + 1
                if self.full(node.kernels.method):
                    continue
                self.step(node)
                if self.progress is not None:
                    looked = seen / (seen + len(self.heap))
                    taken = len(self.taken) / (self.each * methods)
                    self.counted.share = max(self.counted.share, looked, taken)
                    self.progress(self.counted)

    def again(self, room: int) -> Search:
        """Another search of the same space for what needs no more than this: what was learned of
        candidates stays."""
        other = copy(self)
        other.room, other.taken, other.heap = room, [], []
        other.ledger = replace(self.ledger, room=room, counted=Counted(), lost={})
        other.asking = replace(self.asking, ledger=other.ledger, failed=set())
        other.counted = other.ledger.counted
        return other

    def likes(self, job: Job) -> dict[Like | None, list[int]]:
        """The layouts, by whose kernels those of a rank are."""
        if job not in self.alike:
            found: dict[Like | None, list[int]] = {}
            for places in self.ledger.sharing.values():
                like = alike(job, self.space.strategies[places[0]])
                if (
                    like is None or not like.cast or self.cast.setdefault(like, job) == job
                ):  # ZeRO makes one of several precisions
                    found.setdefault(like, []).extend(places)
            self.alike[job] = {like: sorted(places) for like, places in found.items()}
        return self.alike[job]

    def floor(self, job: Job, like: Like | None) -> float:
        """Seconds of the step that no candidate with these kernels goes below."""
        beside = (
            0.0
            if like is None
            else self.bounds.moving(like, most := self.most(job, like))
            + self.bounds.splitting(like, most)
        )
        return self.each_gpu * (
            self.bounds.compute(job, job.seq) + (0.0 if like is None else like.split * beside)
        )

    def most(self, job: Job, like: Like) -> int:
        """The largest micro-batch of any layout that the walk tells of."""
        return max(size for place in self.likes(job)[like] for size in self.ledger.batches[place])

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

    # ------------------------------------------------------------------------------ kernels, batch
    def walk(self, node: Node) -> None:
        """One walk, with the largest micro-batch, tells the least that a sequence takes and holds
        in any. What it is refused, layouts are too."""
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
        for order, size in enumerate(
            sorted({size for place in places for size in self.ledger.batches[place]}, reverse=True)
        ):
            part = (
                None
                if walked is None or not proportional(node.kernels, most, size)
                else shrunk(walked.room, size / most)
            )
            one, holding = node._replace(batch=size), Known({}, {})
            fit = tuple(
                place
                for place in places
                if size in self.ledger.batches[place] and self.fits(one, place, part, holding)
            )
            if fit:
                heapq.heappush(
                    self.heap,
                    node._replace(
                        seconds=seconds,
                        stage=BATCH,
                        order=(*node.order, order),
                        batch=size,
                        places=fit,
                    ),
                )

    def open(self, node: Node) -> None:
        """Every layout and optimizer for this micro-batch, but those that do not fit for certain:
        the next of them waits behind the first."""
        walked = None if node.like is None else self.bounds.walked(node.like, node.batch)
        self.counted.walked += walked is not None
        moments: dict[tuple[int, int], float] = {}
        holding: dict[tuple[int, int], tuple[int, int]] = {}
        short: dict[str, int] = {}
        found: list[Entry] = []
        for place in node.places:
            times = self.ledger.batches[place][node.batch]
            key = self.ledger.inner[place], times
            if key not in moments:
                moments[key] = self.passes(node, place, walked)
            calling = self.ledger.calling(node.kernels, place, times)
            passes = max(moments[key] + self.ledger.taken_share * calling, calling)
            held, between = self.passing(
                node, place, None if walked is None else walked.room, holding
            )
            for at, (stepping, kept) in enumerate(self.ledger.statics(node.kernels, place)):
                if (least := kept.least(held, between, times)) <= self.ledger.most_live:
                    found.append(Entry(passes + stepping, place, at, times))
                else:
                    short[self.ledger.labels[place]] = min(
                        least, short.get(self.ledger.labels[place], least)
                    )
        for name, least in short.items():
            self.ledger.lack(Kind(node.kernels.method, name, node.kernels.framework), least)
        self.following(node, iter(sorted(found)))

    def following(self, node: Node, entries: Iterator[Entry]) -> None:
        """The next of a micro-batch's candidates."""
        one = next(entries, None)
        if one is not None:
            optimizer, order = self.space.optimizers[one.at], (*node.order[:3], one.place, one.at)
            heapq.heappush(
                self.heap,
                Node(
                    one.seconds,
                    CANDIDATE,
                    order,
                    node.kernels,
                    node.like,
                    node.batch,
                    (),
                    one.times,
                    one.place,
                    optimizer,
                    entries,
                ),
            )

    def passes(self, node: Node, place: int, walked: Walked | None) -> float:
        """Seconds of the kernels of all micro-batches, and of the sums that split products wait
        for."""
        if node.like is None or walked is None:
            return node.seconds
        strategy, times = self.space.strategies[place], self.ledger.batches[place][node.batch]
        share = self.bounds.staged(node.like, strategy, (node.batch, times), walked, closely=False)
        return max(
            node.seconds,
            times
            * share
            * (walked.seconds + node.batch * self.bounds.splitting(node.like, node.batch)),
        )

    def passing(
        self,
        node: Node,
        place: int,
        walked: Held | None,
        known: dict[tuple[int, int], tuple[int, int]],
    ) -> tuple[int, int]:
        """What the passes hold, which is the same in all layouts that split the model alike."""
        times = self.ledger.batches[place][node.batch]
        if (self.ledger.inner[place], times) not in known:
            found = self.bounds.holds.passing(
                node.kernels, self.space.strategies[place], (node.batch, times), walked
            )
            known[self.ledger.inner[place], times] = found
        return known[self.ledger.inner[place], times]

    def fits(self, node: Node, place: int, walked: Held | None, known: Known) -> bool:
        times, statics = (
            self.ledger.batches[place][node.batch],
            self.ledger.statics(node.kernels, place),
        )
        key = id(statics), self.ledger.inner[place], times
        if key not in known.least:
            held, between = self.passing(node, place, walked, known.passing)
            known.least[key] = min(kept.least(held, between, times) for _, kept in statics)
        return self.ledger.lacking(known.least[key], node.kernels, place) <= 0

    # ---------------------------------------------------------------------------------- candidates
    def done(self, node: Node) -> bool:
        return any(one.kind == self.ledger.kind(node.kernels, node.strategy) for one in self.taken)

    def look(self, node: Node) -> None:
        """Its time by formulas, if it may fit."""
        kind = self.ledger.kind(node.kernels, node.strategy)
        lost = self.ledger.lost.setdefault(kind, Lost())
        lost.behind.discard(node.name)
        if (
            self.done(node)
            or (node.kernels, node.strategy) in self.asking.refused
            or self.asking.crowded(node)
        ):
            return
        seconds = 0.0 if node.name in self.asking.quick else self.asking.later(node)
        if node.name not in self.asking.quick and seconds <= node.seconds * (1 + 1e-9):
            sooner = self.asking.sooner(node)
            if sooner is None:
                return
            seconds = sooner
        if seconds > node.seconds * (1 + 1e-9):
            lost.behind.add(node.name)
            heapq.heappush(self.heap, node._replace(seconds=seconds))
            return
        if self.asking.steps_alike(node):
            heapq.heappush(self.heap, node._replace(stage=TIMED))
            return
        found = self.asking.asked(node)
        if found is not None and self.asking.short(found, lost) <= 0:
            seconds = found.time.seconds if found.time is not None else node.seconds
            lost.seconds = min(seconds, lost.seconds or seconds) if found.time is not None else None
            heapq.heappush(self.heap, node._replace(seconds=seconds, stage=TIMED))

    def replay(self, node: Node) -> None:
        """The best that is left of all: taken if it fits with the allocator replayed."""
        if self.done(node) or self.asking.passes_of(node) in self.asking.failed:
            return
        kind, lost = (
            self.ledger.kind(node.kernels, node.strategy),
            self.ledger.lost_of(node.kernels, node.strategy),
        )
        known = node.name in self.asking.precise
        needs = None if known else self.asking.needs(node)
        found = None
        if needs is None or needs <= self.ledger.usable:
            found = self.asking.precise[node.name] if known else self.asking.ask(node, precise=True)
            self.asking.precise[node.name] = found
            if found is None:
                return
            needs = found.band.high
            if found.time is not None and found.time.seconds > node.seconds * (1 + 1e-6):
                heapq.heappush(self.heap, node._replace(seconds=found.time.seconds))
                return
        self.asking.learn(node, needs)
        if found is None or found.verdict != "fits" or needs > self.ledger.usable:
            lost.needs = min(needs, lost.needs or needs)
            if hosted(
                self.space.strategies[node.strategy]
            ):  # nor with another optimizer, which is on the host
                self.asking.failed.add(self.asking.passes_of(node))
            return
        self.taken.append(Found(kind=kind, estimate=found))
        if self.counted.best is None:
            self.counted.best = node.seconds


def proportional(job: Job, most: int, size: int) -> bool:
    """Whether a smaller micro-batch holds no less than its share of what the largest does: the
    chunks of Liger's loss are powers of two."""
    return job.loss not in CHUNKED or (most % size == 0 and (most // size).bit_count() == 1)


def shrunk(walked: Held, share: float) -> Held:
    return Held(int(walked.held * share), int(walked.between * share))


__all__ = ["Search"]
