"""Where one layer was walked for many: the spans that repeat, and how their runs differ. What
layers hand to each other, what all of them share and what one makes for all is not the same in
every run; if a walk does not tell how, more layers are walked."""

from __future__ import annotations

import sys
from bisect import bisect
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Storage, Tensor
from memfit.model.modules import Layer
from memfit.program import Entry, Program
from memfit.tape import NOTHING, Alloc, Free, Mark, Odd, Repeat

FIRST, LAST = 0, -1  # runs
UPWARD = (
    "forward",
    "evaluate",
    "prefill",
    "decode",
)  # phases whose passes go from the first layer to the last


class StandIn(Storage):
    """What a layer that stands for many is handed as its input: `block` in the layer that is first,
    in the others the output of a neighbour. It is no block itself: its `Free` only says when a
    layer lets go of its input."""

    __slots__ = ("block",)
    block: Storage


class Handed(NamedTuple):
    """What a stand-in is in the first layer, and in the others: blocks; `make` is what kind of
    tensor it stands in."""

    block: int
    make: tuple[Any, ...]
    out: int = -1
    alike: bool = False  # the layer's output is of the same make as its input


class Copy(NamedTuple):
    """Events from `start` up to `stop` that happen once more, from `first` on, without those at the
    places `gone`."""

    start: int
    stop: int
    first: int
    gone: list[int]

    @property
    def last(self) -> int:
        return self.place(self.stop)

    def place(self, at: int) -> int:
        return at + self.first - self.start - bisect(self.gone, at)


class Notes:
    """Kept while layers are walked that stand for others."""

    def __init__(self) -> None:
        self.handed: dict[int, Handed] = {}  # by stand-in
        self.borders: dict[
            int, tuple[Any, ...]
        ] = {}  # by the number of the mark: the gradients on their way to another span
        self.kept: dict[
            int, list[int]
        ] = {}  # by the number of the mark: blocks that variables of a loop over layers hold
        self.copies: list[Copy] = []
        self.inside = 0  # how many layers of the period that runs are still to come
        self.stand_in = -1  # for the input of that period

    def enter(self, r: Recorder, x: Tensor, entry: Entry) -> Tensor:
        """The input of the next layer; a period that stands for many gets a stand-in, unless its
        input is a leaf, which would collect a gradient."""
        if entry.times == 1 or self.inside:
            return x
        self.inside, self.stand_in = entry.period, -1
        if x.storage is None or (x.needs and x.node is None):
            return x
        self.stand_in = id = r.number()
        self.handed[id] = Handed(x.storage.id, make_of(x))
        storage = StandIn(id, x.storage.size, r.write)
        storage.block = x.storage
        twin = Tensor(x.shape, x.format, storage, x.node, x.needs)
        twin.slot, twin.strides, twin.base = x.slot, x.strides, x.base
        return twin

    def leave(self, x: Tensor) -> None:
        """The output of a layer."""
        if self.inside:
            self.inside -= 1
            handed = self.handed.get(self.stand_in)
            if self.inside == 0 and handed is not None and x.storage is not None:
                self.handed[self.stand_in] = handed._replace(
                    out=x.storage.id, alike=handed.make == make_of(x)
                )

    def keep(self, r: Recorder, held: Iterable[Tensor]) -> None:
        """What variables of a loop over layers hold at the mark just made."""
        self.kept[len(r.marks) - 1] = [
            -1 if one.storage is None else one.storage.id for one in held
        ]

    def cross(self, mark: int, buffers: dict[Any, Tensor]) -> None:
        """Backward goes from one span to another."""
        self.borders[mark] = tuple(
            (one.shape, one.format, one.strides, one.base is None, sys.getrefcount(one.storage))
            for key, one in buffers.items()
            if not isinstance(key, Tensor)
        )


