"""The history that an allocator recorded of a run, as a Tape: CUDA's memory history, or on a CPU
the events of torch's profiler.

An allocator knows sizes and moments, not what a block is for: every block is `temporaries` here,
and `op` says who asked for it.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from memfit.errors import InputError, TapeError
from memfit.tape import Alloc, Event, Free, Mark, Phase, Tape, check
from memfit.trace import wire

LARGEST = 2**30  # bytes of a history as text: no run that is measured writes as much
SETS = "aten::empty"  # what makes a tensor says nothing of who wanted it


class Began(NamedTuple):
    """A phase, and when it did: nanoseconds of the clock that the events have."""

    phase: Phase
    step: int
    at: int


def of_snapshot(entries: Iterable[Mapping[str, Any]], begun: list[Began]) -> Tape:
    """`device_traces` of `torch.cuda.memory._snapshot()` (torch 2.13 torch/cuda/memory.py): sizes
    are those asked for, and a block is given back when that is requested, whatever still uses it
    (c10/cuda/CUDACachingAllocator.cpp `free`). `time_us` is wall-clock time."""
    changes = []
    for one in entries:
        if one["action"] in ("alloc", "free_requested"):
            size = one["size"] if one["action"] == "alloc" else -one["size"]
            changes.append(
                (
                    1000 * int(one.get("time_us", 0)),
                    int(one["addr"]),
                    int(size),
                    line(one.get("frames") or ()),
                )
            )
    return told(changes, begun)


def line(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost line of Python that asked, as far as it was kept."""
    for one in frames:
        if one.get("filename", "").endswith(".py"):
            return (
                f"{one['filename'].rpartition('site-packages/')[2]}:{one.get('line', 0)} "
                f"{one.get('name', '')}"
            )
    return ""


def of_profiler(results: Any, begun: list[Began]) -> Tape:
    """`kineto_results` of a profile with `profile_memory` (torch 2.13
    torch/csrc/profiler/collection.h `ExtraFields<EventType::Allocation>`)."""
    found = [
        one
        for one in walk(results.experimental_event_tree())
        if str(one.tag).endswith("Allocation")
    ]
    found.sort(key=lambda one: one.start_time_ns)
    return told(
        [
            (one.start_time_ns, one.extra_fields.ptr, one.extra_fields.alloc_size, asker(one))
            for one in found
        ],
        begun,
    )


def walk(events: Iterable[Any]) -> Iterator[Any]:
    left = list(events)
    while left:
        one = left.pop()
        yield one
        left.extend(one.children)


def asker(event: Any) -> str:
    one = event.parent
    while one is not None and one.name.startswith(SETS) and one.parent is not None:
        one = one.parent
    return "" if one is None else str(one.name)


def told(changes: Iterable[tuple[int, int, int, str]], begun: list[Began]) -> Tape:
    """(when, address, bytes, who): positive where a block comes. What goes without having come was
    there before."""
    events: list[Event] = []
    live: dict[int, int] = {}
    left, count = list(begun), 0
    for at, address, size, who in changes:
        while left and left[0].at <= at:
            events.append(Mark(left[0].phase, "", left[0].step))
            left.pop(0)
        before = live.pop(address, None)
        if before is not None:
            events.append(Free(before))
        if size > 0:
            events.append(Alloc(count, size, "temporaries", "", who))
            live[address] = count
            count += 1
    events += [Mark(one.phase, "", one.step) for one in left]
    return Tape(events=tuple(events), source="measured")


def write(tape: Tape, path: Path) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as out:
        out.write(wire.to_text(tape))


def read(path: Path) -> Tape:
    """A tape that was kept; whatever else the file may be is bad input."""
    try:
        with gzip.open(path, "rb") as file:
            text = file.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise InputError.one(
                f"`{path.name}` is more than {LARGEST} bytes of events", where="events"
            )
        tape = wire.from_text(text.decode("utf-8"))
        check(tape)
    except OSError as bad:
        raise InputError.one(
            f"`{path.name}` cannot be read: {(bad.strerror or str(bad)).lower()}"[:300],
            where="events",
        ) from None
    except (EOFError, zlib.error, UnicodeDecodeError, RecursionError, TypeError, TapeError) as bad:
        raise InputError.one(f"`{path.name}` has no events: {bad}"[:300], where="events") from None
    return tape


__all__ = ["Began", "of_profiler", "of_snapshot", "read", "write"]
