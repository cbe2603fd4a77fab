"""The allocator on sequences worked out by hand; the arithmetic stands beside each. M is a MiB, and
a tuple `(size, used)` is a block of a segment."""

from __future__ import annotations

from itertools import pairwise

import pytest

from memfit.errors import InputError, TapeError
from memfit.simulate.allocator import Allocator, OutOfMemory
from memfit.simulate.settings import Settings

M = 2**20
EXPANDABLE = Settings(expandable_segments=True)


def served(
    *sizes: int, settings: Settings | None = None, capacity: int | None = None, stream: int = 0
) -> Allocator:
    """An allocator that has served these sizes, as ids 0, 1, 2, …"""
    allocator = Allocator(settings or Settings(), capacity)
    for id, size in enumerate(sizes):
        assert allocator.malloc(id, size, stream) is None
    return allocator


def layout(allocator: Allocator) -> list[tuple[tuple[int, bool], ...]]:
    return [segment.blocks for segment in allocator.segments()]


def place(allocator: Allocator, id: int) -> int:
    return {one: address for one, address, _ in allocator.placed()}[id]


# ------------------------------------------------------------------ sizes and segments


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * M),  # up(1, 512)
        (512, 512, 2 * M),
        (513, 1024, 2 * M),
        (M - 511, M, 2 * M),  # up to 1 M after rounding: the small pool
        (M, M, 2 * M),  # the border belongs to the small pool
        (
            M + 1,
            M + 512,
            20 * M,
        ),  # the first size of the large pool; 20 M - (1 M + 512) > 1 M is split off
        (10 * M - 512, 10 * M - 512, 20 * M),  # the last size below 10 M
        (10 * M - 511, 10 * M, 10 * M),  # rounds to 10 M: made to measure
        (10 * M, 10 * M, 10 * M),  # up(10 M, 2 M) = 10 M
        (
            10 * M + 1,
            12 * M - (2 * M - 512),
            12 * M,
        ),  # up(10 M + 512, 2 M) = 12 M; 2 M - 512 > 1 M is split off
        (
            11 * M,
            12 * M,
            12 * M,
        ),  # the remainder is exactly 1 M: not split off, and counted as allocated
        (11 * M - 512, 11 * M - 512, 12 * M),  # the remainder is 1 M + 512: split off
        (11 * M + 512, 12 * M, 12 * M),  # the remainder is 1 M - 512: kept
        (20 * M + 1, 22 * M - (2 * M - 512), 22 * M),
    ],
)
def test_one_request(size: int, allocated: int, reserved: int) -> None:
    allocator = served(size)
    assert (allocator.allocated, allocator.reserved, allocator.requested) == (
        allocated,
        reserved,
        size,
    )
    allocator.free(0)
    assert (allocator.allocated, allocator.reserved, allocator.requested) == (0, reserved, 0)
    assert layout(allocator) == [((reserved, False),)]
    assert (allocator.peak_allocated, allocator.peak_reserved, allocator.peak_requested) == (
        allocated,
        reserved,
        size,
    )


def test_no_bytes_no_block() -> None:
    allocator = served(0, 0)
    assert (allocator.allocated, allocator.reserved, list(allocator.placed())) == (0, 0, [])
    allocator.record_stream(0, 1)  # a tensor without elements: nothing to remember
    allocator.free(0)
    allocator.free(1)
    with pytest.raises(TapeError):
        allocator.free(1)


def test_small_blocks_share_a_segment() -> None:
    # 2 M hold 4096 blocks of 512; the next one opens a second segment
    allocator = served(*[512] * 4096)
    assert (allocator.allocated, allocator.reserved) == (2 * M, 2 * M)
    allocator.malloc(4096, 1)
    assert (allocator.allocated, allocator.reserved) == (2 * M + 512, 4 * M)


