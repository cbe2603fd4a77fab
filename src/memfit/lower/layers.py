"""A decoder layer: its blocks, its residual, and gradient checkpointing around it."""

from __future__ import annotations

from collections.abc import Callable

from memfit.lower import ops
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.lifetimes import Scope, Value, itself, scoped
from memfit.lower.mlp import bare
from memfit.lower.norms import norm
from memfit.model.modules import MLP, Attention, Block, Latent, Layer, MoE


@scoped
def forward(own: Scope, x: Value, layer: Layer, bound: Bound, ctx: Context) -> Value:
    before = len(ctx.results)
    try:
        if ctx.programs.layer is not None:
            return own(ctx.programs.layer, x, layer, bound, ctx)
        if layer.parallel:
            second = layer.blocks[-1].mixer
            style = second.style if isinstance(second, MLP) else ""
            return own(PARALLEL.get(style, side_by_side), x, layer, bound, ctx)
        for block in layer.blocks:
            own.assign(x, ctx.programs.orders[block.order], x, block, bound, ctx)
        return x
    finally:  # a recomputation may stop anywhere
        ctx.held.clear()
        ctx.open.clear()
        del ctx.results[:before]


@scoped
def pre(own: Scope, x: Value, block: Block, bound: Bound, ctx: Context) -> Value:
    """x + mixer(norm(x))."""
    mixer = block.mixer
    hidden = own(itself, x) if block.norm is None else own(norm, x, block.norm, bound, ctx)
    if isinstance(mixer, MLP) and not mixer.name and block.norm is not None:
        # the layer's own variable, overwritten step by step
        own.assign(hidden, ctx.programs.mlps[mixer.style], hidden.last, mixer, bound, ctx)
    else:
        own.assign(hidden, mix, hidden, block, bound, ctx)
    if block.post_norm is not None:
        own.assign(hidden, norm, hidden, block.post_norm, bound, ctx)
    ctx.r.where = bound.prefix
    if block.scaled:
        own.assign(hidden, ops.scale, ctx.r, hidden)
    out = own(ops.add, ctx.r, x, hidden)
    ctx.open.clear()
    return out


@scoped
def post(own: Scope, x: Value, block: Block, bound: Bound, ctx: Context) -> Value:
    """norm(x + mixer(x)) (modeling_opt.py OPTDecoderLayer of the 350M model)."""
    hidden = own(mix, x, block, bound, ctx)
    ctx.r.where = bound.prefix
    own.assign(hidden, ops.add, ctx.r, x, hidden)
    return hidden if block.norm is None else own(norm, hidden, block.norm, bound, ctx)


@scoped
def normed(own: Scope, x: Value, block: Block, bound: Bound, ctx: Context) -> Value:
    """norm(x) + mixer(norm(x)) (modeling_bloom.py BloomBlock,
    apply_residual_connection_post_layernorm)."""
    assert block.norm is not None
    hidden = own(norm, x, block.norm, bound, ctx)
    out = own(mix, hidden, block, bound, ctx)
    ctx.r.where = bound.prefix
    own.assign(out, ops.add, ctx.r, hidden, out)
    ctx.open.clear()
    return out


# Attention + feed-forward first, then the residual (modeling_phi.py, modeling_gptj.py,
# modeling_gpt_neox.py); else residual + attention first.
RESIDUAL_LAST = {"codegen", "gpt_neox", "gptj", "phi"}


@scoped
def side_by_side(own: Scope, x: Value, layer: Layer, bound: Bound, ctx: Context) -> Value:
    """Attention and feed-forward of the same input, added together (modeling_cohere.py
    CohereDecoderLayer)."""
    r = ctx.r
    first, second = layer.blocks
    assert first.norm is not None
    attention, other = own.empty(), own.empty()
    hidden = own(norm, x, first.norm, bound, ctx)
    if second.norm is not None and second.norm != first.norm:
        own.assign(attention, mix, hidden.last, first, bound, ctx)
        hidden = own(norm, x, second.norm, bound, ctx)
        own.assign(other, mix, hidden.last, second, bound, ctx)
    else:
        own.assign(attention, mix, hidden, first, bound, ctx)
        own.assign(other, mix, hidden, second, bound, ctx)
    r.where = bound.prefix
    if isinstance(first.mixer, Attention) and first.mixer.style in RESIDUAL_LAST:
        both = own(ops.add, r, attention, other)
        return own(ops.add, r, both.last, x)
    both = own(ops.add, r, x, attention)
    return own(ops.add, r, both.last, other)


@scoped
def in_one(own: Scope, x: Value, layer: Layer, bound: Bound, ctx: Context) -> Value:
    """Both norms first; attention is added into the feed-forward's result in place, and one dropout
    follows (modeling_falcon.py FalconDecoderLayer)."""
    r = ctx.r
    first, second = layer.blocks
    assert first.norm is not None
    assert second.norm is not None
    assert isinstance(second.mixer, MLP)
    hidden = own(norm, x, first.norm, bound, ctx)
    alike = second.norm == first.norm
    other = own(itself, hidden) if alike else own(norm, x, second.norm, bound, ctx)
    attention = own(mix, hidden, first, bound, ctx)
    lowered = own(bare, other, second.mixer, bound, ctx)
    out = own(ops.add_in_place, r, lowered.last, attention)
    r.where = bound.prefix
    dropped = own(ops.dropout, r, out, ctx.dropout(second.mixer.dropout))
    return own(ops.add, r, x, dropped.last)


@scoped
def mix(own: Scope, x: Value, block: Block, bound: Bound, ctx: Context) -> Value:
    mixer = block.mixer
    own.assign(x, ctx.matrices.block_input, x, ctx)
    if isinstance(mixer, (Attention, Latent)):
        return own(ctx.programs.attention[mixer.style], x, mixer, bound, ctx)
    if isinstance(mixer, MLP):
        return own(ctx.programs.mlps[mixer.style], x, mixer, bound, ctx)
    if isinstance(mixer, MoE):
        return own(ctx.programs.moes[mixer.style], x, mixer, bound, ctx)
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
