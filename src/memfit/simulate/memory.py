"""A tape's memory: the peak of live bytes, when it comes, what it is made of, and the peak of every phase before and after.

Live sums round each block up to 512 bytes and work on compact tapes, too. Given the replay of a flat tape, `allocated` is what
torch's own counter would show (remainders that the allocator does not split off included) and `reserved` is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from memfit.errors import TapeError
from memfit.simulate.replay import Replay
from memfit.tape import LONGEST, Alloc, Event, Free, Mark, Tape

MOMENTS = ("load", "first step", "steady step", "longest batch", "evaluate", "save", "prefill", "decode")


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When and where: `like` says how many identical layers `where` stands for on a compact tape."""

    phase: str
    step: int
    where: str
    op: str
    index: int
    like: int = 1


class Stretch(NamedTuple):
    """The peaks while a run is in one phase of one step; what was held when it began counts, too."""

    moment: str
    phase: str
    step: int
    allocated: int
    reserved: int | None = None


class Group(NamedTuple):
    """Live blocks that are alike: the layer's number in `where` is a star. `bytes` are what was asked for, all together."""

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
    """`parts` are the bytes asked for by the blocks alive at the peak, and `rounding`: what the allocator adds to them. They sum
    to `allocated`. `at` is None for a tape that allocates nothing; `end` is what is still alive when the tape ends."""

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
        """What the allocator holds beyond the live peak: cached blocks and the gaps between live ones."""
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
        return tuple(sorted(groups, key=lambda one: (order.get(one.part, 99), -one.bytes, one.where, one.op, str(one.formula))))


def memory(tape: Tape, replay: Replay | None = None) -> Memory:
    """`replay` is that of this very tape, which is then flat, and without a limit that it ran into."""
    if replay is not None and (tape.repeats or replay.oom is not None):
        raise TapeError("peaks of a replay belong to a flat tape that got through")
    if replay is None:
        allocated, index, run, stretches, end = _peaks(tape)
    else:
        allocated, index, run, end = replay.peak_allocated, replay.allocated_at, 0, replay.end_allocated
        stretches = [Stretch("", phase, step, peaks.allocated, peaks.reserved) for (phase, step), peaks in replay.phases.items()]
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
        reserved_at=None if replay is None or replay.reserved_at is None else moment(tape, replay.reserved_at),
        parts=parts,
        timeline=tuple(_named(stretches)),
        end=end,
        tape=tape,
        run=run,
    )


def blocks(tape: Tape, index: int, run: int = 0) -> Iterator[tuple[str, Alloc, int]]:
    """(part, block, times) of what is alive after event `index` in its `run`. On a compact tape `times` may be negative: the
    first layer's block freed once for each layer of the span behind it, while that span's own blocks are one too many.

    Here, for all producers: `activations` that are freed in the very phase they were allocated in are `temporaries`.
    """
    live: dict[int, int] = {}
    born: dict[int, Alloc] = {}
    fresh: set[int] = set()  # activations of the phase under way
    settled: set[int] = set()  # and those among them that did not outlive it
    phase: tuple[str, int] = ("", 0)
    for times, events in _until(tape, index, run):
        for event in events:
            if type(event) is Alloc:
                born[event.id] = event
                live[event.id] = times
                if event.part == "activations":
                    fresh.add(event.id)
            elif type(event) is Free:
                live[event.id] -= times
                if event.id in fresh:
                    settled.add(event.id)
            elif type(event) is Mark and (event.phase, event.step) != phase:
                phase = (event.phase, event.step)
                fresh.clear()
    for event in tape.events[index + 1 :]:
        if type(event) is Free and event.id in fresh:
            settled.add(event.id)
        elif type(event) is Mark and (event.phase, event.step) != phase:
            break
    for id, times in live.items():
        if times:
            yield ("temporaries" if id in settled else born[id].part), born[id], times


