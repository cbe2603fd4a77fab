"""What a rank of ZeRO's first two stages is given: an equal part of every flat buffer, and with it
the whole gradients of all parameters that reach into that part. Ranks whose parts cut the largest
parameters hold the most; where a table is larger than a part, several ranks hold it whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from memfit.formats import FORMATS
from memfit.lower.body import Body
from memfit.lower.engine import silently, unfolded
from memfit.lower.recorder import Recorder
from memfit.program import Program

# bytes a value of the copy that a gradient's norm is taken of (runtime/zero/utils.py
# get_norm_dtype)
NORM = 8
ALIGNED = 2  # values that partitions begin at (nccl_start_alignment_factor)


class Share(NamedTuple):
    """Of `alike` ranks in a row from `first` on: values of the parameters that reach into their
    part, and of the largest piece in it."""

    first: int
    alike: int
    reaching: int
    largest: int


def part_of(total: int, ranks: int) -> int:
    """Values of one rank's part of a flat buffer, which is filled up."""
    whole = ALIGNED * ranks
    return -(-total // whole) * whole // ranks


def shares(groups: Sequence[Sequence[int]], ranks: int) -> list[Share]:
    """`groups`: values of each parameter, in the order of the flat buffer."""
    reaching, largest = [0] * ranks, [0] * ranks
    within: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for number, sizes in enumerate(groups):
        part = part_of(sum(sizes), ranks)
        for place, (start, size) in enumerate(
            zip(accumulate(sizes, initial=0), sizes, strict=False)
        ):
            for rank in range(start // part, (start + size - 1) // part + 1):
                reaching[rank] += size
                largest[rank] = max(
                    largest[rank], min(start + size, (rank + 1) * part) - max(start, rank * part)
                )
                within[rank].append((number, place))
    found: list[Share] = []
    for rank, own in enumerate(zip(reaching, largest, strict=True)):
        if found and found[-1][2:] == own and within[rank] == within[rank - 1]:
            found[-1] = found[-1]._replace(alike=found[-1].alike + 1)
        else:
            found.append(Share(rank, 1, *own))
    return found


def leading(found: Sequence[Share], weight: Callable[[Share], int]) -> Iterator[Share]:
    """Those that weigh more than all before them."""
    most = -1
    for share in found:
        if weight(share) > most:
            most = weight(share)
            yield share


def heaviest(found: Sequence[Share]) -> set[Share]:
    """Those of which no earlier one has as much of both, and no later one: what a rank holds grows
    with each, and which parameters it are decides when in a backward it holds them, early or late.
    """

    def front(shares: Sequence[Share]) -> Iterator[Share]:
        seen: list[Share] = []
        for share in shares:
            if not any(
                one.reaching >= share.reaching and one.largest >= share.largest for one in seen
            ):
                seen.append(share)
                yield share

    return {*front(found), *front(found[::-1])}


def groups_of(program: Program) -> Iterator[list[int]]:
    """Values of trained parameters in the Trainer's two groups, with weight decay and without."""
    r = Recorder()
    body = Body(r, program)
    with silently(r):
        body.load()
        body.adapt()
    leaves = unfolded(program, [(where, leaf) for where, some in body.trained() for leaf in some])
    for wide in (True, False):
        group = [leaf.count for leaf in leaves if (len(leaf.shape) > 1) is wide]
        if group:
            yield group


def distinct_ranks(program: Program, *, every: bool, lightest: bool) -> tuple[tuple[int, int], ...]:
    """(rank, how many are like it): ranks among which the worst is, and where `lightest` the one
    with the least; or the one that is likely the worst."""
    zero = program.strategy.zero
    assert zero is not None
    zero = replace(zero, size=program.strategy.partitions)
    groups = list(groups_of(program))
    if zero.round_robin:
        groups = [
            [one for first in range(zero.size) for one in group[first :: zero.size]]
            for group in groups
        ]
    found = shares(groups, zero.size)
    once, away = program.job.accumulate == 1, zero.offload_optimizer != "none"
    width = 0 if away else FORMATS[program.weights].block_bytes
    norm = (
        NORM if once or away else 0
    )  # else gradients stand beside those that they are added to, which is more
    later = (
        -1 if zero.stage == 1 and once else 1
    )  # of like ones: the first stage begins with the first parameter when the backward is over
    weights = {
        share: (width * share.reaching + norm * share.largest, later * share.first)
        for share in found
    }
    worst, least = max(found, key=weights.__getitem__), min(found, key=weights.__getitem__)
    if not every:
        heavy = {worst}
    elif zero.contiguous and len(groups) == 1 and not zero.round_robin:
        # what a rank holds it holds whole from its first gradient on, and they come one after the
        # other
        coming = found[::-1] if zero.stage == 2 or zero.overlap else found
        heavy = {*leading(coming, lambda one: one.largest if away else one.reaching), worst}
    else:
        heavy = heaviest(found)
    chosen = [*sorted(heavy), *({least} - heavy if every and lightest else ())]
    return tuple((share.first, share.alike) for share in chosen)


__all__ = ["Share", "heaviest", "part_of", "shares", "distinct_ranks"]
