"""Sizes of the small decoders that a family is captured with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from memfit.trace.family_sizes import TRIES, Pool, drawing

if TYPE_CHECKING:
    from memfit.trace.new_family import Subject

WIDE = 64  # from here on a size is a width
DIVIDING = (2, 5, 7, 3), (3, 2, 5, 4), (5, 3, 2, 4), (2, 6, 4, 8)
TIMES = (3, 2, 2, 5), (2, 4, 3, 2)
EACH = (2, 3, 1, 2), (3, 1, 2, 1)
WIDTHS = (96, 240, 336, 192), (240, 160, 392, 288), (160, 280, 224, 320)
HEADS = (40, 88, 56, 72), (48, 32, 104, 64), (24, 72, 32, 48), (56, 40, 48, 96)
FREE = (
    (200, 312, 184, 264),
    (72, 136, 232, 168),
    (120, 264, 344, 88),
    (248, 104, 328, 152),
    (88, 152, 112, 216),
)
CAPS = (31, 47, 61, 37), (43, 29, 53, 41)  # of what sequences are longer than
TABLES = (544, 608, 736, 672), (1040, 912, 1168, 976)
BOUNDED = (1, 3, 5, 2), (2, 2, 3, 1)  # or less, where something else has to be more
FEWEST = (5, 3, 4, 2), (1, 2, 3, 2), (13, 11, 9, 12), (17, 23, 14, 19), (26, 29, 22, 31)


def proposed(
    subject: Subject,
    dims: Sequence[str],
    ratios: Sequence[tuple[str, str]],
    turn: int,
    caps: Sequence[str] = (),
) -> dict[str, tuple[int, ...]]:
    """The `turn`th proposal: what divides others first, then what it divides, then the rest. `caps`
    are less than any sequence. Some heads must not be wider than others: later proposals have them
    in the order of the class's defaults."""
    drawn = drawing(turn)
    found: dict[str, tuple[int, ...]] = dict(zip(caps, CAPS, strict=False))
    larger = {large for large, _ in ratios}
    for small in dict.fromkeys(small for _, small in ratios if small not in larger):
        found[small] = drawn(DIVIDING)
    waiting = list(dict.fromkeys(large for large, _ in ratios))
    while waiting:
        large = next(one for one in waiting if all(s in found for b, s in ratios if b == one))
        waiting.remove(large)
        found[large] = multiple(subject, large, ratios, found, drawn)
    few = sorted(
        (one for one in dims if one not in found and subject.whole[one] < WIDE),
        key=lambda one: subject.whole[one],
    )
    for key in dims:
        if key not in found and key not in few:
            found[key] = unlike(found, drawn(pool_of(subject, key)), 16)
    larger_counts = turn >= TRIES // 3  # some must not be less than others, or than a fixed one
    for place, key in enumerate(few, 1 if larger_counts else 0):
        bound = bound_of(subject, key, found) if larger_counts else None
        if "head_dim" in key:
            found[key] = unlike(found, drawn(HEADS), 16)
        elif bound is not None:
            found[key] = tuple(map(min, bound, drawn(BOUNDED)))
        elif subject.whole[key] == 1:
            found[key] = FEWEST[1]
        else:
            found[key] = unlike(found, FEWEST[(0, 2, 3, 4)[min(place, 3)]], 2)
    return {**found, **in_order(subject, found)} if larger_counts else found


def unlike(
    found: Mapping[str, tuple[int, ...]], values: tuple[int, ...], step: int
) -> tuple[int, ...]:
    """These values, or larger ones that no other size has."""
    while values in found.values():
        values = tuple(one + step for one in values)
    return values


def in_order(subject: Subject, found: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The sizes of heads, in each model in the order of the class's defaults."""
    names = sorted((key for key in found if "head_dim" in key), key=subject.whole.__getitem__)
    models = [sorted(some) for some in zip(*(found[key] for key in names), strict=True)]
    return dict(zip(names, zip(*models, strict=True), strict=True))


def bound_of(
    subject: Subject, key: str, found: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...] | None:
    """The values of a small number that this one must not exceed: one more fails, but where there
    are as many of the other."""
    value = subject.whole[key]
    for name in found:
        most = subject.whole[name]
        if not value <= most < WIDE or subject.changed(**{key: most + 1}) != "fails":
            continue
        if subject.changed(**{key: most + 1, name: 2 * most}) != "fails":
            return found[name]
    return None


def multiple(
    subject: Subject,
    large: str,
    ratios: Sequence[tuple[str, str]],
    found: Mapping[str, tuple[int, ...]],
    drawn: Callable[[Pool], tuple[int, ...]],
) -> tuple[int, ...]:
    """A size that everything divides which has to; widths are multiples of 8 for each head."""
    smalls = [found[small] for one, small in ratios if one == large]
    steps = [math.lcm(*some) for some in zip(*smalls, strict=True)]
    divides = any(small == large for _, small in ratios)
    if divides or large == subject.key("num_attention_heads"):
        return tuple(step * times for step, times in zip(steps, drawn(TIMES), strict=True))
    return tuple(8 * step * times for step, times in zip(steps, drawn(EACH), strict=True))


def pool_of(subject: Subject, key: str) -> Pool:
    """Values for a size that goes with no other one."""
    if key == subject.key("vocab_size"):
        return TABLES
    if key == subject.key("hidden_size"):
        return WIDTHS
    return HEADS if "head_dim" in key else FREE


__all__ = ["proposed"]
