"""What a search knows of a space before it estimates anything: what is the same for many
candidates, looked up once, and what is lacking."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import field
from typing import NamedTuple

from memfit.band import spread
from memfit.estimate import Estimate
from memfit.hardware import usable
from memfit.hardware.outside import context
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.plan.bounds import Bounds, Like, closest, sharing
from memfit.plan.memory_lower_bounds import Kept
from memfit.plan.space import Space, label

USUAL = Job().framework


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


class Kind(NamedTuple):
    """What is ranked apart: the best of each is shown."""

    method: str
    layout: str
    framework: str

    @property
    def place(self) -> str:
        """The layout, and whose engine it is in where that is not the usual one."""
        return self.layout if self.framework == USUAL else f"{self.layout}, {self.framework}"


class Enough(Exception):
    """Raised by a callback to end a search early; the plans found so far are the answer."""


@dataclass
class Counted:
    """How far a search went."""

    size: int = 0
    walked: int = 0
    estimated: int = 0
    replayed: int = 0
    best: float | None = None
    unit: str = "s per step"  # of the best
    share: float = 0.0  # of the search that is done, as far as what is left is known
    among: str = ""  # what is searched, where one search follows another


@dataclass
class Lost:
    """Of a kind that was not taken: the least time it can take (None: not known), the least memory
    that was found to be needed, a refusal; names of candidates that a bound puts behind others."""

    seconds: float | None = None
    needs: int | None = None
    refused: str = ""
    behind: set[tuple[object, ...]] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class Found:
    kind: Kind
    estimate: Estimate

    @property
    def seconds(self) -> float | None:
        return None if self.estimate.time is None else self.estimate.time.seconds


@dataclass(kw_only=True)
class Ledger:
    """`room`: bytes that a candidate may need at most, the GPU's own by default."""

    space: Space
    bounds: Bounds
    room: int | None = None
    counted: Counted = field(default_factory=Counted)
    lost: dict[Kind, Lost] = field(default_factory=dict)
    called: dict[tuple[int, int, int], float] = field(default_factory=dict)
    sorts: dict[tuple[str, ...], int] = field(default_factory=dict)
    fixed: dict[tuple[int, int], tuple[tuple[float, Kept], ...]] = field(default_factory=dict)
    same: dict[tuple[tuple[float, Kept], ...], tuple[tuple[float, Kept], ...]] = field(
        default_factory=dict
    )  # what layouts have in common
    stepped: dict[int, list[Job]] = field(default_factory=dict)  # a job for each optimizer

    def __post_init__(self) -> None:
        gpu = self.space.cluster.gpu
        self.usable = min(usable(gpu), self.room or usable(gpu))
        self.outside, self.high = context(gpu).low, spread().high
        self.most_live = int(
            (self.usable - self.outside) / self.high
        )  # bytes; more do not fit for certain
        self.taken_share = 0.0 if self.bounds.rates is None else self.bounds.rates.taken
        self.labels = [label(one) for one in self.space.strategies]
        self.batches = [dict(self.space.batches(one)) for one in self.space.strategies]
        self.inner = numbered([(one.tp, one.cp, one.pp) for one in self.space.strategies])
        places = {strategy: place for place, strategy in enumerate(self.space.strategies)}
        self.closest = [
            places.get(closest(one), place) for place, one in enumerate(self.space.strategies)
        ]
        self.sharing: dict[tuple[object, ...], list[int]] = {}
        for place, strategy in enumerate(self.space.strategies):
            self.sharing.setdefault(sharing(strategy), []).append(place)
        self.counted.size = self.space.size

    def kind(self, kernels: Job, place: int) -> Kind:
        return Kind(kernels.method, self.labels[place], kernels.framework)

    def lost_of(self, kernels: Job, place: int) -> Lost:
        return self.lost.setdefault(self.kind(kernels, place), Lost())

    def job(self, node: Node) -> Job:
        return self.space.work.job_of(node.kernels, node.optimizer, node.batch, node.times)

    def calling(self, kernels: Job, place: int, times: int) -> float:
        key = (self.sort(kernels), place, times)
        if key not in self.called:
            self.called[key] = self.bounds.calling(kernels, self.space.strategies[place], times)
        return self.called[key]

    def sort(self, kernels: Job) -> int:
        """The number of what neither the micro-batch nor checkpointing changes."""
        return self.sorts.setdefault(
            (kernels.framework, kernels.method, kernels.precision, kernels.quant), len(self.sorts)
        )

    def statics(self, kernels: Job, place: int) -> tuple[tuple[float, Kept], ...]:
        """Of each optimizer: seconds of its step, and bytes that are kept, whatever the
        micro-batch."""
        sort = self.sort(kernels)
        key = sort, place
        if key not in self.fixed:
            strategy, bounds = self.space.strategies[place], self.bounds
            if sort not in self.stepped:
                self.stepped[sort] = [
                    kernels.replace(optimizer=optimizer) for optimizer in self.space.optimizers
                ]
            found = tuple(
                (bounds.stepping(job, strategy), bounds.holds.kept(job, strategy))
                for job in self.stepped[sort]
            )
            self.fixed[key] = self.same.setdefault(found, found)
        return self.fixed[key]

    def static(self, kernels: Job, place: int, optimizer: str) -> tuple[float, Kept]:
        return self.statics(kernels, place)[self.space.optimizers.index(optimizer)]

    def lacking(self, least: int, kernels: Job, place: int) -> int:
        """By how much so many live bytes are too many to fit for certain; what a kind lacks is
        remembered."""
        return (
            least - self.most_live
            if least <= self.most_live
            else self.lack(self.kind(kernels, place), least)
        )

    def lack(self, kind: Kind, least: int) -> int:
        lost, needs = self.lost.setdefault(kind, Lost()), round(self.high * least) + self.outside
        lost.needs = needs if lost.needs is None else min(lost.needs, needs)
        return needs - self.usable


def numbered(things: Sequence[Hashable]) -> list[int]:
    """The same number for what is the same."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(one, len(numbers)) for one in things]


__all__ = ["Counted", "Enough", "Entry", "Found", "Kind", "Ledger", "Lost", "Node", "numbered"]
