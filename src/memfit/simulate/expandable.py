"""Expandable segments: one long range of addresses per pool and stream, to which memory is mapped
page by page (`find_expandable_block`, `map_block`, `unmap_block` of
c10/cuda/CUDACachingAllocator.cpp, torch 2.10)."""

from __future__ import annotations

from memfit.simulate.blocks import FREE, UNMAPPED, Block, Device, Pool
from memfit.units import round_up


def reach(block: Block) -> int:
    """What a free block counts in the search for the best fit: its size and the unmapped addresses
    right behind it."""
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)


def extend(pool: Pool, size: int, device: Device) -> Block | None:
    """A block of at least `size` bytes, taken out of the pool, at the lowest addresses that can be
    mapped, or None.

    Pages mapped before the device ran out stay mapped, as free blocks."""
    block: Block | None = _room(pool, size, device)
    if block is not None and block.state == UNMAPPED:
        block = _map(block, min(block.size, size), device)
    while block is not None and block.size < size:
        gap = block.next
        assert gap is not None
        block = _map(gap, min(size - block.size, gap.size), device)
    if block is not None:
        pool.take(block)
    return block


def shrink(block: Block, device: Device) -> None:
    """Unmap the pages that lie wholly inside a free block; what is left of it on either side stays
    free."""
    pool = block.pool
    start, end = (
        round_up(block.address, pool.page),
        (block.address + block.size) // pool.page * pool.page,
    )
    if start >= end:
        return
    pool.take(block)
    if end < block.address + block.size:
        pool.keep(block.split(end - block.address, FREE))
    if start > block.address:
        gap = block.split(start - block.address, UNMAPPED)
        pool.keep(block)
    else:
        gap = block
        gap.state = UNMAPPED
    device.give(end - start)
    after, before = gap.next, gap.prev
    if after is not None and after.state == UNMAPPED:
        pool.close(after)
        gap.absorb()
    if before is not None and before.state == UNMAPPED:
        pool.close(before)
        before.absorb()
        gap = before
    if gap.prev is None and gap.next is None:
        del pool.heads[gap.address]
    else:
        pool.open(gap)


def _room(pool: Pool, size: int, device: Device) -> Block:
    """The block at which to start mapping: the first gap, or the free block before it, with enough
    addresses behind."""
    for _, gap in pool.gaps:
        start = gap.prev if gap.prev is not None and gap.prev.state == FREE else gap
        found, block = 0, start
        while found < size and block is not None and block.state in (FREE, UNMAPPED):
            found += block.size
            block = block.next  # type: ignore[assignment]  # None ends the loop
        if found >= size:
            return start
    span = round_up(device.span, pool.page)
    gap = Block(pool, device.addresses(span, pool.page), span, None, None, UNMAPPED)
    pool.heads[gap.address] = gap
    pool.open(gap)
    return gap


def _map(gap: Block, size: int, device: Device) -> Block | None:
    """Put memory behind the first `size` bytes of a gap, in whole pages; the free block it becomes,
    or None."""
    pool = gap.pool
    mapped = round_up(size, pool.page)
    if not device.take(mapped):
        return None
    pool.close(gap)
    if mapped < gap.size:
        pool.open(gap.split(mapped, UNMAPPED))
    gap.state = FREE
    after, before = gap.next, gap.prev
    if after is not None and after.state == FREE:
        pool.take(after)
        gap.absorb()
    if before is not None and before.state == FREE:
        pool.take(before)
        before.absorb()
        gap = before
    pool.keep(gap)
    return gap
