"""The CUDA caching allocator without CUDA: which blocks and segments a sequence of requests leads
to, byte for byte.

Follows the native backend of torch (c10/cuda/CUDACachingAllocator.cpp) as of 2.10, whose search,
splitting, sizes and statistics are those of 2.1 to 2.13. Left out: CUDA graphs and user memory
pools, and the driver's choice of addresses: here they only grow, so among free blocks of one size a
real run may take another one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

from memfit.errors import InputError, TapeError
from memfit.lazy_dataclass import dataclass
from memfit.simulate.blocks import FREE, PENDING, UNMAPPED, USED, Block, Device, Pool
from memfit.simulate.expandable import extend, reach, shrink
from memfit.simulate.settings import (
    LARGE_REQUEST,
    LARGEST,
    ROUNDING,
    SEGMENT_ROUNDING,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    Settings,
)
from memfit.units import round_up

_PLAIN = Settings()
_MASK = -ROUNDING


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """A request that could not be served after everything cached had been given back; an answer,
    not an error."""

    id: int
    asked: int  # what the program wanted
    segment: int  # what the driver was asked for, in vain
    free: int  # what the driver still had
    reserved: int
    allocated: int
    event: int | None = None  # index in the tape


class Segment(NamedTuple):
    """A run of memory held from the driver, as `torch.cuda.memory_snapshot` lists it."""

    address: int
    size: int
    stream: int
    small: bool
    allocated: int
    blocks: tuple[tuple[int, bool], ...]  # (size, allocated), by address


class Allocator:
    """`capacity` is what the driver can give to segments (None: no end); `total` is the memory of
    the device, which a memory fraction and the address range of an expandable segment refer to, and
    which is `capacity` unless stated."""

    def __init__(
        self, settings: Settings = _PLAIN, capacity: int | None = None, *, total: int | None = None
    ) -> None:
        if (capacity is not None and capacity < 0) or (total is not None and total < 0):
            raise InputError.one(
                f"a device of {min(capacity or 0, total or 0)} bytes",
                where="allocator.capacity",
                hint="0 or more bytes",
            )
        total = capacity if total is None else total
        if total is None and settings.memory_fraction < 1:
            raise InputError.one(
                "a memory fraction of a device of unknown size",
                where="allocator.memory_fraction",
                hint="state the capacity",
            )
        self.settings = settings
        self.allocated = self.peak_allocated = (
            0  # bytes of blocks in use, unsplit remainders included
        )
        self.requested = self.peak_requested = 0  # bytes that the program asked for
        self.retries = (
            0  # num_alloc_retries: how often everything cached was given back for one request
        )
        self.device = Device(capacity, LARGEST if total is None else total + total // 8)
        self._limit = (
            None
            if settings.memory_fraction >= 1 or total is None
            else int(settings.memory_fraction * total)
        )
        self._aging = self._limit is not None and settings.garbage_collection_threshold > 0
        self._divided = settings.divisions() is not None
        self._expandable = settings.expandable_segments
        self._oversize = LARGEST * 2 if settings.max_split_size is None else settings.max_split_size
        self._unsplit = (
            LARGEST * 2 if self._expandable else self._oversize
        )  # requests from here on keep the whole block
        self._plain = not (self._expandable or self._aging or settings.max_split_size is not None)
        self._live: dict[int, Block | None] = {}  # None: a request of no bytes
        self._pools: tuple[dict[int, Pool], dict[int, Pool]] = (
            {},
            {},
        )  # large ones by stream, small ones by stream
        self._searches = [0, 0]  # get_free_blocks_call_count of the large and of the small pools
        self._uses: defaultdict[int, set[int]] = defaultdict(
            set
        )  # streams that used a live block beside its own
        self._queues: defaultdict[int, list[Block]] = defaultdict(
            list
        )  # blocks that wait for a stream
        self._waits: dict[Block, int] = {}  # for how many streams a pending block waits
        self._passed: list[Block] = []  # waits that are over, not yet noticed
        self._pending = self._peak_pending = 0

    @property
    def reserved(self) -> int:
        """Bytes of segments held from the driver."""
        return self.device.reserved

    @property
    def peak_reserved(self) -> int:
        return self.device.peak

    @property
    def active(self) -> int:
        """Allocated, and freed blocks that other streams may still use."""
        return self.allocated + self._pending

    @property
    def peak_active(self) -> int:
        return max(self.peak_allocated, self._peak_pending)

    def reset_peaks(self) -> None:
        """As `torch.cuda.reset_peak_memory_stats` does: peaks start again from what is held now."""
        self.peak_allocated, self.peak_requested = self.allocated, self.requested
        self.device.peak, self._peak_pending = self.device.reserved, self.active

    def malloc(self, id: int, size: int, stream: int = 0) -> OutOfMemory | None:
        """Serve a request; on failure nothing is held for `id`, and the program may go on."""
        live = self._live
        if size <= 0 or id in live:
            self._nothing(id, size)
            return None
        if self._passed:
            self._notice()
        rounded = self.settings.rounded(size) if self._divided else size + 511 & _MASK
        pools = self._pools[rounded <= SMALL_REQUEST]
        pool = pools[stream] if stream in pools else self._open(rounded <= SMALL_REQUEST, stream)
        entries = pool.entries
        if self._plain:
            at = bisect_left(entries, (rounded,))
            block = entries.pop(at)[2] if at < len(entries) else self._grow(pool, rounded)
        else:
            block = self._search(pool, rounded) or self._grow(pool, rounded)
        if block is None:
            return self._out_of_memory(id, size, pool, rounded)
        held = block.size
        rest = held - rounded
        if rest >= pool.least and rounded < self._unsplit:
            # block.split and pool.keep, written out: this is half of the time of a replay
            held = rounded
            after = block.next
            block.size = held
            block.next = tail = Block(pool, block.address + held, rest, block, after, FREE)
            if after is not None:
                after.prev = tail
            insort(entries, (rest, tail.address, tail))
        block.state = USED
        block.requested = size
        live[id] = block
        self.allocated = allocated = self.allocated + held
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated
        self.requested = requested = self.requested + size
        if requested > self.peak_requested:
            self.peak_requested = requested
        if self._pending and allocated + self._pending > self._peak_pending:
            self._peak_pending = allocated + self._pending
        return None

    def free(self, id: int) -> None:
        """Give a block back to its pool, or let it wait for the streams that used it."""
        try:
            block = self._live.pop(id)
        except KeyError:
            raise TapeError(f"block {id} is freed but not alive") from None
        if block is None:
            return
        self.allocated -= block.size
        if self._uses and id in self._uses:
            self._wait(block, self._uses.pop(id))
            return
        self.requested -= block.requested
        self._keep(block)

    def _keep(self, block: Block) -> None:
        """Merge a freed block with its free neighbours and put it into its pool (`free_block`)."""
        pool = block.pool
        entries = pool.entries
        size = block.size
        after, before = block.next, block.prev
        if after is not None and after.state == FREE:
            del entries[bisect_left(entries, (after.size, after.address))]
            size += after.size
            block.next = after = after.next
            if after is not None:
                after.prev = block
        if before is not None and before.state == FREE:
            del entries[bisect_left(entries, (before.size, before.address))]
            size += before.size
            before.next = after
            if after is not None:
                after.prev = before
            block = before
        block.state = FREE
        block.size = size
        if self._aging:
            block.since = self._searches[pool.small]
        insort(entries, (size, block.address, block))

    def record_stream(self, id: int, stream: int) -> None:
        """`stream` uses the block, too: once freed it is not served again before somebody waited
        for that stream."""
        if id not in self._live:
            raise TapeError(f"block {id} is used by stream {stream} but not alive")
        block = self._live[id]
        if block is not None and block.pool.stream != stream:
            self._uses[id].add(stream)

    def sync(self, waits_for: int, behind: int = 0) -> None:
        """What `waits_for` was doing is over, but for what uses the last `behind` blocks; the next
        request that is served notices (`process_events`)."""
        queue = self._queues.pop(waits_for, [])
        over = max(0, len(queue) - behind)
        self._passed.extend(queue[:over])
        if over < len(queue):
            self._queues[waits_for] = queue[over:]

    def empty_cache(self) -> None:
        """Wait for all streams, then give back every segment, or page of an expandable one, that
        holds no block in use."""
        for stream in list(self._queues):
            self.sync(stream)
        self._notice()
        for pools in self._pools:
            for pool in pools.values():
                for _, _, block in list(pool.entries):
                    if self._expandable:
                        shrink(block, self.device)
                    elif block.prev is None and block.next is None:
                        self._release(block)

    def segments(self) -> tuple[Segment, ...]:
        """What is held from the driver, by address; every mapped run of an expandable segment
        counts as one."""
        found: list[Segment] = []
        for pool in (pool for pools in self._pools for pool in pools.values()):
            for head in pool.heads.values():
                found.extend(_runs(head))
        return tuple(sorted(found, key=lambda segment: segment.address))

    def layout(self) -> Hashable:
        """All that later requests depend on, where the blocks in use are the same: the free blocks
        of every pool, those that wait, and the gaps of expandable segments."""
        pools = [
            (
                pool.stream,
                pool.small,
                tuple((size, address) for size, address, _ in pool.entries),
                tuple((gap.size, address) for address, gap in pool.gaps),
            )
            for pools in self._pools
            for pool in pools.values()
        ]
        return self.reserved, self.allocated, self._pending, tuple(pools)

    def placed(self) -> Iterator[tuple[int, int, int]]:
        """(id, address, size) of every live block."""
        for id, block in self._live.items():
            if block is not None:
                yield id, block.address, block.size

    def place(self, id: int) -> tuple[int, int] | None:
        """(address, size) of one live block; None for a request of no bytes."""
        block = self._live[id]
        return None if block is None else (block.address, block.size)

    def _nothing(self, id: int, size: int) -> None:
        """A request of no bytes gets no block; anything else that comes here is illegal."""
        if id in self._live:
            raise TapeError(f"block {id} is allocated twice")
        if size < 0:
            raise TapeError(f"block {id} has size {size}")
        self._live[id] = None

    def _open(self, small: bool, stream: int) -> Pool:
        least = (
            ROUNDING if small or self._expandable else SMALL_REQUEST + ROUNDING
        )  # large remainders: strictly more than 1 MiB
        page = SMALL_SEGMENT if small else self.settings.large_segment_size
        pool = self._pools[small][stream] = Pool(stream=stream, small=small, page=page, least=least)
        return pool

    def _wait(self, block: Block, streams: Iterable[int]) -> None:
        """One event for each stream that used the block (`insert_events`)."""
        block.state = PENDING
        self._pending += block.size
        for stream in streams:
            self._queues[stream].append(block)
            self._waits[block] = self._waits.get(block, 0) + 1

    def _notice(self) -> None:
        passed, self._passed = self._passed, []
        for block in passed:
            self._waits[block] -= 1
            if not self._waits[block]:
                del self._waits[block]
                self._pending -= block.size
                self.requested -= block.requested
                self._keep(block)

    def _search(self, pool: Pool, size: int) -> Block | None:
        """The best fit under the options that bend the search (`get_free_block`): only one
        candidate is looked at."""
        entries = pool.entries
        if self._aging:
            self._searches[pool.small] += 1
        at = bisect_left(entries, (size,))
        if at == len(entries):
            return None
        block = entries[at][2]
        while (
            self._expandable and at + 1 < len(entries) and reach(entries[at + 1][2]) < reach(block)
        ):
            at += 1
            block = entries[at][2]
        if size < self._oversize <= block.size:
            return None
        settings = self.settings
        if size >= self._oversize and block.size >= size + (
            settings.max_non_split_rounding or settings.large_segment_size
        ):
            return None
        del entries[at]
        return block

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """A new block from the driver, after giving back more and more of what is cached."""
        if size >= LARGEST:
            return None
        segment = self._segment(pool, size)
        if self._aging:
            self._collect()
        block = self._take(pool, size, segment)
        if block is None and self._release_oversize(pool, size):
            block = self._take(pool, size, segment)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._take(pool, size, segment)
        return block

    def _segment(self, pool: Pool, size: int) -> int:
        return pool.page if size < LARGE_REQUEST else round_up(size, SEGMENT_ROUNDING)

    def _take(self, pool: Pool, size: int, segment: int) -> Block | None:
        """`alloc_block`: the limit is tested with the whole segment even where only pages are
        mapped."""
        device = self.device
        if self._limit is not None and device.reserved + segment > self._limit:
            return None
        if self._expandable:
            return extend(pool, size, device)
        if not device.take(segment):
            return None
        block = Block(pool, device.addresses(segment, SEGMENT_ROUNDING), segment, None, None, USED)
        pool.heads[block.address] = block
        return block

    def _release(self, block: Block) -> None:
        block.pool.take(block)
        del block.pool.heads[block.address]
        self.device.give(block.size)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """`release_available_cached_blocks`: one block that is large enough, or the largest ones
        together; only blocks that are never split because of `max_split_size` qualify, and
        expandable ones never do."""
        if self._expandable or self.settings.max_split_size is None:
            return False
        wanted = max(size, self._oversize)
        entries = pool.entries
        at = bisect_left(entries, (wanted,))
        if at < len(entries):
            self._release(entries[at][2])
            return True
        freed = 0
        while freed < wanted and entries and entries[-1][0] >= self._oversize:
            freed += entries[-1][0]
            self._release(entries[-1][2])
        return freed >= wanted

    def _collect(self) -> None:
        """`garbage_collect_cached_blocks`: whole cached segments of the large pools, those of at
        least average age first, age being counted in searches; a round is finished even when enough
        has been given back."""
        assert self._limit is not None
        excess = self.reserved - int(self.settings.garbage_collection_threshold * self._limit)
        if excess <= 0 or self._expandable:
            return
        now = self._searches[0]
        cached = [
            block
            for pool in self._pools[0].values()
            for _, _, block in pool.entries
            if block.prev is None and block.next is None
        ]
        age = sum(now - block.since for block in cached)
        while excess > 0 and cached:
            mean = age / len(cached)
            kept = []
            for block in cached:
                if now - block.since < mean:
                    kept.append(block)
                    continue
                age -= now - block.since
                excess -= block.size
                self._release(block)
            if len(kept) == len(cached):
                return
            cached = kept

    def _out_of_memory(self, id: int, size: int, pool: Pool, rounded: int) -> OutOfMemory:
        end = min(end for end in (self.device.capacity, self._limit, LARGEST) if end is not None)
        segment, reserved = self._segment(pool, rounded), self.reserved
        return OutOfMemory(
            id=id,
            asked=size,
            segment=segment,
            free=end - reserved,
            reserved=reserved,
            allocated=self.allocated,
        )


def _runs(head: Block) -> Iterator[Segment]:
    """The mapped runs of blocks from `head` on."""
    pool, start, blocks, allocated = head.pool, head.address, [], 0
    block: Block | None = head
    while block is not None:
        if block.state != UNMAPPED:
            blocks.append((block.size, block.state == USED))
            if block.state == USED:
                allocated += block.size
        elif blocks:
            yield Segment(
                start, block.address - start, pool.stream, pool.small, allocated, tuple(blocks)
            )
            blocks, allocated = [], 0
        if not blocks:
            start = block.address + block.size
        head, block = block, block.next
    if blocks:
        yield Segment(
            start,
            head.address + head.size - start,
            pool.stream,
            pool.small,
            allocated,
            tuple(blocks),
        )
