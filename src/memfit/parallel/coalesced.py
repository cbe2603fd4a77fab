"""How torch puts tensors together that it sends in one go (torch 2.13
torch/csrc/distributed/c10d/reducer.cpp compute_bucket_assignment_by_size, comm.cpp
broadcast_coalesced)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from memfit.formats import Format

COALESCED = 250 * 2**20  # bytes of a broadcast (nn/parallel/distributed.py, fsdp/_init_utils.py)
IN_FLIGHT = 2  # broadcasts (torch/csrc/distributed/c10d/comm.cpp broadcast_coalesced)


class Item(NamedTuple):
    """A tensor's size, and in which numbers it is."""

    size: int
    format: Format


def buckets(items: Iterable[Item], caps: tuple[int, ...]) -> list[list[int]]:
    """Sizes of the tensors of each bucket. Tensors of a dtype share one, which is full when it
    holds at least as much as its cap; the last cap goes on for ever, and no cap at all makes one
    bucket."""
    open_ones: dict[Format, list[int]] = {}
    sums: dict[Format, int] = {}
    full: dict[Format, int] = {}
    found: list[list[int]] = []
    for size, format in items:
        open_ones.setdefault(format, []).append(size)
        sums[format] = sums.get(format, 0) + size
        cap = caps[min(full.get(format, 0), len(caps) - 1)] if caps else None
        if cap is not None and sums[format] >= cap:
            found.append(open_ones.pop(format))
            sums[format] = 0
            full[format] = full.get(format, 0) + 1
    return found + list(open_ones.values())


__all__ = ["COALESCED", "IN_FLIGHT", "Item", "buckets"]
