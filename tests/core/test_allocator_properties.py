"""The allocator against random programs: invariants that hold whatever happens, and a second
allocator, written here in the dumbest way (no links, no order kept, every search a scan over all
pieces), that must agree on every number."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.simulate.allocator import Allocator
from memfit.simulate.settings import Settings

MIB = 2**20
NEVER = 2**62


# ------------------------------------------------------------------ the dumb allocator


@dataclass(eq=False)
class Piece:
    start: int
    size: int
    state: str = "free"  # free, used, pending, unmapped
    requested: int = 0
    born: int = 0
    waits: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Run:
    """A segment, or the address range of an expandable one: its pieces from left to right, with no
    gap between them."""

    start: int
    small: bool
    stream: int
    pieces: list[Piece]

    def tidy(self) -> None:
        """Join equal neighbours, free or unmapped."""
        joined = self.pieces[:1]
        for piece in self.pieces[1:]:
            if piece.state == joined[-1].state and piece.state in ("free", "unmapped"):
                joined[-1].size += piece.size
                joined[-1].born = max(joined[-1].born, piece.born)
            else:
                joined.append(piece)
        self.pieces = joined

    def cut(self, piece: Piece, size: int) -> None:
        """Make two pieces of one."""
        if size < piece.size:
            at = self.pieces.index(piece)
            self.pieces.insert(
                at + 1, Piece(piece.start + size, piece.size - size, piece.state, born=piece.born)
            )
            piece.size = size


class Dumb:
    def __init__(self, options: Settings, capacity: int | None) -> None:
        self.options, self.capacity = options, capacity
        self.limit = (
            None
            if options.memory_fraction == 1 or capacity is None
            else int(options.memory_fraction * capacity)
        )
        self.runs: list[Run] = []
        self.live: dict[int, tuple[Run, Piece] | None] = {}
        self.uses: dict[int, set[int]] = {}
        self.done: list[tuple[Piece, int]] = []
        self.calls = {True: 0, False: 0}
        self.retries = 0
        self.frontier = 0
        self.split_limit = options.max_split_size or NEVER

    def sums(self) -> dict[str, int]:
        pieces = [piece for run in self.runs for piece in run.pieces]
        used = [piece for piece in pieces if piece.state == "used"]
        pending = [piece for piece in pieces if piece.state == "pending"]
        return {
            "allocated": sum(piece.size for piece in used),
            "active": sum(piece.size for piece in used + pending),
            "requested": sum(piece.requested for piece in used + pending),
            "reserved": sum(piece.size for piece in pieces if piece.state != "unmapped"),
            "retries": self.retries,
        }

    def rounded(self, size: int) -> int:
        table = self.options.roundup_power2_divisions
        power = 1
        while power * 2 <= size:
            power *= 2
        index = 0
        while index < 15 and MIB * 2 ** (index + 1) <= size:
            index += 1
        parts = table[index] if isinstance(table, tuple) else table
        if parts > 1 and size > 512 * parts:
            step = power // parts
            candidate = power
            while candidate < size:
                candidate += step
            return candidate
        return (size + 511) // 512 * 512

    def malloc(self, id: int, size: int, stream: int) -> bool:
        if size == 0:
            self.live[id] = None
            return True
        for piece, waited in self.done:
            piece.waits.discard(waited)
            if not piece.waits:
                self.put_back(piece)
        self.done = []
        want = self.rounded(size)
        small = want <= MIB
        found = self.find(want, small, stream)
        if found is None:
            found = self.obtain(want, small, stream)
        if found is None:
            return False
        run, piece = found
        spare = piece.size - want
        exact = small or self.options.expandable_segments
        if (spare >= 512) if exact else (spare > MIB and want < self.split_limit):
            run.cut(piece, want)
            run.pieces[run.pieces.index(piece) + 1].born = self.calls[small]
        piece.state, piece.requested = "used", size
        self.live[id] = (run, piece)
        return True

    def free(self, id: int) -> None:
        where = self.live.pop(id)
        if where is None:
            return
        _, piece = where
        if self.uses.get(id):
            piece.state, piece.waits = "pending", self.uses.pop(id)
        else:
            self.put_back(piece)

    def put_back(self, piece: Piece) -> None:
        run = next(run for run in self.runs if piece in run.pieces)
        piece.state, piece.requested, piece.born = "free", 0, self.calls[run.small]
        run.tidy()

    def sync(self, stream: int) -> None:
        waiting = [
            (piece, stream)
            for run in self.runs
            for piece in run.pieces
            if piece.state == "pending" and stream in piece.waits
        ]
        self.done += [one for one in waiting if one not in self.done]

    def record(self, id: int, stream: int) -> None:
        where = self.live[id]
        if where is not None and where[0].stream != stream:
            self.uses.setdefault(id, set()).add(stream)

    def free_pieces(self, small: bool, stream: int) -> list[tuple[Run, Piece]]:
        found = [
            (run, piece)
            for run in self.runs
            for piece in run.pieces
            if run.small == small and run.stream == stream and piece.state == "free"
        ]
        return sorted(found, key=lambda pair: (pair[1].size, pair[1].start))

    def find(self, want: int, small: bool, stream: int) -> tuple[Run, Piece] | None:
        self.calls[small] += 1
        fits = [pair for pair in self.free_pieces(small, stream) if pair[1].size >= want]
        if not fits:
            return None
        choice = 0
        if self.options.expandable_segments:
            while choice + 1 < len(fits) and self.reach(*fits[choice + 1]) < self.reach(
                *fits[choice]
            ):
                choice += 1
        run, piece = fits[choice]
        slack = self.options.max_non_split_rounding or self.options.large_segment_size
        too_big = (
            piece.size >= self.split_limit
            if want < self.split_limit
            else piece.size >= want + slack
        )
        return None if too_big else (run, piece)

    def reach(self, run: Run, piece: Piece) -> int:
        at = run.pieces.index(piece)
        after = run.pieces[at + 1] if at + 1 < len(run.pieces) else None
        return piece.size + (after.size if after and after.state == "unmapped" else 0)

    def obtain(self, want: int, small: bool, stream: int) -> tuple[Run, Piece] | None:
        segment = (
            2 * MIB
            if small
            else self.options.large_segment_size
            if want < 10 * MIB
            else (want + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        )
        if self.limit is not None and self.options.garbage_collection_threshold > 0:
            self.collect()
        found = self.ask(want, segment, small, stream)
        if found is None and self.options.max_split_size and self.release_some(want, small, stream):
            found = self.ask(want, segment, small, stream)
        if found is None:
            self.empty_cache()
            self.retries += 1
            found = self.ask(want, segment, small, stream)
        return found

    def room(self, size: int) -> bool:
        return self.capacity is None or self.sums()["reserved"] + size <= self.capacity

    def ask(self, want: int, segment: int, small: bool, stream: int) -> tuple[Run, Piece] | None:
        if self.limit is not None and self.sums()["reserved"] + segment > self.limit:
            return None
        if self.options.expandable_segments:
            return self.expand(want, small, stream)
        if not self.room(segment):
            return None
        start = (self.frontier + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        self.frontier = start + segment
        piece = Piece(start, segment)
        run = Run(start, small, stream, [piece])
        self.runs.append(run)
        return run, piece

    def page(self, small: bool) -> int:
        return 2 * MIB if small else self.options.large_segment_size

    def expand(self, want: int, small: bool, stream: int) -> tuple[Run, Piece] | None:
        page = self.page(small)
        run, first = self.addresses(want, small, stream)
        at = run.pieces.index(first)
        have = 0
        while have < want:
            piece = run.pieces[at]
            if piece.state == "unmapped":
                pages = -(-min(want - have, piece.size) // page) * page
                if not self.room(pages):
                    run.tidy()
                    return None
                run.cut(piece, pages)
                piece.state = "free"
            have += piece.size
            at += 1
        run.tidy()
        return run, next(
            piece for piece in run.pieces if piece.start <= first.start < piece.start + piece.size
        )

    def addresses(self, want: int, small: bool, stream: int) -> tuple[Run, Piece]:
        for run in self.runs:
            if (run.small, run.stream) != (small, stream):
                continue
            for at, piece in enumerate(run.pieces):
                if piece.state != "unmapped":
                    continue
                begin = at - 1 if at and run.pieces[at - 1].state == "free" else at
                end = begin
                while end < len(run.pieces) and run.pieces[end].state in ("free", "unmapped"):
                    end += 1
                if sum(one.size for one in run.pieces[begin:end]) >= want:
                    return run, run.pieces[begin]
        page = self.page(small)
        span = 2**60 if self.capacity is None else self.capacity + self.capacity // 8
        start = -(-self.frontier // page) * page
        span = -(-span // page) * page
        self.frontier = start + span
        run = Run(start, small, stream, [Piece(start, span, "unmapped")])
        self.runs.append(run)
        return run, run.pieces[0]

    def release_some(self, want: int, small: bool, stream: int) -> bool:
        if self.options.expandable_segments:
            return False
        target = max(want, self.split_limit)
        cached = self.free_pieces(small, stream)
        for run, piece in cached:
            if piece.size >= target:
                self.runs.remove(run)
                return True
        total = 0
        for run, piece in reversed(cached):
            if total >= target or piece.size < self.split_limit:
                break
            total += piece.size
            self.runs.remove(run)
        return total >= target

    def collect(self) -> None:
        assert self.limit is not None
        start = self.sums()["reserved"]
        allowed = int(self.options.garbage_collection_threshold * self.limit)
        while not self.options.expandable_segments and self.sums()["reserved"] > allowed:
            whole = [
                run
                for run in self.runs
                if not run.small and len(run.pieces) == 1 and run.pieces[0].state == "free"
            ]
            if not whole:
                return
            ages = {id(run): self.calls[False] - run.pieces[0].born for run in whole}
            mean = sum(ages.values()) / len(whole)
            old = [run for run in whole if ages[id(run)] >= mean]
            self.runs = [run for run in self.runs if run not in old]
        assert self.sums()["reserved"] <= start

    def empty_cache(self) -> None:
        self.done = []
        for run in list(self.runs):
            for piece in list(run.pieces):
                if piece.state == "pending":
                    piece.waits = set()
                    self.put_back(piece)
        for run in list(self.runs):
            if not self.options.expandable_segments:
                if len(run.pieces) == 1 and run.pieces[0].state == "free":
                    self.runs.remove(run)
                continue
            page, touched = self.page(run.small), False
            for piece in list(run.pieces):
                first, last = (
                    -(-piece.start // page) * page,
                    (piece.start + piece.size) // page * page,
                )
                if piece.state == "free" and first < last:
                    run.cut(piece, last - piece.start)
                    if first > piece.start:
                        run.cut(piece, first - piece.start)
                        piece = run.pieces[run.pieces.index(piece) + 1]
                    piece.state, touched = "unmapped", True
            run.tidy()
            if (
                touched and len(run.pieces) == 1
            ):  # a range that was never mapped is kept, as in the source
                self.runs.remove(run)


# ------------------------------------------------------------------ random programs

BORDERS = [
    0,
    1,
    511,
    512,
    513,
    4096,
    MIB - 512,
    MIB - 1,
    MIB,
    MIB + 1,
    MIB + 512,
    2 * MIB,
    9 * MIB,
    10 * MIB - 512,
    10 * MIB - 1,
    10 * MIB,
    10 * MIB + 1,
    19 * MIB - 512,
    19 * MIB,
    20 * MIB,
    20 * MIB + 512,
    21 * MIB,
    25 * MIB,
    40 * MIB,
    41 * MIB + 3,
]
SIZES = st.one_of(
    st.sampled_from(BORDERS),
    st.integers(1, 6000),
    st.integers(1, 3 * MIB),
    st.integers(MIB, 30 * MIB),
)
STREAMS = st.sampled_from([0, 0, 0, 1, 2])
STEPS = st.one_of(
    st.tuples(st.just("malloc"), SIZES, STREAMS),
    st.tuples(st.just("malloc"), SIZES, STREAMS),
    st.tuples(st.just("free"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("free"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("record"), st.integers(0, 30), STREAMS),
    st.tuples(st.just("sync"), st.just(0), STREAMS),
    st.tuples(st.just("empty"), st.just(0), st.just(0)),
)
POWERS = st.sampled_from([0, 0, 1, 2, 4, 8, 16])
PROGRAMS = st.one_of(st.lists(STEPS, max_size=20), st.lists(STEPS, min_size=30, max_size=90))
OPTIONS = st.builds(
    Settings,
    expandable_segments=st.booleans(),
    max_split_size=st.sampled_from([None, None, 24 * MIB, 25 * MIB, 30 * MIB, 64 * MIB]),
    max_non_split_rounding=st.sampled_from([None, 24 * MIB, 30 * MIB]),
    garbage_collection_threshold=st.sampled_from([0.0, 0.1, 0.5, 0.8]),
    roundup_power2_divisions=st.one_of(POWERS, st.tuples(*[POWERS] * 16)),
    large_segment_size=st.sampled_from([20 * MIB, 20 * MIB, 20 * MIB, 11 * MIB, 24 * MIB]),
    memory_fraction=st.sampled_from([1.0, 1.0, 0.9, 0.5]),
)
CAPACITIES = st.sampled_from([2**40, 30 * MIB, 64 * MIB, 120 * MIB, 250 * MIB])
Step = tuple[str, int, int]

# The rules for oversize blocks and the collection of garbage need many large requests, and few
# sizes, to meet at all.
LARGE = st.tuples(
    st.just("malloc"),
    st.sampled_from(
        [MIB * n // 2 for n in (4, 22, 23, 42, 46, 47, 48, 49, 50, 52, 60, 88, 92, 96)]
    ),
    st.just(0),
)
DROP = st.tuples(st.just("free"), st.integers(0, 9), st.just(0))
HEAVY = st.lists(st.one_of(LARGE, LARGE, DROP, DROP), min_size=20, max_size=60)
TIGHT = st.sampled_from([100 * MIB, 120 * MIB, 150 * MIB, 250 * MIB])
OVERSIZE = st.builds(
    Settings,
    expandable_segments=st.sampled_from([False, False, False, True]),
    max_split_size=st.sampled_from([20 * MIB, 24 * MIB, 25 * MIB]),
    max_non_split_rounding=st.sampled_from([None, 22 * MIB]),
)
COLLECTED = st.builds(
    Settings,
    garbage_collection_threshold=st.sampled_from([0.1, 0.3, 0.5, 0.8]),
    memory_fraction=st.sampled_from([0.5, 0.8, 0.96]),
)


class Program:
    """Turns random steps into legal calls: `free` and `record` pick one of the live ids."""

    def __init__(self, *allocators: Allocator | Dumb) -> None:
        self.allocators = allocators
        self.live: list[int] = []
        self.next = 0

    def step(self, step: Step) -> None:
        kind, number, stream = step
        if kind == "malloc":
            first = self.allocators[0].malloc(self.next, number, stream)
            for other in self.allocators[1:]:
                assert other.malloc(self.next, number, stream) == (first is None)
            if first is None:
                self.live.append(self.next)
            self.next += 1
        elif kind == "sync":
            for one in self.allocators:
                one.sync(stream)
        elif kind == "empty":
            for one in self.allocators:
                one.empty_cache()
        elif self.live and kind == "free":
            id = self.live.pop(number % len(self.live))
            for one in self.allocators:
                one.free(id)
        elif self.live:
            id = self.live[number % len(self.live)]
            for one in self.allocators:
                one.record_stream(id, stream) if isinstance(one, Allocator) else one.record(
                    id, stream
                )


def numbers(allocator: Allocator) -> dict[str, int]:
    return {
        name: getattr(allocator, name)
        for name in ("allocated", "active", "requested", "reserved", "retries")
    }


RANDOM = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@RANDOM
@given(PROGRAMS, OPTIONS, CAPACITIES)
def test_agrees_with_the_dumb_allocator_after_every_event(
    steps: list[Step], options: Settings, capacity: int
) -> None:
    fast, dumb = Allocator(options, capacity), Dumb(options, capacity)
    program = Program(fast, dumb)
    for step in steps:
        program.step(step)
        assert numbers(fast) == dumb.sums()
    where = {
        id: (piece.start, piece.size)
        for id, place in dumb.live.items()
        if place
        for _, piece in [place]
    }
    assert {id: (address, size) for id, address, size in fast.placed()} == where


@RANDOM
@given(HEAVY, st.one_of(OVERSIZE, COLLECTED), TIGHT)
def test_agrees_with_the_dumb_allocator_when_large_blocks_come_and_go(
    steps: list[Step], options: Settings, capacity: int
) -> None:
    fast, dumb = Allocator(options, capacity), Dumb(options, capacity)
    program = Program(fast, dumb)
    for step in steps:
        program.step(step)
        assert numbers(fast) == dumb.sums()


@RANDOM
@given(PROGRAMS, OPTIONS, CAPACITIES)
def test_invariants_hold_after_every_event(
    steps: list[Step], options: Settings, capacity: int
) -> None:
    allocator = Allocator(options, capacity)
    program = Program(allocator)
    for step in steps:
        program.step(step)
        assert capacity >= allocator.reserved >= allocator.active >= allocator.allocated >= 0
        assert allocator.active >= allocator.requested
        placed = sorted((address, size) for _, address, size in allocator.placed())
        assert sum(size for _, size in placed) == allocator.allocated
        assert all(
            address + size <= follower for (address, size), (follower, _) in pairwise(placed)
        )
        check_structure(allocator)


def check_structure(allocator: Allocator) -> None:
    """Splitting and merging conserve bytes; free neighbours are merged; live blocks lie inside of
    segments."""
    segments = allocator.segments()
    assert sum(segment.size for segment in segments) == allocator.reserved
    assert sum(segment.allocated for segment in segments) == allocator.allocated
    inside = {segment.address: segment.address + segment.size for segment in segments}
    for segment in segments:
        assert sum(size for size, _ in segment.blocks) == segment.size
        assert all(size > 0 and size % 512 == 0 for size, _ in segment.blocks)
    for _, address, size in allocator.placed():
        assert any(start <= address and address + size <= end for start, end in inside.items())


@RANDOM
@given(PROGRAMS, OPTIONS)
def test_all_freed_leaves_one_block_per_segment_and_an_empty_cache_nothing(
    steps: list[Step], options: Settings
) -> None:
    allocator = Allocator(options, 2**40)
    program = Program(allocator)
    for step in steps:
        program.step(step)
    for id in program.live:
        allocator.free(id)
    for stream in (0, 1, 2):
        allocator.sync(stream)
    allocator.malloc(-1, 1)  # notices what is over
    allocator.free(-1)
    assert allocator.allocated == allocator.active == allocator.requested == 0
    assert all(segment.blocks == ((segment.size, False),) for segment in allocator.segments())
    allocator.empty_cache()
    assert allocator.reserved == 0
    assert allocator.segments() == ()


@RANDOM
@given(PROGRAMS, OPTIONS, CAPACITIES)
def test_peaks_are_the_maxima_of_what_was_seen(
    steps: list[Step], options: Settings, capacity: int
) -> None:
    allocator = Allocator(options, capacity)
    program = Program(allocator)
    seen = {"allocated": 0, "active": 0, "requested": 0}
    for step in steps:
        program.step(step)
        seen = {name: max(most, getattr(allocator, name)) for name, most in seen.items()}
    assert (allocator.peak_allocated, allocator.peak_active, allocator.peak_requested) == (
        *seen.values(),
    )
    assert allocator.peak_reserved >= allocator.reserved
    allocator.reset_peaks()
    assert allocator.peak_allocated == allocator.allocated
    assert allocator.peak_active == allocator.active
    assert allocator.peak_reserved == allocator.reserved


@given(st.integers(1, 2**45), st.sampled_from([0, 1, 2, 4, 8, 64]))
def test_rounding(size: int, parts: int) -> None:
    rounded = Settings(roundup_power2_divisions=parts).rounded(size)
    assert rounded >= size
    assert rounded % 512 == 0
    if size > 512 * parts and parts > 1:
        assert rounded - size < 2 ** (size.bit_length() - 1) // parts
    else:
        assert rounded - size < 512


@pytest.mark.parametrize("options", [Settings(), Settings(expandable_segments=True)])
def test_a_thousand_random_blocks(options: Settings) -> None:
    """Longer than hypothesis goes, with a fixed generator: the two allocators stay together for
    1,500 events."""
    fast, dumb = Allocator(options, 2**32), Dumb(options, 2**32)
    program = Program(fast, dumb)
    state = 12345
    for _ in range(1500):
        state = (state * 1103515245 + 12345) % 2**31
        kind = "malloc" if state // 7 % 5 < 3 else "free"
        size = (state // 64 % 4000 + 1) * (512 if state % 3 else 9000)
        program.step((kind, size if kind == "malloc" else state // 128, 0))
        assert numbers(fast) == dumb.sums()
