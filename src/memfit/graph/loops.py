"""Writes a graph's loops out: three captured iterations become as many as the sizes ask for, or a
few, where the others repeat what one of them does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from memfit.graph.dims import Dims, evaluated
from memfit.graph.layer import Graph, Loop, Op, Value

KEPT = 3


FEW = 6  # iterations that are written where the others repeat the fifth


class Jump(NamedTuple):
    """The operations from `first` to `second` are one iteration, those up to `last` the next one,
    which happens `times` more than it is written."""

    first: int
    second: int
    last: int
    times: int


def unrolled(graph: Graph, dims: Dims, *, few: bool = False) -> tuple[Graph, tuple[Jump, ...]]:
    """The graph with every loop written out, the last one first. `few`: of a loop whose iterations
    leave nothing behind, a few iterations and how often one of them repeats."""
    counts = [evaluated(loop.count, dims) for loop in graph.loops]
    short = [few and count > FEW and _steady(graph, loop) for loop, count in _zip(graph, counts)]
    written = [FEW if cut else count for cut, count in zip(short, counts, strict=True)]
    jumps: list[Jump] = []
    moved = 0  # operations that the loops before have more than was captured
    for loop, cut, count, found in zip(graph.loops, short, written, counts, strict=True):
        place = loop.start + moved + (FEW - 3) * loop.period
        if cut:
            after = place + loop.period
            jumps.append(Jump(place, after, after + loop.period, found - FEW))
        moved += (count - KEPT) * loop.period
    for loop, count in reversed(_zip(graph, written)):
        graph = _Writer(graph, loop, count).graph()
    return replace(graph, loops=()), tuple(jumps)


def _zip(graph: Graph, counts: Sequence[int]) -> list[tuple[Loop, int]]:
    return list(zip(graph.loops, counts, strict=True))


def _steady(graph: Graph, loop: Loop) -> bool:
    """Whether everything that an iteration makes is gone when the next one is over."""
    begin = loop.start + loop.period
    made = {one for op in graph.ops[begin : begin + loop.period] for one in op.outputs}
    own = [value for value in graph.values if value.id in made and value.of is None]
    end = loop.start + KEPT * loop.period
    return all(value.until is not None and value.until <= end for value in own)


class _Writer:
    """One loop of a graph, written `count` times. Values and operations of the iterations in
    between are those of the second, each moved on."""

    def __init__(self, graph: Graph, loop: Loop, count: int) -> None:
        self.old, self.loop, self.count = graph, loop, count
        self.end = loop.start + KEPT * loop.period
        self.made: dict[int, int] = {}  # value -> operation
        for number, op in enumerate(graph.ops):
            self.made.update(dict.fromkeys(op.outputs, number))
        self.next = 1 + max(value.id for value in graph.values)
        self.ids: dict[tuple[int, int], int] = {}  # (value of the old graph, iteration) -> value
        self.values = {value.id: value for value in graph.values}

    def iteration(self, number: int) -> int:
        """The old iteration that an operation lies in; -1 before the loop, KEPT behind it."""
        if number < self.loop.start:
            return -1
        return min(KEPT, (number - self.loop.start) // self.loop.period)

    def source(self, new: int) -> int:
        """Which captured iteration stands for a new one. The only one is the last, which reads what
        the first does."""
        if new == self.count - 1:
            return KEPT - 1
        return 0 if new == 0 else 1

    def wired(self, new: int) -> int:
        """Which captured iteration reads what a new one does."""
        return 0 if new == 0 else self.source(new)

    def graph(self) -> Graph:
        loop, old = self.loop, self.old
        ops: list[Op] = list(old.ops[: loop.start])
        values: list[Value] = []
        bodies = [
            old.ops[loop.start + k * loop.period : loop.start + (k + 1) * loop.period]
            for k in range(KEPT)
        ]
        for new in range(self.count):
            source = self.source(new)
            for op, wired in zip(bodies[source], bodies[self.wired(new)], strict=True):
                ops.append(
                    replace(
                        op,
                        inputs=tuple(self.read(one, self.wired(new), new) for one in wired.inputs),
                        outputs=tuple(self.name(one, new) for one in op.outputs),
                    )
                )
                values += [self.moved(one, source, new) for one in op.outputs]
        ops += [replace(op, inputs=self.read_behind(op.inputs)) for op in old.ops[self.end :]]
        outside = [
            replace(value, until=self.moment(value.until, None, 0))
            for value in old.values
            if not 0 <= self.iteration(self.made.get(value.id, -1)) < KEPT
        ]
        outputs = {name: self.last(one) for name, one in old.outputs.items()}
        return replace(
            old,
            ops=tuple(ops),
            values=tuple(sorted([*outside, *values], key=lambda v: v.id)),
            outputs=outputs,
        )

    def name(self, value: int, new: int) -> int:
        key = value, new
        if key not in self.ids:
            self.ids[key] = self.next
            self.next += 1
        return self.ids[key]

    def twin(self, value: int, wanted: int) -> int:
        """The value that another captured iteration makes in the same place."""
        number = self.made[value]
        op = self.old.ops[number + (wanted - self.iteration(number)) * self.loop.period]
        return op.outputs[self.old.ops[number].outputs.index(value)]

    def read(self, one: int | str | None, source: int, new: int) -> int | str | None:
        if not isinstance(one, int):
            return one
        at = self.iteration(self.made.get(one, -1))
        if at < 0:
            return one
        behind = source - at  # how many iterations ago
        before = max(0, new - behind)  # of two, the last one reads the first
        return self.name(self.twin(one, self.source(before)), before)

    def last(self, one: int) -> int:
        at = self.iteration(self.made.get(one, -1))
        if not 0 <= at < KEPT:
            return one
        new = 0 if at == 0 and self.count > 1 else self.count - 1
        return self.name(self.twin(one, self.source(new)), new)

    def read_behind(self, inputs: tuple[int | str | None, ...]) -> tuple[int | str | None, ...]:
        """What follows the loop reads the last iteration's values, or a list of all of them."""
        found: list[int | str | None] = []
        index = 0
        while index < len(inputs):
            one = inputs[index]
            at = self.iteration(self.made.get(one, -1)) if isinstance(one, int) else -1
            if not isinstance(one, int) or not 0 <= at < KEPT:
                found.append(one)
                index += 1
                continue
            three = inputs[index : index + KEPT]
            if at == 0 and list(three) == [self.twin(one, k) for k in range(KEPT)]:
                found += [
                    self.name(self.twin(one, self.source(new)), new) for new in range(self.count)
                ]
                index += KEPT
            else:
                found.append(self.last(one))
                index += 1
        return tuple(found)

    def moved(self, value: int, source: int, new: int) -> Value:
        old = self.values[value]
        of = self.values[self.twin(value, self.wired(new))].of
        if of is not None:
            found = self.read(of, self.wired(new), new)
            of = found if isinstance(found, int) else None
        return replace(
            old, id=self.name(value, new), of=of, until=self.moment(old.until, source, new)
        )

    def moment(self, until: int | None, source: int | None, new: int) -> int | None:
        """A point between operations in the graph as it becomes; those of an iteration's values are
        as many iterations on."""
        if until is None or until <= self.loop.start:
            return until
        if until > self.end:
            return until + (self.count - KEPT) * self.loop.period
        at, place = divmod(until - 1 - self.loop.start, self.loop.period)
        target = (
            new + at - source
            if source is not None
            else self.count - 1
            if at == KEPT - 1
            else min(at, self.count - 1)
        )
        if target >= self.count:
            return self.loop.start + self.count * self.loop.period
        return self.loop.start + target * self.loop.period + place + 1


__all__ = ["Jump", "unrolled"]
