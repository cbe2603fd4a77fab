"""A decoder layer: its blocks, its residual, and gradient checkpointing around it."""

from __future__ import annotations

from collections.abc import Callable

from memfit.lower import ops
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.mlp import bare
from memfit.lower.norms import norm
from memfit.lower.tensors import Tensor
from memfit.model.modules import MLP, Attention, Block, Latent, Layer, MoE


def forward(x: Tensor, layer: Layer, bound: Bound, ctx: Context) -> Tensor:
    before = len(ctx.results)
    try:
        if ctx.programs.layer is not None:
            return ctx.programs.layer(x, layer, bound, ctx)
        if layer.parallel:
            second = layer.blocks[-1].mixer
            return PARALLEL.get(second.style if isinstance(second, MLP) else "", side_by_side)(
                x, layer, bound, ctx
            )
        for block in layer.blocks:
            x = ctx.programs.orders[block.order](x, block, bound, ctx)
        return x
    finally:  # a recomputation may stop anywhere
        ctx.held.clear()
        ctx.open.clear()
        del ctx.results[:before]


def pre(x: Tensor, block: Block, bound: Bound, ctx: Context) -> Tensor:
    """x + mixer(norm(x))."""
    mixer = block.mixer
    if (
        isinstance(mixer, MLP) and not mixer.name and block.norm is not None
    ):  # the layer's own variable, overwritten step by step
        hidden = ctx.programs.mlps[mixer.style](norm(x, block.norm, bound, ctx), mixer, bound, ctx)
    else:
        hidden = x if block.norm is None else norm(x, block.norm, bound, ctx)
        hidden = mix(hidden, block, bound, ctx)
    if block.post_norm is not None:
        hidden = norm(hidden, block.post_norm, bound, ctx)
    ctx.r.where = bound.prefix
    if block.scaled:
        hidden = ops.scale(ctx.r, hidden)
    out = ops.add(ctx.r, x, hidden)
    ctx.open.clear()
    return out


def post(x: Tensor, block: Block, bound: Bound, ctx: Context) -> Tensor:
    """norm(x + mixer(x)) (modeling_opt.py OPTDecoderLayer of the 350M model)."""
    hidden = mix(x, block, bound, ctx)
    ctx.r.where = bound.prefix
    hidden = ops.add(ctx.r, x, hidden)
    return hidden if block.norm is None else norm(hidden, block.norm, bound, ctx)


def normed(x: Tensor, block: Block, bound: Bound, ctx: Context) -> Tensor:
    """norm(x) + mixer(norm(x)) (modeling_bloom.py BloomBlock,
    apply_residual_connection_post_layernorm)."""
    assert block.norm is not None
    hidden = norm(x, block.norm, bound, ctx)
    out = mix(hidden, block, bound, ctx)
    ctx.r.where = bound.prefix
    out = ops.add(ctx.r, hidden, out)
    ctx.open.clear()
    return out


# Attention + feed-forward first, then the residual (modeling_phi.py, modeling_gptj.py,
# modeling_gpt_neox.py); else residual + attention first.
RESIDUAL_LAST = {"codegen", "gpt_neox", "gptj", "phi"}


def side_by_side(x: Tensor, layer: Layer, bound: Bound, ctx: Context) -> Tensor:
    """Attention and feed-forward of the same input, added together (modeling_cohere.py
    CohereDecoderLayer)."""
    r = ctx.r
    first, second = layer.blocks
    assert first.norm is not None
    if second.norm is not None and second.norm != first.norm:
        attention = mix(norm(x, first.norm, bound, ctx), first, bound, ctx)
        other = mix(norm(x, second.norm, bound, ctx), second, bound, ctx)
    else:
        hidden = norm(x, first.norm, bound, ctx)
        attention = mix(hidden, first, bound, ctx)
        other = mix(hidden, second, bound, ctx)
    r.where = bound.prefix
    if isinstance(first.mixer, Attention) and first.mixer.style in RESIDUAL_LAST:
        return ops.add(r, ops.add(r, attention, other), x)
    return ops.add(r, ops.add(r, x, attention), other)


def in_one(x: Tensor, layer: Layer, bound: Bound, ctx: Context) -> Tensor:
    """Both norms first; attention is added into the feed-forward's result in place, and one dropout
    follows (modeling_falcon.py FalconDecoderLayer)."""
    r = ctx.r
    first, second = layer.blocks
    assert first.norm is not None
    assert second.norm is not None
    assert isinstance(second.mixer, MLP)
    hidden = norm(x, first.norm, bound, ctx)
    other = hidden if second.norm == first.norm else norm(x, second.norm, bound, ctx)
    attention = mix(hidden, first, bound, ctx)
    out = ops.add_in_place(r, bare(other, second.mixer, bound, ctx), attention)
    r.where = bound.prefix
    return ops.add(r, x, ops.dropout(r, out, ctx.dropout(second.mixer.dropout)))


def mix(x: Tensor, block: Block, bound: Bound, ctx: Context) -> Tensor:
    mixer = block.mixer
    x = ctx.matrices.block_input(x, ctx)
    if isinstance(mixer, (Attention, Latent)):
        return ctx.programs.attention[mixer.style](x, mixer, bound, ctx)
    if isinstance(mixer, MLP):
        return ctx.programs.mlps[mixer.style](x, mixer, bound, ctx)
    if isinstance(mixer, MoE):
        return ctx.programs.moes[mixer.style](x, mixer, bound, ctx)
    raise NotImplementedError(mixer)


ORDERS = {"pre": pre, "post": post, "normed": normed}
PARALLEL = {"falcon": in_one}  # by the style of the feed-forward


def choices() -> Callable[[str], bool]:
    """Selective checkpoints: results of attention and of products are kept, of matrix products
    every second one not (torchtitan distributed/activation_checkpoint.py SelectiveAC; transformers'
    `activation_checkpointing_kwargs` take such a policy as `context_fn`)."""
    products = 0

    def keeps(op: str) -> bool:
        nonlocal products
        products += op == "mm"
        return op != "mm" or products % 2 == 1

    return keeps
