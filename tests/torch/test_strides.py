"""Where values lie: views, copies and results of the formulas against torch's own, on random
layouts."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import pytest

from memfit.lower.strides import broadcast, joined, kept, normal, viewed

torch = pytest.importorskip("torch")
ROUNDS = 400


def laid_out(draw: random.Random, shape: tuple[int, ...]) -> Any:
    """A tensor of that shape in some order of dimensions, with gaps, some of them repeated."""
    order = draw.sample(range(len(shape)), len(shape))
    base = torch.empty([shape[dim] * draw.choice((1, 1, 2)) for dim in order], device="meta")
    tensor = base.permute([order.index(dim) for dim in range(len(shape))])
    for dim, size in enumerate(shape):
        tensor = tensor.narrow(dim, 0, size)
    if draw.random() < 0.3:
        dim = draw.randrange(len(shape))
        tensor = tensor.narrow(dim, 0, 1).expand(shape)
    return tensor


def lies(tensor: Any) -> tuple[int, ...]:
    """Strides, but for dimensions of one value, which say nothing."""
    return tuple(
        stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1
    )


def same(shape: tuple[int, ...], found: Any, tensor: Any) -> bool:
    full = broadcast(shape, found, shape)
    return tuple(stride for size, stride in zip(shape, full, strict=True) if size != 1) == lies(
        tensor
    )


@pytest.mark.parametrize("seed", range(4))
def test_layouts_are_torchs(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(ROUNDS):
        shape = tuple(draw.choice((1, 2, 3, 4)) for _ in range(draw.randint(2, 5)))
        first, second = laid_out(draw, shape), laid_out(draw, shape)
        own, other = (normal(shape, tuple(one.stride())) for one in (first, second))
        assert (own is None) == first.is_contiguous()
        assert same(shape, joined(shape, (shape, own), (shape, other)), first + second), (
            shape,
            first.stride(),
            second.stride(),
        )
        if 0 not in first.stride():
            assert same(shape, kept(shape, own), torch.empty_like(first)), (shape, first.stride())


@pytest.mark.parametrize("seed", range(4))
def test_views_exist_where_torch_has_them(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(ROUNDS):
        shape = tuple(draw.choice((1, 2, 3, 4)) for _ in range(draw.randint(2, 5)))
        tensor, left, wanted = laid_out(draw, shape), prod(shape), []
        while left > 1:
            wanted.append(draw.choice([size for size in range(2, left + 1) if left % size == 0]))
            left //= wanted[-1]
        goal = tuple(wanted) or (1,)
        possible, strides = viewed(shape, normal(shape, tuple(tensor.stride())), goal)
        try:
            real = tensor.view(goal)
        except RuntimeError:
            real = None
        assert possible == (real is not None), (shape, tensor.stride(), goal)
        assert real is None or same(goal, strides, real), (shape, tensor.stride(), goal)
