"""A decoder layer: its blocks, its residual, and gradient checkpointing around it."""

from __future__ import annotations

from memfit.lower import ops
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.norms import norm
from memfit.lower.recorder import Tensor
from memfit.model.modules import MLP, Attention, Block, Latent, Layer, MoE


def forward(x: Tensor, layer: Layer, bound: Bound, ctx: Context) -> Tensor:
    try:
        if layer.parallel:
            return side_by_side(x, layer, bound, ctx)
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


RESIDUAL_LAST = {"phi"}  # attention + feed-forward first, then the residual (modeling_phi.py); else residual + attention first


def side_by_side(x: Tensor, layer: Layer, bound: Bound, ctx: Context) -> Tensor:
    """Attention and feed-forward of the same input, added together (modeling_cohere.py CohereDecoderLayer)."""
    r = ctx.r
    first, second = layer.blocks
    assert first.norm is not None
    hidden = norm(x, first.norm, bound, ctx)
    attention = mix(hidden, first, bound, ctx)
    other = mix(hidden if second.norm == first.norm else norm(x, second.norm or first.norm, bound, ctx), second, bound, ctx)
    r.where = bound.prefix
    if isinstance(first.mixer, Attention) and first.mixer.style in RESIDUAL_LAST:
        return ops.add(r, ops.add(r, attention, other), x)
    return ops.add(r, ops.add(r, x, attention), other)


def mix(x: Tensor, block: Block, bound: Bound, ctx: Context) -> Tensor:
    mixer = block.mixer
    if isinstance(mixer, (Attention, Latent)):
        return ctx.programs.attention[mixer.style](x, mixer, bound, ctx)
    if isinstance(mixer, MLP):
        return ctx.programs.mlps[mixer.style](x, mixer, bound, ctx)
    if isinstance(mixer, MoE):
        return ctx.programs.moes[mixer.style](x, mixer, bound, ctx)
    raise NotImplementedError(mixer)


ORDERS = {"pre": pre}