def make_of(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.format, x.strides, x.slot, x.needs, x.base is None


class Span(NamedTuple):
    """Events of one group of layers: one period of them, for which one stands. `low` and `high`
    bound the numbers of its blocks; `since` is the first one of the pass."""

    first: int
    last: int
    times: int
    group: int
    phase: str
    low: int
    high: int
    since: int
    marks: tuple[int, int]  # the one that it begins with, and the one behind it


def spans(r: Recorder, program: Program) -> list[Span]:
    """Between marks. Layers that alternate repeat together, in one span: all that are marked in a
    row, each once."""
    standing = groups(program)
    found: list[Span] = []
    behind = [*zip(r.marks[1:], r.marked[1:], strict=True), (len(r.events), r.next_id)]
    since, begin = 0, 0
    phase = ""
    gathered: list[str] = []  # paths since the mark `begin`
    group = -1

    def close(place: int) -> None:
        if gathered:
            last, high = behind[place - 1]
            times = standing[gathered[0]][0].times
            found.append(
                Span(
                    r.marks[begin],
                    last,
                    times,
                    group,
                    phase,
                    r.marked[begin],
                    high,
                    since,
                    (begin, place),
                )
            )
            gathered.clear()

    for place, first in enumerate(r.marks):
        mark = r.events[first]
        assert isinstance(mark, Mark)
        entry, number = standing.get(mark.where, NOBODY)
        if (
            number != group
            or mark.where in gathered
            or mark.phase != phase
            or len(gathered) == entry.period
        ):
            close(place)
            begin, group = place, number
        if mark.phase != phase:
            phase, since = mark.phase, r.marked[place]
        if number:
            gathered.append(mark.where)
    close(len(r.marks))
    return found


NOBODY = (Entry(-1, Layer(name="", blocks=())), 0)


def groups(program: Program) -> dict[str, tuple[Entry, int]]:
    """Entries that stand for many, by path, with the number of their group."""
    found: dict[str, tuple[Entry, int]] = {}
    at = number = 0
    while at < len(program.entries):
        entry = program.entries[at]
        if entry.times > 1:
            number += 1
            found.update(
                {
                    program.model.path(one.number): (one, number)
                    for one in program.entries[at : at + entry.period]
                }
            )
        at += entry.period if entry.times > 1 else 1
    return found


def repeats(r: Recorder, program: Program) -> tuple[Repeat, ...] | None:
    """None where the walk does not tell how runs differ. Without notes they do not: their ends were
    walked by themselves."""
    found = spans(r, program)
    if r.notes is None:
        return tuple(Repeat(span.first, span.last, span.times) for span in found)
    try:
        return Ledger(r, r.notes, found).repeats()
    except Unclear:
        return None


class Unclear(Exception):
    """What crosses a span's border is neither handed from layer to layer nor shared by all."""


STAND_IN = 255  # an owner; groups are numbered from 1, what is outside of all has 0


class Ledger:
    """Finds for every `Free` that reaches over a span's border which run it happens in."""

    def __init__(self, r: Recorder, notes: Notes, found: list[Span]) -> None:
        self.r, self.notes = r, notes
        self.spans = [
            span
            for span in found
            if not any(copy.first <= span.first < copy.last for copy in notes.copies)
        ]
        self.odd: dict[int, list[Odd]] = {span.first: [] for span in self.spans}
        self.owner = bytearray(r.next_id)
        if any(span.group >= STAND_IN for span in self.spans):
            raise Unclear
        for span in self.spans:
            self.owner[span.low : span.high] = bytes((span.group,)) * (span.high - span.low)
        for id in notes.handed:
            self.owner[id] = STAND_IN
        self.given = {handed.block for handed in notes.handed.values()}
        self.expected: set[int] = (
            set()
        )  # blocks of a span that are freed behind it once, in the name of one run
        self.left: set[int] = set()
        self.gradients: list[
            tuple[Span, list[tuple[int, int]]]
        ] = []  # by span of backward, those that it frees and did not make

    def repeats(self) -> tuple[Repeat, ...]:
        at = 0
        stretches: list[Span | Copy] = [*self.spans, *self.notes.copies]
        for one in sorted(stretches, key=lambda one: one.first):
            self.outside(at, one.first)
            if isinstance(one, Span):
                self.inside(one)
            at = one.last
        self.outside(at, len(self.r.events))
        for span, gradients in self.gradients:
            self.passed_down(span, gradients)
        self.made_once()
        at_home = self.expected - self.left  # freed by their own layer, or never
        if self.left - self.expected or (
            at_home and any(type(event) is Free and event.id in at_home for event in self.r.events)
        ):
            raise Unclear
        own = [
            Repeat(span.first, span.last, span.times, tuple(sorted(self.odd[span.first])))
            for span in self.spans
        ]
        return tuple(
            sorted(
                [
                    *own,
                    *(again for copy in self.notes.copies for again in self.once_more(copy, own)),
                ]
            )
        )

    def once_more(self, copy: Copy, own: list[Repeat]) -> Iterator[Repeat]:
        """What the spans of a stretch are in its copy."""
        for first, last, times, odd in own:
            if copy.start <= first < copy.stop:
                yield Repeat(
                    copy.place(first),
                    copy.place(last),
                    times,
                    tuple(
                        Odd(copy.place(place), run, instead)
                        for place, run, instead in odd
                        if place not in copy.gone
                    ),
                )

    def crossing(self, first: int, last: int, group: int) -> list[tuple[int, int, int]]:
        """(place, block, its owner) of what is freed and was not made here."""
        owner = self.owner
        return [
            (place, event[0], owner[event[0]])
            for place, event in enumerate(self.r.events[first:last], first)
            if type(event) is Free and owner[event[0]] != group
        ]

    def outside(self, first: int, last: int) -> None:
        for _, id, owner in self.crossing(first, last, 0):
            if owner == STAND_IN:
                raise Unclear
            self.left.add(id)

    def inside(self, span: Span) -> None:
        """Each foreign block that is freed here is a stand-in, a first layer's input, the gradient
        that backward began with, or shared by all layers, so that the last to run frees it."""
        odd, backward = self.odd[span.first], span.phase == "backward"
        run = LAST if backward else FIRST
        before, after = (self.notes.kept.get(mark, []) for mark in span.marks)
        kept = dict(zip(before, after, strict=True)) if len(before) == len(after) else {}
        gradients: list[tuple[int, int]] = []
        for place, id, owner in self.crossing(span.first, span.last, span.group):
            if owner == STAND_IN:
                handed = self.notes.handed[id]
                if not handed.alike or not (backward or span.phase in UPWARD):
                    raise Unclear
                for at in (
                    place,
                    *(
                        copy.place(place)
                        for copy in self.notes.copies
                        if copy.start <= place < copy.stop
                    ),
                ):
                    self.r.events[at] = NOTHING
                odd.append(Odd(place, run, self.neighbours(span, handed.out)))
                continue
            if owner:
                self.left.add(id)
            if id in kept:
                odd.append(Odd(place, FIRST, self.neighbours(span, kept[id])))
            elif id in self.given:
                odd.append(Odd(place, run, NOTHING))
            elif backward and id >= span.since:
                gradients.append((place, id))
            elif backward:
                odd.append(Odd(place, LAST, NOTHING))
            else:
                raise Unclear
        if backward:
            self.gradients.append((span, gradients))

    def neighbours(self, span: Span, id: int) -> Free:
        """What a run does to a block of the run before, which is freed once in all."""
        if id < 0 or self.owner[id] != span.group or id in self.expected:
            raise Unclear
        self.expected.add(id)
        return Free(id)

    def passed_down(self, span: Span, gradients: list[tuple[int, int]]) -> None:
        """The gradient of the layers' output is freed in the first run; the others free that of a
        neighbour."""
        begin, end = (self.notes.borders.get(mark) for mark in span.marks)
        if begin is not None and begin != end:
            raise Unclear
        behind = [id for id in self.left if span.low <= id < span.high]
        if len(gradients) != len(behind) or len(behind) > 1:
            raise Unclear
        for (place, _), id in zip(gradients, behind, strict=True):
            self.odd[span.first].append(Odd(place, FIRST, self.neighbours(span, id)))

    def made_once(self) -> None:
        events = self.r.events
        for id in self.r.once:
            for span in self.spans:
                if span.low <= id < span.high:
                    place = next(
                        at
                        for at in range(span.first, span.last)
                        if isinstance(event := events[at], Alloc) and event.id == id
                    )
                    self.odd[span.first].append(Odd(place, FIRST, NOTHING))


__all__ = ["Notes", "repeats"]
