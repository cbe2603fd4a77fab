"""A compact tape written out: spans that stand for several layers repeat under new numbers, event
for event as if every layer had been walked. Where a tape does not say how its layers hang together,
the answer is None, and they are walked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from memfit.lazy_dataclass import dataclass
from memfit.lower.layout_notice import Line, Notice
from memfit.program import Entry
from memfit.tape import Alloc, Comm, Compute, Free, Mark, Repeat

Paths: TypeAlias = "Callable[[int], str]"  # a layer's path by its number
Step: TypeAlias = "tuple[type, Any, Any]"  # an event's kind, its fields, and how to find its block
Copies: TypeAlias = "list[int]"  # the numbers of one block of the middle layer, copy by copy


class Group(NamedTuple):
    """Like layers in a row: the first period, `times` in the middle for which one stands, and the
    last."""

    first: int
    period: int
    times: int

    def third(self, number: int) -> int:
        away = number - self.first
        return 0 if away < self.period else 2 if away >= self.period * (self.times + 1) else 1


class Visit(NamedTuple):
    """The events of a layer from one mark to the next: the layer's group, number and path, in which
    pass it runs and how often it had run in it."""

    first: int
    last: int
    group: Group
    number: int
    path: str
    when: tuple[int, int]


class Kinds(NamedTuple):
    """The blocks of a visit by their kind, and the kind and place among its like of each. A first
    layer may have blocks that others lack (a workspace), so that counting all would mislead."""

    blocks: dict[tuple[Any, ...], list[int]]
    places: dict[int, tuple[tuple[Any, ...], int]]


class Unclear(Exception):
    """The compact tape does not say which layer's block is meant."""


def expanded(
    events: Sequence[Line], repeats: Sequence[Repeat], entries: Sequence[Entry], path: Paths
) -> tuple[Line, ...] | None:
    try:
        return tuple(Expansion(events, repeats, entries, path).run())
    except Unclear:
        return None


@dataclass(frozen=True, slots=True)
class Given:
    """A block freed in the middle that a neighbour made: the middle's own block like it, and by how
    many copies that is away."""

    like: Copies
    end: int  # the neighbour's, where there is no copy so far
    away: int


