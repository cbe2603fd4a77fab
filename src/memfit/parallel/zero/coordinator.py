"""When ZeRO-3 gathers parameters and when it gives them up: DeepSpeed's coordinator, which learns
the order of modules in the first pass and gathers ahead in the later ones (deepspeed 0.19.8
runtime/zero/partitioned_param_coordinator.py, partition_parameters.py)."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import field
from itertools import accumulate

from memfit.lazy_dataclass import dataclass
from memfit.lower.recorder import Recorder
from memfit.lower.shards import COMPUTE, GATHER
from memfit.lower.tensors import Elastic, Storage, Tensor
from memfit.parallel.zero.zeropp import opened, quantized, second
from memfit.strategy import ZeRO

AWAY, FLYING, HERE = range(3)


@dataclass(slots=True, kw_only=True, eq=False)
class Param:
    """A parameter of `count` values, `part` of them on one rank, those that fill up among them;
    `stays`: it is small, and kept once gathered."""

    leaf: Tensor
    part: int
    count: int
    stays: bool
    state: int = AWAY
    second: Storage | None = None  # this rank's part of what its node holds of it once more (hpZ)
    users: set[str] = field(default_factory=set)
    fetched_for: int = -1

    @property
    def storage(self) -> Elastic:
        assert isinstance(self.leaf.storage, Elastic)
        return self.leaf.storage


@dataclass(slots=True, kw_only=True, eq=False)
class Bundle:
    """Parameters that are gathered together, in one buffer that goes when all of them were asked
    for."""

    params: list[Param]
    buffers: list[Storage | None]
    done: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    name: str
    params: tuple[Param, ...] = ()


class Coordinator:
    def __init__(self, r: Recorder, layout: ZeRO) -> None:
        self.r, self.layout = r, layout
        self.order: list[Module] = []  # of a whole pass
        self.uses: dict[Param, list[int]] = {}
        self.sums: list[int] = []
        self.records, self.complete = False, False
        self.queue: deque[tuple[Param, int]] = deque()
        self.flying: dict[Param, Bundle] = {}
        self.at = 0
        self.available = 0
        self.backward: dict[str, Module] = {}  # modules whose backward is not over
        self.stream = GATHER if layout.overlap else COMPUTE

    def reset(self) -> None:
        """A pass begins (reset_step)."""
        for param in tuple(self.flying):
            self.wait(param)
            self.give_up(param)
        if self.records:
            self.complete, self.records = True, False
            self.learn()
        elif not self.complete:
            self.records = True
        self.queue = deque(
            (param, step) for step, module in enumerate(self.order) for param in module.params
        )
        for param, _ in self.queue:
            param.fetched_for = -1
        self.at = self.available = 0

    def learn(self) -> None:
        """Where each parameter is used in a pass, and how many values are before each module."""
        for step, module in enumerate(self.order):
            for param in module.params:
                self.uses.setdefault(param, []).append(step)
        self.sums = [
            0,
            *accumulate(sum(param.count for param in module.params) for module in self.order),
        ]

    # ------------------------------------------------------------------------------------ fetching
    def fetch(self, module: Module, forward: bool) -> None:
        """What the module needs, now; then what comes after it (fetch_sub_module)."""
        if self.records:
            self.order.append(module)
        if not forward:
            self.backward[module.name] = module
        self.gather([param for param in module.params if param.state == AWAY])
        for param in module.params:
            param.users.add(module.name)
            if param in self.flying:
                self.wait(param)
        if self.complete:
            self.ahead(module)
        self.at += 1

    def ahead(self, module: Module) -> None:
        asked = [param for param in module.params if param.fetched_for < self.at]
        seen: set[Param] = set()
        while self.queue and len(seen) < len(asked):
            param, step = self.queue.popleft()
            param.fetched_for = step
            seen.add(param)
        room = min(self.layout.max_live - self.available, self.layout.prefetch_bucket)
        chosen: list[Param] = []
        count = 0
        while self.layout.prefetch_bucket and self.queue and count < room:
            param, step = self.queue.popleft()
            wanted = param.state == AWAY and param not in chosen
            param.fetched_for = max(param.fetched_for, step)
            if wanted:
                chosen.append(param)
                count += param.count
        self.gather(chosen)

    def gather(self, params: Sequence[Param]) -> None:
        """Those that the node holds once more come from there."""
        if self.layout.hpz == 1:
            if params:
                self.gather_from(params, self.layout.size, "zero")
            return
        for within in (True, False):
            some = [param for param in params if (param.second is not None) is within]
            if some:
                self.gather_from(
                    some,
                    self.layout.hpz if within else self.layout.size,
                    "hpz" if within else "zero",
                )

    def gather_from(self, params: Sequence[Param], ranks: int, group: str) -> None:
        """One comes into its own block; several into a buffer, from which each is copied when the
        first of them is asked for. A rank alone gathers nothing
        (runtime/zero/partition_parameters.py NoGatherCoalescedHandle)."""
        r = self.r
        where, r.where = r.where, r.span
        buffers: list[Storage | None] = []
        alone = self.layout.size == 1
        size = sum(param.leaf.format.bytes(param.part * self.layout.size) for param in params)
        if self.layout.qwz and not alone:
            size, buffers = quantized(r, params, (self.layout.size, ranks), self.stream)
        elif len(params) == 1 or alone:
            for param in params:
                param.storage.take()
        else:
            buffers = [r.scratch(size, "all_gather", "communication", self.stream)]
        if self.layout.offload_param != "none" and not alone:
            there = [
                r.scratch(
                    param.leaf.format.bytes(param.part), "to_device", "communication", self.stream
                )
                for param in params
            ]
            del there
        if not alone:
            r.comm("all_gather", size, ranks, group, self.stream)
        elif self.layout.offload_param != "none":
            r.comm("copy", size, 1, "host", self.stream)
        bundle = Bundle(params=list(params), buffers=buffers)
        for param in params:
            param.state = FLYING
            self.flying[param] = bundle
            self.available += param.count
        r.where = where

    def take(self, params: Sequence[Param]) -> None:
        """Gathered for code that asks for them, past the order of modules (partition_parameters.py
        all_gather)."""
        self.gather([param for param in params if param.state == AWAY])
        for param in params:
            if param in self.flying:
                self.wait(param)

    def wait(self, param: Param) -> None:
        bundle = self.flying.pop(param)
        if bundle.done:
            return
        where, self.r.where = self.r.where, self.r.span
        if self.layout.qwz and bundle.buffers:
            opened(self.r, bundle.params, self.layout.size, bundle.buffers, self.stream)
        for one in bundle.params:
            one.storage.take()
            one.state = HERE
        bundle.done = True
        self.r.where = where

    # ----------------------------------------------------------------------------------- releasing
    def release(self, module: Module, forward: bool) -> None:
        """release_sub_module"""
        going = self.going(module) if self.complete else set(module.params)
        if not forward:
            self.backward.pop(module.name, None)
        for param in module.params:
            param.users.discard(module.name)
            if param in going:
                self.give_up(param)

    def going(self, module: Module) -> set[Param]:
        """Those that stay: small ones, ones that were asked for ahead again, and ones that come
        again soon."""
        return {
            param
            for param in module.params
            if not param.stays and param.fetched_for <= self.at and not self.soon(param)
        }

    def soon(self, param: Param) -> bool:
        """Whether it comes again before `max_reuse` others have."""
        uses = self.uses.get(param, [])
        place = bisect_left(uses, self.at)
        return (
            place < len(uses)
            and self.sums[uses[place]] - self.sums[self.at] < self.layout.max_reuse
        )

    def give_up(self, param: Param) -> None:
        if param.state == HERE and not param.users:
            self.keep(param)
            param.storage.drop()
            param.state = AWAY
            self.available -= param.count

    def keep(self, param: Param) -> None:
        """A copy's part stays on the node (partition_parameters.py _partition_param_sec)."""
        if self.layout.hpz > 1 and param.second is None:
            where, self.r.where = self.r.where, self.r.span
            param.second = second(self.r, param, self.layout)
            self.r.where = where

    def leftovers(self) -> None:
        """Modules whose input has no gradient are not told of the end of their backward
        (release_backward_leftovers)."""
        while self.backward:
            _, module = self.backward.popitem()
            for param in module.params:
                param.users.discard(module.name)
                if not param.stays:
                    self.give_up(param)

    def all_away(self, params: Iterable[Param]) -> None:
        for param in params:
            if param in self.flying:
                self.wait(param)
            param.users.clear()
            self.give_up(param)


__all__ = ["AWAY", "HERE", "Bundle", "Coordinator", "Module", "Param"]
