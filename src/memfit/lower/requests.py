"""What a compact tape asks of the allocator, layer by layer, without the tape written out: a search
needs the reserved memory alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from memfit.lower.expand import Copies, Expansion, Given, Paths, Unclear, found
from memfit.lower.layout_notice import Line
from memfit.program import Entry
from memfit.tape import NOTHING, Alloc, Free, Mark, Repeat, Sync, Trim

Request: TypeAlias = "tuple[int, int, int]"  # a block, its size or FREED, its stream
FREED = -1


def requests(
    events: Sequence[Line], repeats: Sequence[Repeat], entries: Sequence[Entry], path: Paths
) -> Iterator[Request]:
    """Every block that is allocated or freed, in order. Raises `Unclear` where `expanded` gives up,
    and where streams wait for each other."""
    if not repeats:
        return flat(events)
    return _Requests(events, repeats, entries, path).all()


class _Requests(Expansion):
    def all(self) -> Iterator[Request]:
        at = 0
        for first, last, times, _ in self.repeats:
            yield from self.single(self.events[at:first])
            yield from self.repeated(first, last, times)
            at = last
        yield from self.single(self.events[at:])

    def single(self, events: Sequence[Line]) -> Iterator[Request]:
        """Events that stand once."""
        third = -1
        for event in events:
            if type(event) is Alloc:
                self.once[event[0]] = number = self.number()
                yield number, event[1], event[6]
            elif type(event) is Free:
                plain(event)
                yield self.standing(event[0], third), FREED, 0
            elif type(event) is Mark:
                number, group = self.groups.get(event.where, (-1, None))
                third = -1 if group is None else group.third(number)
            else:
                plain(event)

    def repeated(self, first: int, last: int, times: int) -> Iterator[Request]:
        """The layers of the middle."""
        span = self.events[first:last]
        mark = span[0]
        assert isinstance(mark, Mark)
        steps: list[tuple[Copies | Given | None, int, int]] = []
        for event in span:
            if type(event) is Alloc:
                steps.append((self.many[event[0]], event[1], event[6]))
            elif type(event) is Free:
                plain(event)
                steps.append((self.compiled(event)[1], FREED, 0))
            else:
                plain(event)
        for copy in range(times) if self.rising(first, mark) else range(times - 1, -1, -1):
            fresh = self.fresh
            for place, size, stream in steps:
                if size != FREED:
                    place[copy] = fresh  # type: ignore[index]
                    yield fresh, size, stream
                    fresh += 1
                elif type(place) is list and place[copy] >= 0:
                    yield place[copy], FREED, 0
                else:
                    yield found(place, copy), FREED, 0
            self.fresh = fresh


def flat(events: Sequence[Line]) -> Iterator[Request]:
    """Of a tape on which every event stands once."""
    for event in events:
        if type(event) is Alloc:
            yield event[0], event[1], event[6]
        else:
            plain(event)
            if type(event) is Free:
                yield event[0], FREED, 0


def plain(event: Line) -> None:
    """Blocks that other streams use, and what gives memory back, need the whole tape."""
    kind = type(event)
    if (
        (kind is Free and len(event) > 1 and event[1])
        or (kind is Sync and event is not NOTHING)
        or kind is Trim
    ):
        raise Unclear


__all__ = ["FREED", "Request", "requests"]
