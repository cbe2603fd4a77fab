"""Blocks and the pools that keep the free ones: what `Block`, `BlockPool` and the driver are to the
CUDA caching allocator."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

from memfit.units import round_up

USED: Final = 0
FREE: Final = 1
PENDING: Final = 2  # freed, but another stream may still read it
UNMAPPED: Final = 3  # addresses of an expandable segment without memory behind them


class Block:
    """A run of bytes in a segment, between its neighbours `prev` and `next`. The leftmost block of
    a segment stays the same object for as long as the segment lives: splitting makes a new block on
    the right, merging keeps the left one."""

    __slots__ = ("address", "next", "pool", "prev", "requested", "since", "size", "state")

    def __init__(
        self,
        pool: Pool,
        address: int,
        size: int,
        prev: Block | None,
        next: Block | None,
        state: int,
    ) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.prev = prev
        self.next = next
        self.state = state
        self.requested: int
        # searches of the pools when it was last freed; kept only where garbage is collected
        self.since: int

    def split(self, size: int, state: int) -> Block:
        """Keep `size` bytes; what is behind them becomes a block of its own."""
        rest = Block(self.pool, self.address + size, self.size - size, self, self.next, state)
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.size = size
        return rest

    def absorb(self) -> None:
        """Take in the next block."""
        after = self.next
        assert after is not None
        self.size += after.size
        self.next = after.next
        if self.next is not None:
            self.next.prev = self


class Pool:
    """The free blocks of one stream, small or large, in the order of the search: by size, then by
    address."""

    __slots__ = ("entries", "gaps", "heads", "least", "page", "small", "stream")

    def __init__(self, *, stream: int, small: bool, page: int, least: int) -> None:
        self.stream = stream
        self.small = small
        self.page = page  # of a segment for small requests, and of an expandable segment
        self.least = least  # a remainder of fewer bytes is not split off
        self.entries: list[tuple[int, int, Block]] = []
        self.gaps: list[tuple[int, Block]] = []  # unmapped blocks, by address
        self.heads: dict[int, Block] = {}  # the leftmost block of each segment, by address

    def keep(self, block: Block) -> None:
        insort(self.entries, (block.size, block.address, block))

    def take(self, block: Block) -> None:
        del self.entries[bisect_left(self.entries, (block.size, block.address))]

    def open(self, block: Block) -> None:
        insort(self.gaps, (block.address, block))

    def close(self, block: Block) -> None:
        del self.gaps[bisect_left(self.gaps, (block.address,))]


class Device:
    """The driver's side: how much memory it gives, and at which addresses. It never hands out an
    address twice."""

    __slots__ = ("_address", "capacity", "peak", "reserved", "span")

    def __init__(self, capacity: int | None, span: int) -> None:
        self.capacity = capacity
        self.span = span  # addresses of one expandable segment, before rounding up to pages
        self.reserved = 0
        self.peak = 0
        self._address = 0

    def take(self, size: int) -> bool:
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        if self.reserved > self.peak:
            self.peak = self.reserved
        return True

    def give(self, size: int) -> None:
        self.reserved -= size

    def addresses(self, size: int, align: int) -> int:
        start = round_up(self._address, align)
        self._address = start + size
        return start