def moment(tape: Tape, index: int) -> Moment:
    """What was going on at event `index`."""
    event = tape.events[index]
    where, op = (event.where, event.op) if isinstance(event, Alloc) else ("", "")
    like = next((repeat.times for repeat in tape.repeats if repeat.first <= index < repeat.last), 1)
    for before in reversed(tape.events[:index]):
        if type(before) is Mark:
            return Moment(phase=before.phase, step=before.step, where=where or before.where, op=op, index=index, like=like)
    return Moment(phase="", step=0, where=where, op=op, index=index, like=like)


def starred(where: str) -> str:
    """A module's path with a star for every number: what the layers of a model have in common."""
    return ".".join("*" if piece.isdigit() else piece for piece in where.split("."))


def _segments(tape: Tape) -> Iterator[tuple[int, int, int]]:
    """(first, last, times) of all stretches of events, repeated or not, without gaps."""
    at = 0
    for first, last, times in tape.repeats:
        if at < first:
            yield at, first, 1
        yield first, last, times
        at = last
    if at < len(tape.events):
        yield at, len(tape.events), 1


def _until(tape: Tape, index: int, run: int) -> Iterator[tuple[int, Sequence[Event]]]:
    """(times, events) for all that has happened after event `index` in its `run`."""
    for first, last, times in _segments(tape):
        if last <= index:
            yield times, tape.events[first:last]
        elif first <= index:
            yield run + 1, tape.events[first : index + 1]
            if run:
                yield run, tape.events[index + 1 : last]
            return


def _peaks(tape: Tape) -> tuple[int, int | None, int, list[Stretch], int]:
    """(peak, its event, its run, peaks of the phases, what is left): one pass over the events.

    In a span that stands for `times` runs, each run starts `net` higher than the one before: its peak is that of the last run if
    `net` is positive, of the first one otherwise.
    """
    sizes: dict[int, int] = {}
    live = peak = top = 0  # top: the peak of the phase under way
    index: int | None = None
    run = 0
    phase: tuple[str, int] = ("", 0)
    done: list[Stretch] = []
    for first, last, times in _segments(tape):
        start, before, inner, at = live, top, live, first
        for place, event in enumerate(tape.events[first:last], first):
            if type(event) is Alloc:
                sizes[event.id] = size = event.size + 511 & -512
                live += size
                if live > inner:
                    inner, at = live, place
            elif type(event) is Free:
                live -= sizes[event.id]
            elif type(event) is Mark and (event.phase, event.step) != phase:
                if times > 1 and place > first:
                    raise TapeError(f"event {place}: a repeated span goes from one phase to another")
                if inner > peak:
                    peak, index, run = inner, at, 0
                if phase[0] or inner:
                    done.append(Stretch("", *phase, max(before, inner)))
                phase = (event.phase, event.step)
                before = inner = live
        rise = (times - 1) * (live - start)
        if rise > 0:
            inner += rise
        if inner > peak:
            peak, index, run = inner, at, times - 1 if rise > 0 else 0
        top = max(before, inner)
        live += rise
    if phase[0] or top:
        done.append(Stretch("", *phase, top))
    return peak, index, run, done, live


def _named(stretches: Sequence[Stretch]) -> Iterator[Stretch]:
    """One entry for each phase of each step, in order of appearance, with the name of its moment."""
    merged: dict[tuple[str, int], Stretch] = {}
    for one in stretches:
        before = merged.setdefault((one.phase, one.step), one)
        merged[one.phase, one.step] = before._replace(allocated=max(before.allocated, one.allocated))
    first = next((step for phase, step in merged if phase in ("forward", "backward", "step")), None)
    begun = False
    for (phase, step), one in merged.items():
        begun = begun or phase == "forward"
        yield one._replace(moment=_moment(phase, step, first, begun))


def _moment(phase: str, step: int, first: int | None, begun: bool) -> str:
    if phase in ("load", "") or (phase == "prepare" and not begun):
        return "load"
    if phase in ("forward", "backward", "step", "prepare"):
        return "first step" if step == first else "longest batch" if step == LONGEST else "steady step"
    return phase


__all__ = ["MOMENTS", "Group", "Memory", "Moment", "Stretch", "blocks", "memory", "moment", "starred"]
