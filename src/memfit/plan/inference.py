"""Which way to answer: form of the weights, cache, attention, how GPUs share the model, and how
many answers at once.

Every way is estimated with more and more sequences at once until they do not fit: live peaks rule
out what cannot, the allocator is replayed for what is chosen. Where the replay refuses a number of
sequences that the live peak allowed, smaller ones are tried. Nothing that fits is left out, so the
answer is that of trying all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from itertools import count, product
from typing import Annotated, Any, NamedTuple

from memfit.constants import setting
from memfit.errors import InputError, Problem
from memfit.estimate import Estimate, estimate, uncollected
from memfit.hardware import Cluster, usable
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.plan.goals import GOALS, Pace, pace
from memfit.plan.ledger import Counted, Kind
from memfit.plan.search import Progress
from memfit.plan.space import Work, divisors, problems
from memfit.plan.weights import Weights, models
from memfit.program import Program
from memfit.simulate.generating import Generation
from memfit.strategy import ONE, TP, Strategy
from memfit.techniques.dequantize import opened
from memfit.techniques.framework import facts_of

SERVED: Mapping[str, tuple[Any, ...]] = {
    one.name: one.metadata["serves"] for one in dataclasses.fields(Job) if one.metadata["serves"]
}
QUARTERS: Annotated[
    tuple[int, ...],
    setting("quarters of a power of two of sequences tried between one that fits and the next"),
] = (5, 6, 7)
ALIKE: Annotated[
    float, setting("share of seconds or tokens/s within which two ways are equally fast")
] = 0.01
MOST: Annotated[int, setting("sequences at once of one group of GPUs, at most")] = 2**16


class Way(NamedTuple):
    """Everything but the number of sequences. `number` is its place in the space; `groups` of GPUs
    hold the model each, `cluster` is one of them."""

    number: int
    weights: Weights
    model: Model
    job: Job
    strategy: Strategy
    cluster: Cluster
    groups: int

    @property
    def kind(self) -> Kind:
        return Kind(
            self.weights.name, label(self.groups, self.strategy.size("tp")), self.job.framework
        )


@dataclass(kw_only=True)
class Missed:
    """Of a kind that is not taken: its quickest answer and most tokens a second, the least memory
    that was too much and what fills that most, a refusal."""

    seconds: float | None = None
    tokens_per_second: float | None = None
    needs: int | None = None
    largest: tuple[str, int] | None = None
    refused: str = ""
    kept: bool = False

    def see(self, found: Pace, kept: bool) -> None:
        """What breaks a limit counts only while nothing keeps it."""
        if kept and not self.kept:
            self.seconds, self.tokens_per_second, self.kept = None, None, True
        if kept or not self.kept:
            self.seconds = min(found.seconds, self.seconds or found.seconds)
            self.tokens_per_second = max(found.tokens_per_second, self.tokens_per_second or 0.0)


class Timed(NamedTuple):
    """A way with so many sequences at once, whose live peak fits; `device`: what that is, with what
    lies outside the allocator; `place`: that of the way, then the order in which it was tried."""

    place: tuple[int, int]
    way: Way
    job: Job
    pace: Pace
    device: int


def label(groups: int, size: int) -> str:
    if size == 1:
        return "one GPU" if groups == 1 else f"{groups} x 1"
    return f"tp {size}" if groups == 1 else f"{groups} x tp {size}"


class Ways:
    """All that may be tried for some work on some GPUs."""

    def __init__(self, work: Work, cluster: Cluster) -> None:
        self.work, self.cluster = work, cluster
        self.refused: dict[
            tuple[str, str], str
        ] = {}  # why not, of a form of weights and a layout, or of all its layouts (empty)

    def __iter__(self) -> Iterator[Way]:
        assert self.work.serving is not None
        number = count()
        for weights, model in models(self.work.model, self.work.serving.weights, self.refused):
            for job, strategy in product(self.jobs(weights), self.strategies()):
                size = strategy.size("tp")
                cluster = dataclasses.replace(self.cluster, gpus_per_node=size, nodes=1)
                wrong = problems(model, job, cluster, strategy)
                if not wrong and weights.stored and becomes_plain(model, job, cluster):
                    wrong = (
                        Problem(
                            message="this GPU has no kernels for these weights: "
                            "they are dequantized to 16 bits"
                        ),
                    )
                if wrong:
                    self.refused.setdefault(
                        (weights.name, label(self.groups(size), size)), wrong[0].message
                    )
                    continue
                yield Way(next(number), weights, model, job, strategy, cluster, self.groups(size))

    def jobs(self, weights: Weights) -> list[Job]:
        """Options that do not go together are left out."""
        found: dict[Job, None] = {}
        for values in product(*self.work.axes.values()):
            told = dict(zip(self.work.axes, values, strict=True))
            if facts_of(told["framework"]).one_cache:
                told["cache"] = self.work.axes["cache"][0]
            try:
                found[
                    self.work.job.replace(
                        **told, **({"quant": weights.quant} if weights.quant != "none" else {})
                    )
                ] = None
            except InputError as bad:
                self.refused.setdefault((weights.name, ""), bad.problems[0].message)
        return list(found)

    def strategies(self) -> Iterator[Strategy]:
        """The model on one GPU, or split over several of one node."""
        if self.work.strategies:
            yield from self.work.strategies
            return
        for size in divisors(self.cluster.gpus_per_node):
            yield ONE if size == 1 else Strategy(tp=TP(size=size))

    def groups(self, size: int) -> int:
        """No more than there are requests."""
        assert self.work.serving is not None
        every = self.cluster.gpus // size
        return min(every, self.work.serving.requests or every)


@dataclass(kw_only=True)
class Serving:
    """The search. `timed`: all that fit by their live peak and keep the limits; `late`: whether any
    breaks one."""

    work: Work
    cluster: Cluster
    progress: Progress | None = None
    counted: Counted = field(default_factory=Counted)
    timed: list[Timed] = field(default_factory=list)
    late: bool = False
    best: Pace | None = None
    lost: dict[Kind, Missed] = field(default_factory=dict)
    # with the allocator replayed
    known: dict[tuple[int, int], Estimate] = field(default_factory=dict)
    # powers of two that the replay refuses, below which nothing was tried so far
    too_large: list[Timed] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.work.serving is not None
        self.asked = self.work.serving
        self.goal, self.usable = GOALS[self.asked.goal], usable(self.cluster.gpu)
        self.ways = Ways(self.work, self.cluster)

    def run(self, each: int) -> None:
        """Try every way, then replay what is chosen until nothing new is tried. `each`: as in
        `taken`."""
        with uncollected():
            self.all()
            while True:
                if list(self.taken(each)):
                    list(self.front())
                if not self.too_large:
                    break
                for one in self.too_large:
                    self.between(one.way, one.job.batch // 2)
                self.too_large.clear()

    def all(self) -> None:
        ways = list(self.ways)
        for number, way in enumerate(ways):
            self.counted.share = number / len(ways)
            largest = 0
            for batch in self.batches(way):
                if self.tried(way, batch):
                    largest = batch
                else:
                    break
            if largest and self.free:
                self.between(way, largest)

    def between(self, way: Way, power: int) -> None:
        """Numbers of sequences from a power of two that fits up to the next."""
        for quarter in QUARTERS:
            batch = power * quarter // 4
            if batch * 4 == power * quarter and not self.tried(way, batch):
                break

    @property
    def free(self) -> bool:
        """Whether as many requests are answered at once as fit."""
        return not self.asked.requests and not self.work.batches

    def batches(self, way: Way) -> Iterator[int]:
        """Of one group, rising."""
        if self.asked.requests:
            yield -(-self.asked.requests // way.groups)
        elif self.work.batches:
            yield from sorted(self.work.batches)
        else:
            batch = 1
            while batch <= MOST:
                yield batch
                batch *= 2

    def tried(self, way: Way, batch: int) -> bool:
        """Whether more may fit; what it says is kept."""
        lost = self.lost.setdefault(way.kind, Missed())
        job = way.job.replace(batch=batch)
        try:
            one = estimate(way.model, job, way.cluster, way.strategy, precise=False)
        except InputError as bad:
            lost.refused = lost.refused or bad.problems[0].message
            return False
        self.counted.estimated += 1
        self.counted.size = self.counted.estimated
        if one.reach > self.usable:
            if lost.needs is None or one.device < lost.needs:
                lost.needs, lost.largest = one.device, largest(one)
            self.told()
            return False
        told = one.generation
        if told is None:
            lost.refused = lost.refused or one.untimed
            return False
        found = Timed(
            (way.number, len(self.timed)),
            way,
            job,
            self.pace(told, way, batch),
            one.device,
        )
        kept = not any(self.asked.limits.broken(found.pace))
        lost.see(found.pace, kept)
        if kept:
            self.timed.append(found)
            self.best = (
                found.pace if self.best is None else min(self.best, found.pace, key=self.goal.key)
            )
        self.late = self.late or not kept
        self.told()
        return kept or (self.free and not any(self.slow(found.pace)))

    def slow(self, found: Pace) -> Iterator[str]:
        """The limits that more sequences at once break, too."""
        return (
            what for what, _, _ in self.asked.limits.broken(found) if what != "tokens per second"
        )

    def told(self) -> None:
        if self.progress is not None:
            self.counted.unit = self.goal.unit
            self.counted.best = None if self.best is None else self.goal.figure(self.best)
            self.progress(self.counted)

    def ranked(self, timed: Iterable[Timed]) -> list[Timed]:
        """The plans, best first. Among plans within 1 %, the simplest comes first, which is the
        first in the search space."""
        best: list[Timed] = []
        group: list[Timed] = []
        for one in sorted(timed, key=lambda one: (*self.goal.key(one.pace), one.device, one.place)):
            if group and apart(self.goal.figure(one.pace), self.goal.figure(group[0].pace)):
                best += sorted(group, key=lambda one: one.place)
                group = []
            group.append(one)
        return [*best, *sorted(group, key=lambda one: one.place)]

    def replayed(self, one: Timed) -> Estimate | None:
        """With the allocator; None where it does not fit for certain."""
        if one.place not in self.known:
            self.counted.replayed += 1
            self.known[one.place] = found = estimate(
                one.way.model, one.job, one.way.cluster, one.way.strategy
            )
            batch = one.job.batch
            if self.free and found.verdict != "fits" and batch > 1 and not batch & (batch - 1):
                self.too_large.append(one)
        found = self.known[one.place]
        return found if found.verdict == "fits" else None

    def taken(self, each: int) -> Iterator[tuple[Timed, Estimate]]:
        """The best of each kind, up to a number of kinds for each weight format."""
        kinds: set[Kind] = set()
        for one in self.ranked(self.timed):
            kind = one.way.kind
            if kind in kinds or sum(other.method == kind.method for other in kinds) >= each:
                continue
            found = self.replayed(one)
            if found is not None:
                kinds.add(kind)
                yield self.paced(one, found), found

    def front(self) -> Iterator[tuple[Timed, Estimate]]:
        """Of all, those that none beats in the seconds of an answer and, by a hundredth, in tokens
        a second: the quickest first."""
        most = 0.0
        for one in sorted(
            self.timed,
            key=lambda one: (one.pace.seconds, -one.pace.tokens_per_second, one.device, one.place),
        ):
            if (
                one.pace.tokens_per_second > most * (1 + ALIKE)
                and (found := self.replayed(one)) is not None
            ):
                most = one.pace.tokens_per_second
                yield self.paced(one, found), found

    def best_of(self, each: int) -> Iterator[tuple[Timed, Estimate]]:
        """What is `taken`, ranked by the pace over more passes."""
        found = {one.place: (one, answer) for one, answer in self.taken(each)}
        return (found[one.place] for one in self.ranked(one for one, _ in found.values()))

    def paced(self, one: Timed, found: Estimate) -> Timed:
        """With the pace over more of its passes."""
        told = found.generation
        return one if told is None else one._replace(pace=self.pace(told, one.way, one.job.batch))

    def pace(self, told: Generation, way: Way, batch: int) -> Pace:
        return pace(told, self.asked.requests or way.groups * batch)


def apart(one: float, other: float) -> bool:
    return max(one, other) > min(one, other) * (1 + ALIKE)


def becomes_plain(model: Model, job: Job, cluster: Cluster) -> bool:
    """Whether the form of the weights is lost as they are loaded."""
    return bool(
        opened(Program(model=model, job=job, entries=(), weights=model.dtype, gpu=cluster.gpu))
    )


def largest(one: Estimate) -> tuple[str, int]:
    """The part that holds most."""
    return max(one.parts.items(), key=lambda part: part[1])


__all__ = ["SERVED", "Serving", "Timed", "Way", "Ways", "label"]
