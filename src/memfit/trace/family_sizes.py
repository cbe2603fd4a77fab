"""Sizes of the small models that a family is captured with: unrelated to each other, and such that
the model can be built with them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

from memfit.errors import InputError
from memfit.graph.solve import Solver, Unsolved
from memfit.trace.probes import change, seen

if TYPE_CHECKING:
    from memfit.trace.new_family import Subject

Pool: TypeAlias = tuple[tuple[int, ...], ...]
COUNT = 4  # three to capture, and one to compare with the trace
SEQ = 160  # what positions are more than
TRIES = 12
WIDE = 64  # from here on a size is a width
WIDTHS = (96, 160, 288, 192), (128, 320, 96, 256), (224, 160, 384, 96)
FREE = (
    (200, 312, 184, 264),
    (72, 136, 232, 168),
    (120, 264, 344, 88),
    (248, 104, 328, 152),
    (88, 152, 112, 216),
    (136, 296, 176, 232),
    (328, 176, 120, 296),
)
TABLES = (544, 608, 736, 672), (1040, 912, 1168, 976)
PLACES = (164, 178, 194, 186), (168, 182, 170, 202)
SMALL = (4, 8, 2, 6), (3, 5, 9, 7), (5, 2, 7, 10), (7, 3, 4, 9)
DIVIDING = (6, 10, 12, 8), (2, 5, 4, 3), (3, 5, 4, 6)
TIMES = (1, 3, 2, 1)  # of the least width, where that is more than those drawn

Propose: TypeAlias = (
    "Callable[[Subject, Sequence[str], Sequence[tuple[str, str]], int], dict[str, tuple[int, ...]]]"
)


def columns(
    subject: Subject,
    dims: Sequence[str],
    ratios: Sequence[tuple[str, str]],
    equal: Mapping[str, str],
    propose: Propose,
) -> dict[str, tuple[int, ...]]:
    """Values of every size, one for each model; the first of the proposed ones that all run."""
    return next(all_columns(subject, dims, ratios, equal, propose))


def all_columns(
    subject: Subject,
    dims: Sequence[str],
    ratios: Sequence[tuple[str, str]],
    equal: Mapping[str, str],
    propose: Propose,
) -> Iterator[dict[str, tuple[int, ...]]]:
    """All of the proposed ones that run, first those with the fewest sizes that are multiples of
    others in every model; raises InputError where none does."""
    why, some = "", False
    tries = [propose(subject, dims, ratios, turn) for turn in range(TRIES)]
    for found in sorted(tries, key=lambda one: multiples(one, ratios)):
        found |= {key: found[name] for key, name in equal.items()}
        why = trouble(subject, dims, ratios, found)
        if not why:
            some = True
            yield found
    if not some:
        raise InputError.one(f"no row for `{subject.kind}`: {why}", where="family")


def multiples(found: Mapping[str, tuple[int, ...]], ratios: Sequence[tuple[str, str]]) -> int:
    """How many pairs of sizes have one quotient in all models that are captured."""
    columns = [*found.values()]
    for large, small in ratios:
        pairs = zip(found[large], found[small], strict=True)
        columns.append(tuple(one // other for one, other in pairs))
    return sum(
        len({Fraction(a, b) for a, b in zip(one[:3], other[:3], strict=True)}) == 1
        for one, other in itertools.combinations(columns, 2)
    )


def drawing(turn: int) -> Callable[[Pool], tuple[int, ...]]:
    """Draws from pools: of each the `turn`th first, then the next ones."""
    taken: dict[Pool, int] = {}

    def drawn(pool: Pool) -> tuple[int, ...]:
        place = taken[pool] = taken.get(pool, turn - 1) + 1
        return pool[place % len(pool)]

    return drawn


def proposed(
    subject: Subject, dims: Sequence[str], ratios: Sequence[tuple[str, str]], turn: int
) -> dict[str, tuple[int, ...]]:
    """The `turn`th proposal: what divides others first, then what it divides, then the rest."""
    drawn = drawing(turn)
    found = {small: drawn(DIVIDING) for small in dict.fromkeys(small for _, small in ratios)}
    for large in dict.fromkeys(large for large, _ in ratios):
        smalls = [found[small] for one, small in ratios if one == large]
        often = 1 if turn < TRIES // 3 else 12  # other numbers may divide it, too
        steps = [8 * often * math.lcm(*some) for some in zip(*smalls, strict=True)]
        least = TIMES if turn >= 2 * TRIES // 3 else (1,) * COUNT
        found[large] = tuple(
            step * max(times, want // step)
            for step, want, times in zip(
                steps, scaled(subject, large, dims, drawn(WIDTHS)), least, strict=True
            )
        )
    for key in dims:
        if key not in found:
            pool = pool_of(subject, key)
            found[key] = scaled(subject, key, dims, drawn(pool))
            if subject.stacks and pool is SMALL and turn >= TRIES // 3:  # to be halved twice
                found[key] = tuple(4 * value for value in found[key])
    return found


def scaled(
    subject: Subject, key: str, dims: Sequence[str], values: Sequence[int]
) -> tuple[int, ...]:
    """Widths in the order in which the class's defaults are: some must be less than others."""
    if pool_of(subject, key) is not FREE:
        return tuple(values)
    own = subject.whole[key]
    widths = {subject.whole[one] for one in dims if pool_of(subject, one) is FREE}
    rank = sum(one < own for one in widths)
    return tuple((1 + rank) * value for value in values)


def pool_of(subject: Subject, key: str) -> Pool:
    """Values for a size that goes with no other one."""
    if key == subject.key("max_position_embeddings"):
        return PLACES
    if key == subject.key("vocab_size"):
        return TABLES
    return SMALL if subject.whole[key] < WIDE else FREE


def trouble(
    subject: Subject,
    dims: Sequence[str],
    ratios: Sequence[tuple[str, str]],
    found: Mapping[str, tuple[int, ...]],
) -> str:
    """Why these sizes do not do."""
    runs = []
    for place in range(COUNT):
        column = {key: values[place] for key, values in found.items()}
        for head, before in subject.before.items():
            after = seen(subject.config(**column), head)
            if isinstance(after, str):
                return after
            if change(before, after) == "code":
                return f"it runs other operations with {column}"
        runs.append({key: column[key] for key in dims})
        for large, small in ratios:
            each = f"{large}_per_{small}" if subject.stacks else f"{large}_each"
            runs[-1][each] = column[large] // column[small]
    try:
        Solver(runs[:3]).check()
    except Unsolved as bad:
        return str(bad)
    return ""


__all__ = ["WIDE", "all_columns", "columns", "proposed"]
