"""Tapes through the allocator: peaks and the events that reach them, phases, streams, and how a run
ends."""

from __future__ import annotations

import pytest

from memfit.errors import TapeError
from memfit.lower.requests import FREED
from memfit.simulate.replay import Peaks, Replay, live_at, replay, reserved_peak
from memfit.simulate.settings import Settings
from memfit.tape import Alloc, Comm, Compute, Event, Free, Mark, Repeat, Sync, Tape, check

M = 2**20


def alloc(id: int, size: int, stream: int = 0) -> Alloc:
    return Alloc(id, size, "activations", stream=stream)


def play(*events: Event, settings: Settings | None = None, capacity: int | None = None) -> Replay:
    tape = Tape(events=events, source="handwritten")
    check(tape)
    return replay(tape, settings or Settings(), capacity)


def test_an_empty_tape() -> None:
    found = play(Compute("mm", 1, 1), Comm("all_reduce", 8, 2))
    assert (found.peak_allocated, found.peak_reserved, found.allocated_at, found.reserved_at) == (
        0,
        0,
        None,
        None,
    )
    assert (dict(found.phases), found.segments, found.oom) == ({}, (), None)


def test_peaks_and_where_they_are() -> None:
    # allocated: 30, 50, 20, 60, 60 M; reserved: 30, 50, 50, 60 M (the 30 M serve 28 M, whose 2 M
    # are split off; 12 M are new) …
    found = play(
        alloc(0, 30 * M),  # 0
        alloc(1, 20 * M),  # 1: 50 M and 50 M
        Free(0),  # 2
        alloc(2, 28 * M),  # 3: 48 M of 50 M
        alloc(3, 12 * M),  # 4: 60 M of 62 M
        Free(2),  # 5
        alloc(4, 28 * M),  # 6: 60 M again: the first time counts
        Free(1),  # 7
        Free(3),  # 8
    )
    assert (found.peak_allocated, found.allocated_at) == (60 * M, 4)
    assert (found.peak_reserved, found.reserved_at) == (62 * M, 4)
    assert (found.peak_requested, found.peak_active) == (60 * M, 60 * M)
    assert (found.end_allocated, found.end_reserved, len(found.segments)) == (28 * M, 62 * M, 3)


def test_reserved_may_peak_elsewhere() -> None:
    # 12 M + 12 M cached, then 40 M: reserved peaks at the last event, allocated at the second
    found = play(alloc(0, 30 * M), alloc(1, 30 * M), Free(0), Free(1), alloc(2, 40 * M))
    assert (found.peak_allocated, found.allocated_at) == (60 * M, 1)
    assert (found.peak_reserved, found.reserved_at) == (100 * M, 4)


def test_phases() -> None:
    found = play(
        alloc(0, 12 * M),
        Mark("forward"),
        alloc(1, 30 * M),
        Mark("forward", where="layers.1"),  # the same phase of the same step goes on
        alloc(2, 20 * M),
        Free(1),
        Mark("backward"),
        Free(2),
        Mark("forward"),  # a second forward of step 0: the larger peak of both
        alloc(3, 14 * M),
        Mark("forward", step=1),
        alloc(4, 512),
    )
    assert dict(found.phases) == {
        ("", 0): Peaks(allocated=12 * M, reserved=12 * M),
        ("forward", 0): Peaks(allocated=62 * M, reserved=62 * M),
        ("backward", 0): Peaks(allocated=32 * M, reserved=62 * M),  # what was held when it began
        ("forward", 1): Peaks(allocated=26 * M + 512, reserved=64 * M),
    }
    assert (found.peak_allocated, found.allocated_at, found.reserved_at) == (62 * M, 4, 11)
    assert (found.peak_requested, found.peak_active) == (62 * M, 62 * M)


def test_a_tape_that_begins_with_a_mark_has_no_nameless_phase() -> None:
    assert set(play(Mark("load"), alloc(0, 1)).phases) == {("load", 0)}


