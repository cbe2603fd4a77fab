"""A tape through the allocator: what a run reserves, when its peaks are reached, and whether it
gets through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace as change
from itertools import islice

from memfit.errors import TapeError
from memfit.lazy_dataclass import dataclass
from memfit.lower.requests import FREED, Request
from memfit.simulate.allocator import Allocator, OutOfMemory, Segment
from memfit.simulate.settings import Settings
from memfit.tape import Alloc, Event, Free, Mark, Sync, Tape, Trim

PLAIN = Settings()
Moment = tuple[str, int]  # (phase, step); ("", 0) before the first mark
START: Moment = ("", 0)


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The most that was held during a phase; what was held when it began counts, too."""

    allocated: int
    reserved: int


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What `torch.cuda.memory_stats` would say after the run. A run out of memory ends at
    `oom.event`."""

    peak_allocated: int
    peak_reserved: int
    peak_requested: int
    peak_active: int
    allocated_at: (
        int | None
    )  # index of the event that first reached the peak; None where nothing was allocated
    reserved_at: int | None
    end_allocated: int
    end_reserved: int
    phases: Mapping[Moment, Peaks]
    segments: tuple[Segment, ...]
    retries: int
    oom: OutOfMemory | None


def replay(
    tape: Tape | Iterable[Event],
    settings: Settings = PLAIN,
    capacity: int | None = None,
    *,
    total: int | None = None,
) -> Replay:
    """Replay a flat tape, or its events, on a fresh allocator; `capacity` and `total` are those of
    `Allocator`."""
    if isinstance(tape, Tape) and tape.repeats:
        raise TapeError("a compact tape cannot be replayed: the allocator needs every event")
    allocator = Allocator(settings, capacity, total=total)
    books = _Books(allocator)
    malloc, free, device = allocator.malloc, allocator.free, allocator.device
    allocated = reserved = 0  # the highest peaks so far, and the events that reached them
    allocated_at: int | None = None
    reserved_at: int | None = None
    failure: OutOfMemory | None = None
    index = 0
    try:
        for index, event in enumerate(tape):
            if type(event) is Alloc:
                failure = malloc(event.id, event.size, event.stream)
                if device.peak > reserved:
                    reserved, reserved_at = device.peak, index
                if failure is not None:
                    failure = change(failure, event=index)
                    break
                if allocator.peak_allocated > allocated:
                    allocated, allocated_at = allocator.peak_allocated, index
            elif type(event) is Free:
                for stream in event.streams:
                    allocator.record_stream(event.id, stream)
                free(event.id)
            elif type(event) is Mark:
                books.turn((event.phase, event.step))
            elif type(event) is Sync:
                allocator.sync(event.waits_for, event.behind)
            elif type(event) is Trim:
                allocator.empty_cache()
    except TapeError as error:
        raise TapeError(f"event {index}: {error}") from None
    books.close()
    return Replay(
        peak_allocated=allocated,
        peak_reserved=reserved,
        peak_requested=books.requested,
        peak_active=books.active,
        allocated_at=allocated_at,
        reserved_at=reserved_at,
        end_allocated=allocator.allocated,
        end_reserved=allocator.reserved,
        phases=books.phases,
        segments=allocator.segments(),
        retries=allocator.retries,
        oom=failure,
    )


def reserved_peak(
    requests: Iterable[Request], settings: Settings = PLAIN, *, total: int | None = None
) -> int | None:
    """The most that a fresh allocator holds; None where a request is larger than any device."""
    allocator = Allocator(settings, total=total)
    malloc, free = allocator.malloc, allocator.free
    for id, size, stream in requests:
        if size == FREED:
            free(id)
        elif malloc(id, size, stream) is not None:
            return None
    return allocator.peak_reserved


def live_at(tape: Tape | Iterable[Event], index: int) -> tuple[int, ...]:
    """The ids that are alive once event `index` has happened, in the order of their birth."""
    live: dict[int, None] = {}
    for event in islice(tape, index + 1):
        if type(event) is Alloc:
            live[event.id] = None
        elif type(event) is Free:
            live.pop(event.id, None)
    return tuple(live)


class _Books:
    """The peaks of each phase: at every turn the allocator's peaks are written down and start
    again."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.moment = START
        self.phases: dict[Moment, Peaks] = {}
        self.requested = self.active = 0

    def turn(self, moment: Moment) -> None:
        if moment != self.moment:
            self.close()
            self.allocator.reset_peaks()
            self.moment = moment

    def close(self) -> None:
        held = self.allocator
        self.requested = max(self.requested, held.peak_requested)
        self.active = max(self.active, held.peak_active)
        before = self.phases.get(self.moment, Peaks(allocated=0, reserved=0))
        if self.moment != START or held.peak_reserved:
            self.phases[self.moment] = Peaks(
                allocated=max(before.allocated, held.peak_allocated),
                reserved=max(before.reserved, held.peak_reserved),
            )
