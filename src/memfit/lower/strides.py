"""Strides of views and results, by torch's rules. None stands for a contiguous tensor, the common
case.

Views, copies and the layout of results follow torch 2.13: aten/src/ATen/TensorUtils.cpp
computeStride, TensorIterator.cpp reorder_dimensions, ExpandUtils.cpp infer_dense_strides.
"""

from __future__ import annotations

from functools import lru_cache

Shape = tuple[int, ...]
Strides = tuple[int, ...] | None


@lru_cache(maxsize=4096)
def contiguous(shape: Shape) -> Shape:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def normal(shape: Shape, strides: Shape) -> Strides:
    """None where the strides are a contiguous tensor's; those of dimensions of size 1 say
    nothing."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != step:
                return strides
            step *= size
    return None


@lru_cache(maxsize=4096)
def dense(shape: Shape, strides: Shape) -> bool:
    """Every value has a place of its own and there are no gaps."""
    step = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1
    ):
        if stride != step:
            return False
        step *= size
    return True


@lru_cache(maxsize=4096)
def viewed(shape: Shape, strides: Strides, wanted: Shape) -> tuple[bool, Strides]:
    """Can a tensor be seen in another shape without a copy, and with which strides."""
    if strides is None:
        return True, None
    found: list[int] = []
    left = len(wanted) - 1
    base, numel, seen = strides[-1], 1, 1
    for dim in range(len(shape) - 1, -1, -1):
        numel *= shape[dim]
        if dim == 0 or (shape[dim - 1] != 1 and strides[dim - 1] != numel * base):
            while left >= 0 and (seen < numel or wanted[left] == 1):
                found.append(seen * base)
                seen *= wanted[left]
                left -= 1
            if seen != numel:
                return False, None
            if dim > 0:
                base, numel, seen = strides[dim - 1], 1, 1
    if left != -1:
        return False, None
    return True, normal(wanted, tuple(reversed(found)))


@lru_cache(maxsize=4096)
def broadcast(shape: Shape, strides: Strides, wanted: Shape) -> Shape:
    """Strides of an operand in the shape of the result: 0 where it is repeated."""
    own = contiguous(shape) if strides is None else strides
    lead = len(wanted) - len(shape)
    return (0,) * lead + tuple(
        0 if size == 1 and goal != 1 else stride
        for size, goal, stride in zip(shape, wanted[lead:], own, strict=True)
    )


@lru_cache(maxsize=4096)
def joined(shape: Shape, *operands: tuple[Shape, Strides]) -> Strides:
    """The layout of an element-by-element result: as all operands if they agree, else sorted by the
    first one that decides."""
    if all(strides is None for _, strides in operands):
        return None
    lying = [broadcast(own, strides, shape) for own, strides in operands]
    first = lying[0]
    if (
        all(own == shape for own, _ in operands)
        and all(one == first for one in lying)
        and dense(shape, first)
    ):
        return normal(shape, first)

    def before(a: int, b: int) -> int:
        """Is dimension a further inside than b."""
        for one in lying:
            if one[a] == 0 or one[b] == 0:
                continue
            if one[a] != one[b]:
                return -1 if one[a] < one[b] else 1
            if shape[a] > shape[b]:
                return 1
        return 0

    order = list(range(len(shape) - 1, -1, -1))  # innermost first
    for at in range(1, len(order)):
        place = at
        for other in range(at - 1, -1, -1):
            judged = before(order[other], order[place])
            if judged > 0:
                order[other], order[place] = order[place], order[other]
                place = other
            elif judged < 0:
                break
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= shape[dim]
    return normal(shape, tuple(strides))


def kept(shape: Shape, strides: Strides) -> Strides:
    """The layout of `empty_like`: the same if it is dense, else the same order without gaps."""
    if strides is None or dense(shape, strides):
        return strides
    return joined(shape, (shape, strides))


__all__ = [
    "Shape",
    "Strides",
    "broadcast",
    "contiguous",
    "dense",
    "joined",
    "kept",
    "normal",
    "viewed",
]
