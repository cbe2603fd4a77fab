"""Peaks of live bytes, also where events stand for many layers: one pass over them, however many.

The runs of a repeated span differ in its odd events alone. What happens between those is a piece,
which moves the live bytes alike in every run, so that it is walked once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import NamedTuple, TypeAlias

from memfit.errors import TapeError
from memfit.lazy_dataclass import dataclass
from memfit.tape import Alloc, Event, Free, Mark, Odd, Repeat, Tape

Phase: TypeAlias = "tuple[str, int]"  # and its step


class Piece(NamedTuple):
    """Events in a row of one phase: by how much live bytes are higher behind them, `net`, and at
    most, `top`, first at event `at`. An `odd` one may follow."""

    net: int
    top: int
    at: int
    phase: Phase
    odd: Odd | None


@dataclass(slots=True)
class Peaks:
    """`allocated` at most, first after event `at` in its `run`; the most of each phase, what it
    began with included; what is left in the end."""

    allocated: int = 0
    at: int | None = None
    run: int = 0
    phases: list[tuple[Phase, int]] = field(default_factory=list)
    end: int = 0


def peaks(tape: Tape) -> Peaks:
    """Each of several runs alike starts `net` higher than the one before: the peak is that of the
    last one if `net` is positive, of the first one otherwise."""
    found = Peaks()
    sizes: dict[int, int] = {}
    live = top = 0  # top: the peak of the phase under way
    phase: Phase = ("", 0)
    for repeat in spans(tape):
        pieces = list(_pieces(tape.events, repeat, phase, sizes))
        for number, times in repeat.runs():
            changes = [
                0 if piece.odd is None else _change(tape, repeat, piece.odd, number, sizes)
                for piece in pieces
            ]
            net = sum(changes) + sum(piece.net for piece in pieces)
            rise = max(0, (times - 1) * net)
            for piece, change in zip(pieces, changes, strict=True):
                if piece.phase != phase:
                    if phase[0] or top:
                        found.phases.append((phase, top))
                    phase, top = piece.phase, live
                behind = live + piece.net + change
                high, at = live + piece.top, piece.at
                if behind > high and piece.odd is not None:
                    high, at = behind, piece.odd.place
                if high + rise > top:
                    top = high + rise
                    if top > found.allocated:
                        found.allocated, found.at, found.run = (
                            top,
                            at,
                            number + (times - 1 if rise else 0),
                        )
                live = behind
            live += (times - 1) * net
    if phase[0] or top:
        found.phases.append((phase, top))
    found.end = live
    return found


def spans(tape: Tape) -> Iterator[Repeat]:
    """All of the tape without gaps: what is repeated, and what stands once."""
    at = 0
    for repeat in tape.repeats:
        if at < repeat.first:
            yield Repeat(at, repeat.first, 1)
        yield repeat
        at = repeat.last
    if at < len(tape.events):
        yield Repeat(at, len(tape.events), 1)


def _pieces(
    events: tuple[Event, ...], repeat: Repeat, phase: Phase, sizes: dict[int, int]
) -> Iterator[Piece]:
    first = repeat.first
    for odd in (*repeat.odd, None):
        net = top = 0
        at = first
        for place, event in enumerate(
            events[first : repeat.last if odd is None else odd.place], first
        ):
            if type(event) is Alloc:
                size = event[1]  # by place: a name costs as much as the sum
                sizes[event[0]] = size = (size | 511) + 1 if size & 511 else size
                net += size
                if net > top:
                    top, at = net, place
            elif type(event) is Free:
                net -= sizes[event[0]]
            elif type(event) is Mark and (event.phase, event.step) != phase:
                if place > repeat.first:
                    if repeat.times > 1:
                        raise TapeError(
                            f"event {place}: a repeated span goes from one phase to another"
                        )
                    yield Piece(net, top, at, phase, None)
                    net = top = 0
                phase = (event.phase, event.step)
        yield Piece(net, top, at, phase, odd)
        if odd is not None:
            first = odd.place + 1
            for event in (events[odd.place], odd.instead):
                if type(event) is Alloc:
                    sizes[event.id] = event.size + 511 & -512


def _change(tape: Tape, repeat: Repeat, odd: Odd, run: int, sizes: dict[int, int]) -> int:
    """What the odd event does to live bytes in this run."""
    event = tape.events[odd.place] if repeat.happens(odd, run) else odd.instead
    return (
        sizes[event.id] if type(event) is Alloc else -sizes[event.id] if type(event) is Free else 0
    )
