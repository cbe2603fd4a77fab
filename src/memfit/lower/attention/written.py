"""Pieces of attention written out: scores, their mask, the softmax, and values by their weights.

Each statement of transformers' code rebinds one variable, so results are handed on here without
keeping them."""

from __future__ import annotations

from collections.abc import Callable

from memfit.formats import FP32
from memfit.lower import ops, views
from memfit.lower.attention.kernels import product
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.modules import Attention

Program = Callable[[Tensor, Attention, Bound, Context], Tensor]


def dropped_later(run: Program) -> Program:
    """The dropout behind attention is the layer's: it runs when attention's own variables are
    gone."""

    def program(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
        out = run(x, module, bound, ctx)
        ctx.r.where = bound.prefix
        return ops.dropout(ctx.r, out, ctx.dropout(module.out_dropout))

    return program


def scores(q: Tensor, k: Tensor, ctx: Context) -> Tensor:
    """q @ kᵀ; in 16 bits under autocast, whatever they are."""
    return product(ctx.r, q, views.transpose(ctx.r, k, 2, 3), ctx)


def scaled(q: Tensor, k: Tensor, ctx: Context) -> Tensor:
    return ops.scale(ctx.r, scores(q, k, ctx))


def masked(x: Tensor, mask: Tensor | None, ctx: Context) -> Tensor:
    return x if mask is None else ops.add(ctx.r, x, mask)


def softmax(x: Tensor, ctx: Context) -> Tensor:
    """In the scores' own dtype, but under autocast."""
    return ops.softmax(ctx.r, x, FP32 if ctx.autocast else x.format)


def weighed(
    weights: Tensor, v: Tensor, module: Attention, ctx: Context, *, returned: bool = False
) -> Tensor:
    """Values by their weights, which the layer keeps until it returns; or `returned`, its loop
    until the next one does."""
    weights = ops.dropout(ctx.r, weights, ctx.dropout(module.dropout))
    (ctx.results if returned else ctx.held).append(weights)
    return product(ctx.r, weights, v, ctx)


def where(r: Recorder, x: Tensor, chosen: Tensor) -> Tensor:
    """`where(chosen, x, number)`, or `masked_fill`: keeps the truth values."""
    return r.node("where", r.tensor(x.shape, x.format, "where"), (x,), back_where, (chosen,))


def back_where(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.like(g, "where"),)
