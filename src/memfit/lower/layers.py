"""A decoder layer: its blocks, its residual, and gradient checkpointing around it."""

from __future__ import annotations

from memfit.lower import ops
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.norms import norm
from memfit.lower.recorder import Tensor
from memfit.model.modules import MLP, Attention, Block, Layer, MoE


def forward(x: Tensor, layer: Layer, bound: Bound, ctx: Context) -> Tensor:
    try:
        for block in layer.blocks:
            x = ctx.programs.orders[block.order](x, block, bound, ctx)
        return x
    finally:  # a recomputation may stop anywhere
        ctx.held.clear()


def pre(x: Tensor, block: Block, bound: Bound, ctx: Context) -> Tensor:
    """x + mixer(norm(x))."""
    hidden = x if block.norm is None else norm(x, block.norm, bound, ctx)
    hidden = mix(hidden, block, bound, ctx)
    if block.post_norm is not None:
        hidden = norm(hidden, block.post_norm, bound, ctx)
    ctx.r.where = bound.prefix
    if block.scaled:
        hidden = ops.scale(ctx.r, hidden)
    return ops.add(ctx.r, x, hidden)


def mix(x: Tensor, block: Block, bound: Bound, ctx: Context) -> Tensor:
    mixer = block.mixer
    if isinstance(mixer, Attention):
        return ctx.programs.attention[mixer.style](x, mixer, bound, ctx)
    if isinstance(mixer, MLP):
        return ctx.programs.mlps[mixer.style](x, mixer, bound, ctx)
    if isinstance(mixer, MoE):
        return ctx.programs.moes[mixer.style](x, mixer, bound, ctx)
    raise NotImplementedError(mixer)


ORDERS = {"pre": pre}