def test_side_streams_delay_reuse_until_a_sync() -> None:
    # 30 M freed while stream 1 may still read it: the next 30 M are new; after the wait the third
    # 30 M are the first again
    events = (
        alloc(0, 30 * M),
        Free(0, streams=(1,)),
        alloc(1, 30 * M),
        Sync(0, 1),
        alloc(2, 30 * M),
    )
    found = play(*events)
    assert (found.peak_allocated, found.peak_active, found.peak_reserved) == (
        60 * M,
        60 * M,
        60 * M,
    )
    assert play(*events[:3], *events[4:]).peak_reserved == 90 * M
    assert play(events[0], Free(0), *events[2:]).peak_reserved == 60 * M
    assert (
        play(events[0], Free(0, streams=(0,)), *events[2:3]).peak_reserved == 30 * M
    )  # its own stream


def test_out_of_memory_ends_the_run() -> None:
    found = play(
        alloc(0, 30 * M),
        Mark("forward"),
        alloc(1, 20 * M),
        Free(0),
        alloc(2, 50 * M),
        alloc(3, 512),
        capacity=60 * M,
    )
    assert found.oom is not None
    assert (found.oom.event, found.oom.id, found.oom.asked, found.oom.reserved) == (
        4,
        2,
        50 * M,
        20 * M,
    )
    assert (found.end_allocated, found.retries, found.peak_reserved) == (20 * M, 1, 50 * M)
    assert set(found.phases) == {("", 0), ("forward", 0)}


def test_settings_and_total_reach_the_allocator() -> None:
    events = [alloc(0, 3 * M // 2)]
    assert replay(events, Settings(expandable_segments=True)).peak_reserved == 20 * M
    assert replay(events, Settings(memory_fraction=0.5), 40 * M).oom is None
    assert replay(events, Settings(memory_fraction=0.5), 30 * M).oom is not None
    assert replay(events, Settings(memory_fraction=0.5), 30 * M, total=40 * M).oom is None


def test_events_may_come_from_anywhere() -> None:
    assert replay(event for event in (alloc(0, 1), Free(0))) == replay([alloc(0, 1), Free(0)])


def test_live_at() -> None:
    events = [alloc(0, 1), alloc(1, 1), Free(0), Mark("step"), alloc(2, 0)]
    assert [live_at(events, index) for index in range(5)] == [(0,), (0, 1), (1,), (1,), (1, 2)]


def test_illegal_tapes() -> None:
    with pytest.raises(TapeError, match="event 2: block 0 is freed but not alive"):
        replay([alloc(0, 1), Free(0), Free(0)])
    with pytest.raises(TapeError, match="event 1: block 0 is allocated twice"):
        replay([alloc(0, 1), alloc(0, 1)])
    with pytest.raises(TapeError, match="event 0: block 0 has size -1"):
        replay([alloc(0, -1)])
    with pytest.raises(TapeError, match="event 0: block 3 is used by stream 1 but not alive"):
        replay([Free(3, streams=(1,))])
    with pytest.raises(TapeError, match="every event"):
        replay(Tape(events=(alloc(0, 1),), source="formula", repeats=(Repeat(0, 1, 3),)))


@pytest.mark.parametrize("expandable", [False, True])
def test_the_most_that_requests_reserve_is_that_of_the_tape(expandable: bool) -> None:
    """12 MiB, then 14 beside them; what is freed serves the next 10, and nothing serves an
    exbibyte."""
    settings = Settings(expandable_segments=expandable)
    sizes = ((0, 12 * M), (1, 14 * M), (0, FREED), (2, 10 * M), (1, FREED), (3, 9 * M))
    events = tuple(
        Free(id) if size == FREED else Alloc(id, size, "activations") for id, size in sizes
    )
    found = reserved_peak([(id, size, 0) for id, size in sizes], settings)
    assert found == replay(events, settings).peak_reserved
    assert found == (40 * M if expandable else 26 * M)
    assert reserved_peak([(0, 2**60, 0)], settings) is None
    assert reserved_peak([], settings) == 0
