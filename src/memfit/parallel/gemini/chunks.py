"""How large Gemini's chunks are (colossalai 0.3.0 zero/gemini/chunk/search_utils.py): of the sizes
in reach the one that leaves the least unused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import lcm, sqrt

from memfit.strategy import Gemini
from memfit.units import MIB, round_up

# standard deviations above the mean: larger weights do not count, and get chunks of their own
OUTLIER = 3


def search(sizes: Mapping[int, Sequence[int]], layout: Gemini) -> dict[int, tuple[int, bool]]:
    """(values of a chunk, does it stay gathered) by the number of ranks that hold the same;
    `sizes`: values of each weight, in the model's order.

    Fewer weights than the least chunk lie in one, which stays; so do, with LLMem's patch, those
    that one rank alone holds."""
    least = layout.min_chunk * MIB
    found = {degree: (sum(each), True) for degree, each in sizes.items() if sum(each) < least}
    large = usual({degree: each for degree, each in sizes.items() if degree not in found})
    first = round_up(max([least, *(max(each, default=0) for each in large)]), layout.interval)
    reach = range(first, first + layout.search_range * MIB + 1, layout.interval)
    size = round_up(least_unused(large, reach), lcm(*sizes))
    rest = {
        degree: (size, layout.keep_single and degree == 1)
        for degree in sizes
        if degree not in found
    }
    return found | rest


def usual(sizes: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Without what is too large (_filter_exlarge_params)."""
    every = [size for each in sizes.values() for size in each]
    mean = sum(every) / max(1, len(every))
    limit = mean + OUTLIER * sqrt(sum((size - mean) ** 2 for size in every) / max(1, len(every)))
    return [[size for size in each if size <= limit] for each in sizes.values()]


def least_unused(sizes: Sequence[Sequence[int]], reach: Iterable[int]) -> int:
    """The first chunk size that wastes no more than any other."""
    best, least = 0, -1
    for chunk in reach:
        lost = unused(sizes, chunk, least)
        if least < 0 or lost < least:
            best, least = chunk, lost
    return best


def unused(sizes: Sequence[Sequence[int]], chunk: int, enough: int) -> int:
    """Values left over at the ends of chunks (_get_unused_byte); counted no further than to
    `enough`."""
    lost = 0
    for each in sizes:
        left = 0
        for size in each:
            if size > left:
                lost += left
                left = chunk
                if 0 <= enough <= lost:
                    return lost
            left -= size
        lost += left
    return lost