class Expansion:
    def __init__(
        self,
        events: Sequence[Line],
        repeats: Sequence[Repeat],
        entries: Sequence[Entry],
        path: Paths,
    ) -> None:
        self.events, self.repeats, self.path = events, repeats, path
        self.groups = dict(grouped(entries, path))
        self.at_home = {
            event[0]
            for first, last, *_ in repeats
            for event in events[first:last]
            if type(event) is Free
        }  # what the middle layer frees itself, if it is its own
        self.visits: list[Visit] = []
        self.visited: dict[tuple[int, tuple[int, int]], int] = {}  # by layer and when
        self.known: dict[int, Kinds] = {}  # by visit
        self.homes: dict[int, int] | None = None
        self.fresh = 0
        self.once: dict[int, int] = {}  # new numbers of blocks that stand once
        self.many: dict[int, Copies] = {}
        self.out: list[Line] = []
        self.names: dict[
            tuple[tuple[str, ...], int], dict[str, str]
        ] = {}  # by what a span goes through, and copy: paths as they will be
        self.note()

    def note(self) -> None:
        """When which layer runs, and the blocks of the middle ones."""
        often: dict[int, tuple[int, int]] = {}
        passes = 0
        phase: tuple[str, int] = ("", 0)
        marks = [at for at, event in enumerate(self.events) if type(event) is Mark]
        for at, end in zip(marks, [*marks[1:], len(self.events)], strict=True):
            mark = self.events[at]
            assert type(mark) is Mark
            number, group = self.groups.get(mark.where, (-1, None))
            passes += (mark.phase, mark.step) != phase
            phase = mark.phase, mark.step
            before, times = often.get(number, (0, 0))
            often[number] = when = passes, times + 1 if before == passes else 1
            if group is None:
                continue
            self.visited[number, when] = len(self.visits)
            self.visits.append(Visit(at, end, group, number, mark.where, when))
            if group.third(number) == 1:
                for event in self.events[at:end]:
                    if type(event) is Alloc:
                        self.many[event[0]] = [-1] * group.times

    def home(self, id: int) -> int | None:
        """The visit in which a block of the first or last layers was made."""
        if self.homes is None:
            self.homes = {
                event[0]: number
                for number, visit in enumerate(self.visits)
                if visit.group.third(visit.number) != 1
                for event in self.events[visit.first : visit.last]
                if type(event) is Alloc
            }
        return self.homes.get(id)

    def kinds(self, number: int) -> Kinds:
        """The blocks of a visit."""
        found = self.known.get(number)
        if found is None:
            visit = self.visits[number]
            found = self.known[number] = Kinds({}, {})
            for event in self.events[visit.first : visit.last]:
                if type(event) is Alloc:
                    id, size, part, where, op, _, _ = event
                    kind = size, op, part, where.removeprefix(visit.path)
                    made = found.blocks.setdefault(kind, [])
                    found.places[id] = kind, len(made)
                    made.append(id)
        return found

    def like(self, number: int, when: tuple[int, int], kind: tuple[Any, ...]) -> list[int]:
        """The blocks of a kind that a layer made then."""
        visit = self.visited.get((number, when))
        return [] if visit is None else self.kinds(visit).blocks.get(kind, [])

    def run(self) -> list[Line]:
        at = 0
        for first, last, times, _ in self.repeats:
            self.copy(self.events[at:first])
            self.repeat(first, last, times)
            at = last
        self.copy(self.events[at:])
        return self.out

    def number(self) -> int:
        self.fresh += 1
        return self.fresh - 1

    def copy(self, events: Sequence[Line]) -> None:
        """Events that stand once."""
        third = -1
        new, add = tuple.__new__, self.out.append
        for event in events:
            if type(event) is Alloc:
                self.once[event[0]] = number = self.number()
                event = new(Alloc, (number, *event[1:]))
            elif type(event) is Free:
                event = new(Free, (self.standing(event[0], third), event[1]))
            elif type(event) is Notice and event.block >= 0:
                event = event._replace(block=self.standing(event.block, third))
            elif type(event) is Mark:
                number, group = self.groups.get(event.where, (-1, None))
                third = -1 if group is None else group.third(number)
            add(event)

    def standing(self, id: int, third: int) -> int:
        return self.once[id] if id in self.once else self.nearest(id, third)

    def nearest(self, id: int, third: int) -> int:
        """A block of the middle that its first or last neighbour frees, or that is freed when no
        layer runs: then the one made last."""
        copies = self.many.get(id, [-1])
        number = max(copies) if third == -1 else copies[-1 if third == 2 else 0]
        if number < 0:
            raise Unclear
        return number

    # ---------------------------------------------------------------------------------- the middle
    def repeat(self, first: int, last: int, times: int) -> None:
        span = self.events[first:last]
        mark = span[0]
        assert isinstance(mark, Mark)
        steps = [unnamed(*self.compiled(event)) for event in span]
        marks = tuple(event.where for event in span if type(event) is Mark)
        order = range(times) if self.rising(first, mark) else range(times - 1, -1, -1)
        for copy in order:
            self.write(steps, copy, self.names.setdefault((marks, copy), {}))

    def rising(self, first: int, mark: Mark) -> bool:
        """Do the layers run from the first to the last? Their neighbour that ran just before says
        so."""
        _, group = self.groups[mark.where]
        events = self.events
        for at in range(first - 1, -1, -1):
            event = events[at]
            if type(event) is Mark:
                number, before = self.groups.get(event.where, (-1, None))
                if before is not group or (event.phase, event.step) != (mark.phase, mark.step):
                    raise Unclear
                return group.third(number) == 0
        raise Unclear

    def compiled(self, event: Line) -> tuple[Line, Copies | Given | None]:
        """An event of the middle, and how to find the block that it is about."""
        if type(event) is Alloc:
            return event, self.many[event.id]
        id = event.block if type(event) is Notice else event.id if type(event) is Free else -1
        if id < 0:
            return event, None
        own = self.many.get(id)
        if own is not None:
            return event, own
        home = self.home(id)
        if home is None:
            raise Unclear
        visit = self.visits[home]
        third = visit.group.third(visit.number)
        number = visit.number + visit.group.period * (1 if third == 0 else -visit.group.times)
        kind, at = self.kinds(home).places[id]
        like, mine = (self.like(one, visit.when, kind) for one in (number, visit.number))
        # The layer that runs first may make one more, in front: what is fetched ahead for the
        # others.
        place = at + len(like) - len(mine)
        if place < 0 or like[place] in self.at_home:  # the first layer alone lets it go so soon
            raise Unclear
        return event, Given(self.many[like[place]], self.once.get(id, -1), -1 if third == 0 else 1)

    def write(self, steps: Sequence[Step], copy: int, names: dict[str, str]) -> None:
        """The events of one layer of the middle."""
        add, new, fresh, old, here = self.out.append, tuple.__new__, self.fresh, "", ""

        def renamed(where: str) -> str:
            own = where == old or where.startswith(f"{old}.")
            names[where] = name = here + where[len(old) :] if own else where
            return name

        for kind, event, place in steps:
            if kind is Free:  # by place and without the names of fields: a third of all the time
                number = place[copy] if type(place) is list else found(place, copy)
                if number < 0:
                    raise Unclear
                add(new(Free, (number, event[1])))
            elif kind is Alloc:
                _, size, part, where, op, formula, stream = event
                place[copy] = fresh
                where = names.get(where) or renamed(where)
                add(new(Alloc, (fresh, size, part, where, op, formula, stream)))
                fresh += 1
            elif kind is Mark:
                own, group = self.groups[event.where]
                old, here = event.where, self.path(own + copy * group.period)
                add(new(Mark, (event[0], renamed(old), event[2])))
            elif kind is Compute:
                op, flops, size, math, where, stream, kernels = event
                where = names.get(where) or renamed(where)
                add(new(Compute, (op, flops, size, math, where, stream, kernels)))
            elif kind is Comm:
                add(event._replace(where=names.get(event.where) or renamed(event.where)))
            elif kind is Notice:
                act, where, name, leaves, block = event
                leaves = tuple(
                    leaf and (names.get(leaf[0]) or renamed(leaf[0]), leaf[1]) for leaf in leaves
                )
                number = -1 if block < 0 else found(place, copy)
                where = names.get(where) or renamed(where)
                name = name and (names.get(name) or renamed(name))
                add(Notice(act, where, name, leaves, number))
            else:
                add(event)
        self.fresh = fresh


def unnamed(event: Line, place: Copies | Given | None) -> Step:
    """Plain tuples are taken apart in half of the time of named ones."""
    kind = type(event)
    return kind, tuple(event) if kind in (Alloc, Free, Compute) else event, place


def found(place: Copies | Given | None, copy: int) -> int:
    if isinstance(place, Given):
        other = copy + place.away
        number = place.like[other] if 0 <= other < len(place.like) else place.end
    else:
        assert place is not None
        number = place[copy]
    if number < 0:
        raise Unclear
    return number


def grouped(entries: Sequence[Entry], path: Paths) -> Iterator[tuple[str, tuple[int, Group]]]:
    """The layers' paths, with their numbers and groups."""
    at = 0
    while at < len(entries):
        period = entries[at].period
        if at + 2 * period < len(entries) and entries[at + period].times > 1:
            group = Group(entries[at].number, period, entries[at + period].times)
            for entry in entries[at : at + 3 * period]:
                yield path(entry.number), (entry.number, group)
            at += 3 * period
        else:
            at += 1
