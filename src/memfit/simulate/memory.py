"""A tape's memory: the peak of live bytes, when it comes, what it is made of, and the peak of every
phase before and after.

Live sums round each block up to 512 bytes and work on compact tapes, too. Given the replay of a
flat tape, `allocated` is what torch's own counter would show (remainders that the allocator does
not split off included) and `reserved` is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Annotated, NamedTuple

from memfit.constants import setting
from memfit.errors import TapeError
from memfit.lazy_dataclass import dataclass
from memfit.simulate.peaks import peaks, spans
from memfit.simulate.replay import Replay
from memfit.tape import LONGEST, NOTHING, Alloc, Event, Free, Mark, Repeat, Tape

MOMENTS = (
    "load",
    "first step",
    "steady step",
    "longest batch",
    "evaluate",
    "save",
    "prefill",
    "decode",
)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When and where: `like` says how many identical layers `where` stands for on a compact
    tape."""

    phase: str
    step: int
    where: str
    op: str
    index: int
    like: int = 1


class Stretch(NamedTuple):
    """The peaks while a run is in one phase of one step; what was held when it began counts,
    too."""

    moment: str
    phase: str
    step: int
    allocated: int
    reserved: int | None = None


class Group(NamedTuple):
    """Live blocks that are alike: the layer's number in `where` is a star. `bytes` are what was
    asked for, all together."""

    part: str
    where: str
    op: str
    formula: str | tuple[int, ...]
    size: int
    times: int

    @property
    def bytes(self) -> int:
        return self.size * self.times


@dataclass(frozen=True, kw_only=True)
class Memory:
    """`parts` are the bytes asked for by the blocks alive at the peak, and `rounding`: what the
    allocator adds to them. They sum to `allocated`. `at` is None for a tape that allocates nothing;
    `end` is what is still alive when the tape ends."""

    allocated: int
    reserved: int | None
    at: Moment | None
    reserved_at: Moment | None
    parts: Mapping[str, int]
    timeline: tuple[Stretch, ...]
    end: int
    tape: Tape = field(repr=False, compare=False)
    run: int = field(default=0, repr=False)  # which run of a repeated span the peak is in

    @property
    def fragmentation(self) -> int | None:
        """What the allocator holds beyond the live peak: cached blocks and the gaps between live
        ones."""
        return None if self.reserved is None else self.reserved - self.allocated

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The blocks alive at the peak, alike ones together, by part and falling size."""
        if self.at is None:
            return ()
        counts: dict[tuple[str, str, str, str | tuple[int, ...], int], int] = {}
        for part, block, times in blocks(self.tape, self.at.index, self.run):
            key = (part, starred(block.where), block.op, block.formula, block.size)
            counts[key] = counts.get(key, 0) + times
        order = {part: place for place, part in enumerate(self.parts)}
        groups = (Group(*key, times) for key, times in counts.items() if times)
        return tuple(
            sorted(
                groups,
                key=lambda one: (
                    order.get(one.part, 99),
                    -one.bytes,
                    one.where,
                    one.op,
                    str(one.formula),
                ),
            )
        )


def memory(tape: Tape, replay: Replay | None = None) -> Memory:
    """`replay` is that of this very tape, which is then flat, and without a limit that it ran
    into."""
    if replay is not None and (tape.repeats or replay.oom is not None):
        raise TapeError("peaks of a replay belong to a flat tape that got through")
    if replay is None:
        found = peaks(tape)
        allocated, index, run, end = found.allocated, found.at, found.run, found.end
        stretches = [Stretch("", *phase, most) for phase, most in found.phases]
    else:
        allocated, index, run, end = (
            replay.peak_allocated,
            replay.allocated_at,
            0,
            replay.end_allocated,
        )
        stretches = [
            Stretch("", phase, step, peaks.allocated, peaks.reserved)
            for (phase, step), peaks in replay.phases.items()
        ]
    parts: dict[str, int] = {}
    if index is not None:
        for part, block, times in blocks(tape, index, run):
            parts[part] = parts.get(part, 0) + block.size * times
        parts = dict(sorted((item for item in parts.items() if item[1]), key=lambda item: -item[1]))
        parts["rounding"] = allocated - sum(parts.values())
    return Memory(
        allocated=allocated,
        reserved=None if replay is None else replay.peak_reserved,
        at=None if index is None else moment(tape, index),
        reserved_at=None
        if replay is None or replay.reserved_at is None
        else moment(tape, replay.reserved_at),
        parts=parts,
        timeline=tuple(_named(stretches)),
        end=end,
        tape=tape,
        run=run,
    )


def blocks(tape: Tape, index: int, run: int = 0) -> Iterator[tuple[str, Alloc, int]]:
    """(part, block, times) of what is alive after event `index` in its `run`. On a compact tape
    `times` may be negative: the first layer's block freed once for each layer of the span behind
    it, while that span's own blocks are one too many.

    Here, for all producers: `activations` that are freed in the very phase they were allocated in
    are `temporaries`.
    """
    live: dict[int, int] = {}
    born: dict[int, Alloc] = {}
    fresh: set[int] = set()  # activations of the phase under way
    settled: set[int] = set()  # and those among them of which some run's copy is gone
    phase: tuple[str, int] = ("", 0)
    for times, events in _until(tape, index, run):
        for event in events:
            if type(event) is Alloc:
                id = event[0]
                born[id] = event
                live[id] = live.get(id, 0) + times
                if event[2] == "activations":
                    fresh.add(id)
            elif type(event) is Free:
                id = event[0]
                rest = live.pop(id, 0) - times
                if rest:
                    live[id] = rest
                if id in fresh:
                    settled.add(id)
            elif type(event) is Mark and (event.phase, event.step) != phase:
                phase = (event.phase, event.step)
                fresh.clear()
                settled.clear()
    leaving = _leaving(tape, index, run, phase) if fresh else {}
    for id, times in live.items():
        short = 0
        if id in fresh:
            left = leaving.get(id)
            short = min(times, left) if left is not None else times if id in settled else 0
            if short:
                yield "temporaries", born[id], short
        if times != short:
            yield born[id].part, born[id], times - short


ALL: Annotated[int, setting("more events than a tape has: all of them")] = 2**62


def _leaving(tape: Tape, index: int, run: int, phase: tuple[str, int]) -> dict[int, int]:
    """How many runs' copies of a block, of those alive after event `index` in its `run`, go in what
    is left of the phase: all that there are, unless runs hand the block on, so that a `Free` behind
    their span is about the last run's copy alone."""
    handed = {
        odd.instead.id for repeat in tape.repeats for odd in repeat.odd if type(odd.instead) is Free
    }
    odd = {
        one.place: (one.instead.id, repeat.times - 1)
        for repeat in tape.repeats
        for one in repeat.odd
        if type(one.instead) is Free
    }
    here = next(
        (repeat for repeat in tape.repeats if repeat.first <= index < repeat.last),
        Repeat(index, index + 1, 1),
    )
    begin = here.first if run < here.times - 1 else index + 1
    unborn = {
        event.id for event in tape.events[begin : here.last] if type(event) is Alloc
    }  # at least the last run's copy
    leaving = dict.fromkeys(handed, 0)
    for place in range(begin, len(tape.events)):
        event = tape.events[place]
        if type(event) is Free:
            if event.id not in handed or place < here.last:
                leaving[event.id] = ALL
            elif event.id not in unborn:
                leaving[event.id] += 1
        elif type(event) is Mark and (event.phase, event.step) != phase:
            break
        if place in odd:
            id, times = odd[place]
            leaving[id] += ALL if place < here.last else times
    return leaving


