"""Rotary positions on queries and keys."""

from __future__ import annotations

from memfit.lower import ops, views
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder, Tensor


def rotary(q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
    """q·cos + rotate_half(q)·sin, then the same for k; the callers still hold q and k."""
    return rotate(q, ctx), rotate(k, ctx)


def rotate(x: Tensor, ctx: Context) -> Tensor:
    r = ctx.r
    assert ctx.cos is not None
    assert ctx.sin is not None
    straight = ops.mul(r, x, ctx.cos)
    turned = ops.mul(r, half_turned(r, x), ctx.sin)
    return ops.add(r, straight, turned)


def half_turned(r: Recorder, x: Tensor) -> Tensor:
    """cat(−x₂, x₁): the cut views are gone before the product."""
    first, second = (views.narrow(r, x, 3, x.shape[3] // 2) for _ in range(2))
    return ops.cat(r, (ops.scale(r, second, "neg"), first), x.shape)