def test_small_remainder_of_512_is_split() -> None:
    # 2 M - 512 are in use: the last 512 are a block, and serve a request for 1 byte
    allocator = served(M, M - 512)
    assert layout(allocator) == [((M, True), (M - 512, True), (512, False))]
    allocator.malloc(2, 1)
    assert (allocator.allocated, allocator.reserved) == (2 * M, 2 * M)


def test_a_large_remainder_of_exactly_1_mib_stays_with_the_block() -> None:
    # 9.5 M + 9.5 M leave exactly 1 M: kept by the second block, so 9.5 M + 10.5 M = 20 M are
    # allocated
    half = 19 * M // 2
    allocator = served(half, half)
    assert layout(allocator) == [((half, True), (half + M, True))]
    assert (allocator.allocated, allocator.requested) == (20 * M, 19 * M)
    allocator.free(1)
    assert (allocator.allocated, allocator.requested) == (half, half)


def test_large_and_small_pools_do_not_mix() -> None:
    # 20 M segment with 18.5 M free does not serve 1 M: a small request opens its own 2 M
    allocator = served(3 * M // 2, M)
    assert layout(allocator) == [
        ((3 * M // 2, True), (37 * M // 2, False)),
        ((M, True), (M, False)),
    ]
    allocator.free(1)
    allocator.malloc(2, M + 512)  # and 2 M of small memory do not serve the large pool
    assert allocator.reserved == 22 * M


# ------------------------------------------------------------------ best fit


def test_best_fit_takes_the_smallest_that_fits() -> None:
    # free: 30 M, 12 M, 20 M; 11.5 M takes 12 M, whose remainder of 0.5 M is kept
    allocator = served(30 * M, 12 * M, 20 * M)
    addresses = {size: place(allocator, id) for id, size in enumerate((30, 12, 20))}
    for id in range(3):
        allocator.free(id)
    allocator.malloc(3, 23 * M // 2)
    assert place(allocator, 3) == addresses[12]
    assert allocator.allocated == 12 * M
    allocator.malloc(4, 13 * M)  # 20 M: 7 M are split off
    assert place(allocator, 4) == addresses[20]
    allocator.malloc(5, 7 * M)  # fits exactly what was split off
    assert place(allocator, 5) == addresses[20] + 13 * M
    assert allocator.reserved == 62 * M


def test_ties_go_to_the_lowest_address() -> None:
    allocator = served(*[12 * M] * 3)
    first, second = place(allocator, 0), place(allocator, 1)
    for id in (2, 1, 0):
        allocator.free(id)
    allocator.malloc(3, 12 * M)
    allocator.malloc(4, 12 * M)
    assert (place(allocator, 3), place(allocator, 4)) == (first, second)


def test_history_decides_what_is_allocated() -> None:
    # 12 M from the driver are 12 M. Out of a cached block of 13 M - 512 (a segment of 14 M whose
    # other 1 M + 512 are in use) they are all of it, since the remainder of 1 M - 512 is not split
    # off
    fresh, used = served(12 * M), served(13 * M - 512, 512 + M)
    assert layout(used) == [((13 * M - 512, True), (M + 512, True))]
    used.free(0)
    used.malloc(2, 12 * M)
    assert (fresh.allocated, used.allocated - (M + 512)) == (12 * M, 13 * M - 512)


# ------------------------------------------------------------------ coalescing


def test_three_blocks_become_one() -> None:
    # left and right are free: the middle one joins both and the tail, 2 M in all
    kib = 1024
    allocator = served(100 * kib, 200 * kib, 300 * kib)
    tail = 2 * M - 600 * kib
    allocator.free(0)
    assert layout(allocator) == [
        ((100 * kib, False), (200 * kib, True), (300 * kib, True), (tail, False))
    ]
    allocator.free(2)  # joins the tail behind it
    assert layout(allocator) == [((100 * kib, False), (200 * kib, True), (300 * kib + tail, False))]
    allocator.free(1)
    assert layout(allocator) == [((2 * M, False),)]


def test_joined_block_serves_what_its_parts_could_not() -> None:
    # 6 M + 6 M + 8 M in 20 M; two freed neighbours of 6 M serve 9 M, and 3 M are split off
    allocator = served(6 * M, 6 * M, 8 * M)
    allocator.free(0)
    allocator.free(1)
    allocator.malloc(3, 9 * M)
    assert layout(allocator) == [((9 * M, True), (3 * M, False), (8 * M, True))]
    assert allocator.reserved == 20 * M


def test_neighbouring_segments_are_not_joined() -> None:
    # two segments of 12 M lie side by side, yet 20 M needs a third
    allocator = served(12 * M, 12 * M)
    allocator.free(0)
    allocator.free(1)
    allocator.malloc(2, 20 * M)
    assert allocator.reserved == 44 * M


# ------------------------------------------------------------------ streams


def test_each_stream_has_its_own_pools() -> None:
    # 30 M freed on stream 0 does not serve stream 1: 30 M + 30 M
    allocator = served(30 * M)
    allocator.free(0)
    allocator.malloc(1, 30 * M, stream=1)
    assert allocator.reserved == 60 * M
    allocator.malloc(2, 30 * M, stream=0)
    assert (allocator.reserved, allocator.allocated) == (60 * M, 60 * M)
    assert [segment.stream for segment in allocator.segments()] == [0, 1]


def test_a_recorded_stream_delays_reuse_until_somebody_waited_for_it() -> None:
    allocator = served(30 * M)
    allocator.record_stream(0, 7)
    allocator.free(0)
    assert (allocator.allocated, allocator.active, allocator.requested) == (0, 30 * M, 30 * M)
    allocator.malloc(1, 30 * M)  # the first one is not free yet
    assert (allocator.reserved, allocator.active, allocator.peak_active) == (60 * M, 60 * M, 60 * M)
    allocator.free(1)
    allocator.sync(7)
    assert allocator.active == 30 * M  # only the next request notices
    allocator.malloc(2, 30 * M)
    allocator.malloc(3, 30 * M)
    assert (allocator.reserved, allocator.active, allocator.requested) == (60 * M, 60 * M, 60 * M)


def test_a_block_without_recorded_streams_is_free_at_once() -> None:
    allocator = served(30 * M, 30 * M)
    allocator.record_stream(0, 7)
    allocator.free(1)  # another block's streams do not hold it
    assert (allocator.allocated, allocator.active, allocator.requested) == (30 * M,) * 3
    allocator.malloc(2, 30 * M)
    assert allocator.reserved == 60 * M


def test_two_recorded_streams_must_both_be_waited_for() -> None:
    allocator = served(30 * M)
    allocator.record_stream(0, 1)
    allocator.record_stream(0, 2)
    allocator.record_stream(0, 0)  # its own stream needs no event
    allocator.free(0)
    allocator.sync(1)
    allocator.malloc(1, 512)
    assert allocator.active == 30 * M + 512
    allocator.sync(2)
    allocator.malloc(2, 512)
    assert allocator.active == 1024


def test_pending_blocks_are_not_joined() -> None:
    # 6 M + 6 M + 8 M; the middle one is pending: its free neighbours stay apart until it is over
    allocator = served(6 * M, 6 * M, 8 * M)
    allocator.record_stream(1, 3)
    allocator.free(1)
    allocator.free(0)
    allocator.free(2)
    assert layout(allocator) == [((6 * M, False), (6 * M, False), (8 * M, False))]
    assert allocator.active == 6 * M
    allocator.sync(3)
    allocator.malloc(3, 512)
    assert layout(allocator)[0] == ((20 * M, False),)


# ------------------------------------------------------------------ out of memory


def test_cached_memory_is_given_back_before_giving_up() -> None:
    # 60 M: 30 M cached + 40 M asked = 70 M > 60 M; after giving 30 M back 40 M fit; one retry
    allocator = served(30 * M, capacity=60 * M)
    allocator.free(0)
    assert allocator.malloc(1, 40 * M) is None
    assert (allocator.reserved, allocator.peak_reserved, allocator.retries) == (40 * M, 40 * M, 1)
    # 40 M + 22 M > 60 M, and nothing is cached: an answer, and nothing is held for it
    assert allocator.malloc(2, 20 * M + 1) == OutOfMemory(
        id=2, asked=20 * M + 1, segment=22 * M, free=20 * M, reserved=40 * M, allocated=40 * M
    )
    assert allocator.retries == 2
    allocator.free(1)
    assert allocator.malloc(2, 20 * M + 1) is None  # the program may free and ask again
    assert (
        allocator.reserved == 40 * M
    )  # best fit: the cached 40 M, of which 20 M - 512 are split off


def test_one_small_block_pins_its_segment() -> None:
    # 20 M with 1.5 M in use cannot be given back: 20 + 12 > 30
    allocator = served(3 * M // 2, 8 * M, capacity=30 * M)
    allocator.free(1)
    failure = allocator.malloc(2, 19 * M)
    assert failure is not None
    assert (failure.reserved, failure.free, failure.segment) == (20 * M, 10 * M, 20 * M)
    allocator.free(0)
    assert allocator.malloc(2, 19 * M) is None


def test_a_pending_block_is_waited_for_before_giving_up() -> None:
    allocator = served(30 * M, capacity=30 * M)
    allocator.record_stream(0, 5)
    allocator.free(0)
    assert allocator.malloc(1, 30 * M) is None
    assert (allocator.active, allocator.retries) == (30 * M, 1)


def test_empty_cache_keeps_what_is_in_use() -> None:
    # 12 M unused goes; 20 M with a block in use stays; 2 M of small memory goes
    allocator = served(12 * M, 2 * M, 512)
    allocator.free(0)
    allocator.free(2)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.retries) == (20 * M, 0)


def test_memory_fraction_counts_the_whole_segment() -> None:
    # limit = trunc(0.5 · 50 M) = 25 M; 20 M + 2 M fit, another 20 M do not
    allocator = Allocator(Settings(memory_fraction=0.5), 50 * M)
    assert allocator.malloc(0, 2 * M) is None
    assert allocator.malloc(1, 512) is None
    failure = allocator.malloc(2, 19 * M)
    assert failure is not None
    assert failure.free == 3 * M
    # the device's own memory counts, not what other programs leave of it: 0.5 · 100 M
    assert Allocator(Settings(memory_fraction=0.5), 50 * M, total=100 * M).malloc(0, 50 * M) is None


def test_a_fraction_of_an_unknown_device_is_refused() -> None:
    with pytest.raises(InputError, match="unknown size"):
        Allocator(Settings(memory_fraction=0.5))
    with pytest.raises(InputError, match="-1 bytes"):
        Allocator(capacity=-1)


def test_more_than_an_exbibyte_is_never_served() -> None:
    failure = Allocator().malloc(0, 2**60)
    assert failure is not None
    assert failure.asked == 2**60


# ------------------------------------------------------------------ max_split_size


def test_an_oversize_block_is_not_split() -> None:
    # limit 32 M: 40 M is oversize. Freed, it serves 39 M whole (no remainder is split off) …
    allocator = served(40 * M, settings=Settings(max_split_size=32 * M))
    allocator.free(0)
    allocator.malloc(1, 38 * M)
    assert (allocator.allocated, allocator.reserved) == (40 * M, 40 * M)
    # … but not 12 M, which opens a segment of its own
    allocator.free(1)
    allocator.malloc(2, 12 * M)
    assert (allocator.allocated, allocator.reserved) == (12 * M, 52 * M)


def test_an_oversize_block_is_not_wasted_on_much_less() -> None:
    # rounding up is limited to 20 M: 60 M serves 40 M + 512 (60 < 40 + 20 + …) and not 40 M (60 >=
    # 40 + 20)
    settings = Settings(max_split_size=32 * M)
    allocator = served(60 * M, settings=settings)
    allocator.free(0)
    allocator.malloc(1, 40 * M)
    assert (allocator.allocated, allocator.reserved) == (40 * M, 100 * M)
    allocator.free(1)
    allocator.malloc(2, 40 * M + 512)
    assert (allocator.allocated, allocator.reserved) == (60 * M, 100 * M)


def test_a_segment_as_large_as_the_limit_is_oversize() -> None:
    # limit 20 M: the segment of 20 M made for 2 M is split while it is new, but once it is whole
    # again it serves no 2 M
    allocator = served(2 * M, settings=Settings(max_split_size=20 * M))
    allocator.free(0)
    allocator.malloc(1, 2 * M)
    assert allocator.reserved == 40 * M


@pytest.mark.parametrize("limit", [24, 30])
def test_oversize_blocks_are_given_back_first(limit: int) -> None:
    # 100 M, of which 40 M, 30 M (both oversize) and 12 M are cached. 70 M are asked, 18 M are left,
    # and no block has 70 M: the largest go until there are 70 M: 40 + 30. The 12 M stay, and no
    # retry is counted
    allocator = served(
        40 * M, 30 * M, 12 * M, settings=Settings(max_split_size=limit * M), capacity=100 * M
    )
    for id in range(3):
        allocator.free(id)
    assert allocator.malloc(3, 70 * M) is None
    assert (allocator.reserved, allocator.retries) == (82 * M, 0)


def test_where_oversize_blocks_are_not_enough_everything_cached_goes() -> None:
    # 60 M, of which 40 M (oversize) and 12 M are cached; 50 M are asked: 40 < 50, so the 12 M must
    # go as well, as a retry
    allocator = served(40 * M, 12 * M, settings=Settings(max_split_size=24 * M), capacity=60 * M)
    allocator.free(0)
    allocator.free(1)
    assert allocator.malloc(2, 50 * M) is None
    assert (allocator.reserved, allocator.retries) == (50 * M, 1)


def test_one_large_enough_block_goes_alone() -> None:
    # 24 M are asked and 10 M are left: of the cached 60 M and 50 M, both too large to be used for
    # it (24 + 20 = 44), the smaller goes
    allocator = served(60 * M, 50 * M, settings=Settings(max_split_size=24 * M), capacity=120 * M)
    allocator.free(0)
    allocator.free(1)
    assert allocator.malloc(2, 24 * M) is None
    assert (allocator.reserved, allocator.retries) == (60 * M + 24 * M, 0)


# ------------------------------------------------------------------ garbage collection


@pytest.mark.parametrize("threshold", [0.5, 0.42])
def test_old_cached_segments_are_collected(threshold: float) -> None:
    # limit 0.5 · 200 M, threshold half of that: 50 M, or 42 M. The age of a cached segment is the
    # number of searches since it was freed
    settings = Settings(memory_fraction=0.5, garbage_collection_threshold=threshold)
    allocator = served(12 * M, 14 * M, settings=settings, capacity=200 * M)  # two searches
    allocator.free(0)
    allocator.malloc(2, 30 * M)  # the third; 26 M reserved: nothing to collect
    allocator.free(1)  # 14 M: since 3
    allocator.malloc(3, 11 * M)  # the fourth takes the 12 M
    allocator.free(3)  # 12 M: since 4
    allocator.free(2)  # 30 M: since 4
    # the fifth misses with 56 M reserved. Ages 2 (14 M), 1 (12 M), 1 (30 M), mean 4/3: only the 14
    # M go, and 56 - 14 <= 50, or is 42 to the byte
    allocator.malloc(4, 40 * M)
    assert (allocator.reserved, allocator.retries) == (12 * M + 30 * M + 40 * M, 0)


def test_a_round_of_collection_is_finished_and_then_the_rest_follows() -> None:
    # limit 0.5 · 200 M, threshold 0.1 of that: 10 M, so 26 - 10 = 16 M must go. Ages at the third
    # search: 12 M 1, 14 M 1; mean 1: both go in one round, 26 M in all
    settings = Settings(memory_fraction=0.5, garbage_collection_threshold=0.1)
    allocator = served(12 * M, 14 * M, settings=settings, capacity=200 * M)
    allocator.free(0)
    allocator.free(1)
    allocator.malloc(2, 40 * M)
    assert allocator.reserved == 40 * M


def test_split_segments_and_small_ones_are_not_collected() -> None:
    # threshold 0.1 · 100 M: the 20 M segment holds a live block and the 2 M segment is small: only
    # the 12 M go
    settings = Settings(memory_fraction=0.5, garbage_collection_threshold=0.1)
    allocator = served(2 * M, 2 * M, 512, 12 * M, settings=settings, capacity=200 * M)
    for id in (1, 2, 3):
        allocator.free(id)
    allocator.malloc(4, 40 * M)
    assert allocator.reserved == 20 * M + 2 * M + 40 * M


def test_nothing_is_collected_below_the_threshold_or_without_a_fraction() -> None:
    for settings in (
        Settings(garbage_collection_threshold=0.1),
        Settings(garbage_collection_threshold=0.9, memory_fraction=0.99),
    ):
        allocator = served(12 * M, settings=settings, capacity=200 * M)
        allocator.free(0)
        allocator.malloc(1, 40 * M)
        assert allocator.reserved == 52 * M


# ------------------------------------------------------------------ expandable segments


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * M),  # pages of 2 M for small requests
        (3 * M // 2, 3 * M // 2, 20 * M),  # and of 20 M for large ones
        (
            11 * M,
            11 * M,
            20 * M,
        ),  # no remainder of 1 M is kept: allocated is what was asked for, rounded to 512
        (20 * M, 20 * M, 20 * M),
        (20 * M + 512, 20 * M + 512, 40 * M),
        (100 * M + 1, 100 * M + 512, 120 * M),
    ],
)
def test_one_request_of_an_expandable_segment(size: int, allocated: int, reserved: int) -> None:
    allocator = served(size, settings=EXPANDABLE)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)
    allocator.free(0)
    assert layout(allocator) == [((reserved, False),)]
    allocator.empty_cache()
    assert (allocator.reserved, allocator.segments()) == (0, ())


def test_an_expandable_segment_grows_at_its_end() -> None:
    # 15 M of the first page; 15 M more start there and need 10 M of a second: 40 M, where ordinary
    # segments need 16 + 16 M
    allocator = served(15 * M, 15 * M, settings=EXPANDABLE)
    assert place(allocator, 1) == place(allocator, 0) + 15 * M
    assert (allocator.allocated, allocator.reserved) == (30 * M, 40 * M)
    allocator.malloc(2, 10 * M)
    assert allocator.reserved == 40 * M
    assert layout(allocator) == [((15 * M, True), (15 * M, True), (10 * M, True))]


def test_a_hole_is_preferred_to_the_growing_end() -> None:
    # free: a hole of 12 M, and 2 M at the end of the pages, behind which the addresses go on. 2 M
    # fits the end best by size, but the end counts with all it can grow to: the hole is taken
    allocator = served(12 * M, 26 * M, settings=EXPANDABLE, capacity=2**30)
    first = place(allocator, 0)
    allocator.free(0)
    allocator.malloc(2, 2 * M)
    assert place(allocator, 2) == first
    assert layout(allocator) == [((2 * M, True), (10 * M, False), (26 * M, True), (2 * M, False))]


def test_whole_pages_inside_a_free_block_are_unmapped() -> None:
    # 50 M of which 5 M .. 45 M are free: of the pages 0-20, 20-40, 40-60 only 20-40 lies inside
    allocator = served(5 * M, 40 * M, 5 * M, settings=EXPANDABLE)
    allocator.free(1)
    assert allocator.reserved == 60 * M
    allocator.empty_cache()
    assert allocator.reserved == 40 * M
    assert layout(allocator) == [
        ((5 * M, True), (15 * M, False)),
        ((5 * M, False), (5 * M, True), (10 * M, False)),
    ]


def test_unmapped_pages_are_filled_before_the_end_grows() -> None:
    # as above, then 36 M: the 15 M before the hole, the page of 20 M that fills it, and 1 M of the
    # 5 M behind it
    allocator = served(5 * M, 40 * M, 5 * M, settings=EXPANDABLE)
    start = place(allocator, 1)
    allocator.free(1)
    allocator.empty_cache()
    allocator.malloc(3, 36 * M)
    assert (place(allocator, 3), allocator.reserved) == (start, 60 * M)
    # 4 M are left of the 5 M, and 10 M at the end: 12 M start there and need one page more
    allocator.malloc(4, 12 * M)
    assert allocator.reserved == 80 * M


def test_expandable_out_of_memory_gives_back_the_other_pool_first() -> None:
    # 61 M: 2 M of small memory are cached, 20 M are in use, and 22 M more need two pages: 2 + 20 +
    # 40 > 61, but 20 + 40 fit
    allocator = served(512, 20 * M, settings=EXPANDABLE, capacity=61 * M)
    allocator.free(0)
    assert allocator.malloc(2, 22 * M) is None
    assert (allocator.reserved, allocator.retries) == (60 * M, 1)
    failure = allocator.malloc(3, 20 * M)  # 18 M are left in the pages: one more page, 80 M > 61 M
    assert failure is not None
    assert (failure.reserved, failure.segment, failure.free) == (60 * M, 20 * M, M)


def test_a_request_is_not_served_from_two_ends() -> None:
    # used: the pages 0-20 and 40-60, up to 5 M and from 45 M on. 45 M need three pages at the end,
    # 40 + 60 > 90 M; 40 M fill exactly what is free around the hole: 15 + 20 + 5
    allocator = served(5 * M, 40 * M, 15 * M, settings=EXPANDABLE, capacity=90 * M)
    allocator.free(1)
    allocator.empty_cache()
    assert allocator.malloc(3, 45 * M) is not None
    assert allocator.reserved == 40 * M
    assert allocator.malloc(4, 40 * M) is None
    assert allocator.reserved == 60 * M


def test_pages_mapped_before_a_failure_count() -> None:
    # pages: one in use, a hole, one free. 55 M are asked of 70 M: the hole is filled (60 M), then a
    # page at the end is one too many (80 M). Everything free is unmapped (20 M), and the retry
    # needs three pages at once: 80 M again
    allocator = served(20 * M, 20 * M, 20 * M, settings=EXPANDABLE, capacity=70 * M)
    allocator.free(1)
    allocator.empty_cache()
    allocator.free(2)
    allocator.reset_peaks()
    assert allocator.reserved == 40 * M
    assert allocator.malloc(3, 55 * M) is not None
    assert (allocator.peak_reserved, allocator.reserved, allocator.retries) == (60 * M, 20 * M, 1)


def test_large_segment_size_is_the_page() -> None:
    allocator = served(
        3 * M // 2, settings=Settings(expandable_segments=True, large_segment_size=32 * M)
    )
    assert allocator.reserved == 32 * M
    assert served(3 * M // 2, settings=Settings(large_segment_size=32 * M)).reserved == 32 * M
    assert (
        served(12 * M, settings=Settings(large_segment_size=32 * M)).reserved == 12 * M
    )  # from 10 M on: to measure


def test_an_expandable_segment_has_addresses_for_an_eighth_more_than_the_device() -> None:
    # ExpandableSegment reserves totalGlobalMem + totalGlobalMem / 8 (CUDACachingAllocator.cpp,
    # torch 2.10): 160 + 20 M are nine pages of 20 M, and those of another stream begin behind them
    allocator = Allocator(EXPANDABLE, 160 * M)
    allocator.malloc(0, 2 * M, stream=0)
    allocator.malloc(1, 2 * M, stream=4)
    assert [segment.address for segment in allocator.segments()] == [0, 180 * M]
    # and where other programs hold a part, the device's own memory counts
    allocator = Allocator(EXPANDABLE, 40 * M, total=160 * M)
    allocator.malloc(0, 2 * M, stream=0)
    allocator.malloc(1, 2 * M, stream=4)
    assert [segment.address for segment in allocator.segments()] == [0, 180 * M]


@pytest.mark.parametrize("settings", [Settings(), EXPANDABLE])
def test_segments_are_all_that_is_held_and_their_blocks_fill_them(settings: Settings) -> None:
    allocator = served(5 * M, 40 * M, 5 * M, 512, 3 * M, settings=settings)
    allocator.malloc(5, 30 * M, stream=2)
    for id in (1, 3):
        allocator.free(id)
    for _ in range(2):
        found = allocator.segments()
        assert sum(one.size for one in found) == allocator.reserved
        assert sum(one.allocated for one in found) == allocator.allocated == 43 * M
        for one in found:
            assert sum(size for size, _ in one.blocks) == one.size
            assert sum(size for size, used in one.blocks if used) == one.allocated
        for one, after in pairwise(found):
            assert one.address + one.size <= after.address
        allocator.empty_cache()


def test_each_stream_has_its_own_expandable_segment() -> None:
    allocator = Allocator(EXPANDABLE)
    allocator.malloc(0, 2 * M, stream=0)
    allocator.malloc(1, 2 * M, stream=4)
    assert [(segment.size, segment.stream) for segment in allocator.segments()] == [
        (20 * M, 0),
        (20 * M, 4),
    ]


# ------------------------------------------------------------------ rounding to parts of powers of
# two


def test_roundup_power2_divisions() -> None:
    # 4 parts: between 64 M and 128 M steps of 16 M; 65 M -> 80 M, of which nothing is requested
    # beyond 65 M
    allocator = served(65 * M, settings=Settings(roundup_power2_divisions=4))
    assert (allocator.allocated, allocator.requested, allocator.reserved) == (
        80 * M,
        65 * M,
        80 * M,
    )
    allocator.malloc(1, 2048)  # not beyond 512 · 4: the ordinary rounding
    allocator.malloc(2, 2049)  # 2048 + one step of 2048/4
    assert allocator.allocated == 80 * M + 2048 + 2560


def test_roundup_by_size() -> None:
    # 2 parts below 2 M, none from 2 M, 8 from 4 M on
    settings = Settings(roundup_power2_divisions=(2, 0) + (8,) * 14)
    assert [
        settings.rounded(size) for size in (3 * 512 + 1, M + 1, 2 * M + 1, 4 * M + 1, 2**37 + 1)
    ] == [
        2048,
        3 * M // 2,
        2 * M + 512,
        4 * M + M // 2,
        2**37 + 2**34,
    ]


def test_one_part_of_a_power_of_two_is_none() -> None:
    # divisions of 1 round as none do (round_size asks for more than 1): 2049 is up(2049, 512)
    settings = Settings(roundup_power2_divisions=(1, 0, *(4,) * 14))
    assert [settings.rounded(size) for size in (2049, M + 1, 4 * M + 1)] == [2560, M + 512, 5 * M]


# ------------------------------------------------------------------ statistics, and misuse


def test_peaks_start_again() -> None:
    allocator = served(30 * M, 12 * M)
    allocator.free(0)
    allocator.reset_peaks()
    assert (allocator.peak_allocated, allocator.peak_reserved, allocator.peak_requested) == (
        12 * M,
        42 * M,
        12 * M,
    )
    allocator.malloc(2, 20 * M)
    assert (allocator.peak_allocated, allocator.peak_reserved) == (32 * M, 42 * M)


def test_misuse_is_an_error_of_the_tape() -> None:
    allocator = served(512)
    for wrong in (
        lambda: allocator.malloc(0, 512),
        lambda: allocator.malloc(0, 0),
        lambda: allocator.malloc(1, -1),
        lambda: allocator.free(9),
        lambda: allocator.record_stream(9, 1),
    ):
        with pytest.raises(TapeError):
            wrong()
    assert allocator.allocated == 512