def moment(tape: Tape, index: int) -> Moment:
    """What was going on at event `index`."""
    event = tape.events[index]
    where, op = (event.where, event.op) if isinstance(event, Alloc) else ("", "")
    like = next((repeat.times for repeat in tape.repeats if repeat.first <= index < repeat.last), 1)
    for before in reversed(tape.events[:index]):
        if type(before) is Mark:
            return Moment(
                phase=before.phase,
                step=before.step,
                where=where or before.where,
                op=op,
                index=index,
                like=like,
            )
    return Moment(phase="", step=0, where=where, op=op, index=index, like=like)


def starred(where: str) -> str:
    """A module's path with a star for every number: what the layers of a model have in common."""
    return ".".join("*" if piece.isdigit() else piece for piece in where.split("."))


def _until(tape: Tape, index: int, run: int) -> Iterator[tuple[int, Sequence[Event]]]:
    """(times, events) for all that has happened after event `index` in its `run`; of a span first
    what its runs have in common."""
    for span in spans(tape):
        ended = span.last <= index
        before, behind = (
            (span.times, span.times) if ended else (run + 1, run)
        )  # runs that reached an event, at `index` or before it, or behind
        events: Sequence[Event] = tape.events[span.first : span.last]
        odd = span.odd if span.times > 1 else ()
        if odd:
            events = list(events)
            for one in odd:
                events[one.place - span.first] = NOTHING
        if ended:
            yield before, events
        else:
            yield before, events[: index + 1 - span.first]
            if behind:
                yield behind, events[index + 1 - span.first :]
        for one in odd:
            runs = before if one.place <= index else behind
            own = int(runs > (0 if one.run == 0 else span.times - 1))
            if own:
                yield own, (tape.events[one.place],)
            if runs > own:
                yield runs - own, (one.instead,)
        if not ended:
            return


def _named(stretches: Sequence[Stretch]) -> Iterator[Stretch]:
    """One entry for each phase of each step, in order of appearance, with the name of its
    moment."""
    merged: dict[tuple[str, int], Stretch] = {}
    for one in stretches:
        before = merged.setdefault((one.phase, one.step), one)
        merged[one.phase, one.step] = before._replace(
            allocated=max(before.allocated, one.allocated)
        )
    first = next((step for phase, step in merged if phase in ("forward", "backward", "step")), None)
    begun = False
    for (phase, step), one in merged.items():
        begun = begun or phase == "forward"
        yield one._replace(moment=_moment(phase, step, first, begun))


def _moment(phase: str, step: int, first: int | None, begun: bool) -> str:
    if phase in ("load", "") or (phase == "prepare" and not begun):
        return "load"
    if phase in ("forward", "backward", "step", "prepare"):
        return (
            "first step" if step == first else "longest batch" if step == LONGEST else "steady step"
        )
    return phase


__all__ = [
    "MOMENTS",
    "Group",
    "Memory",
    "Moment",
    "Stretch",
    "blocks",
    "memory",
    "moment",
    "starred",
]
