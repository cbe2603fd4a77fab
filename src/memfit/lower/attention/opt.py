"""Attention of OPT, BioGPT and XGLM: the encoder-decoder layer of fairseq, three projections, no
rotation."""

from __future__ import annotations

from memfit.formats import BOOL, FP16, FP32
from memfit.lower import ops, views
from memfit.lower.attention.kernels import attend, mask_of, remembered
from memfit.lower.attention.written import dropped_later, masked, scaled, softmax, weighed
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.linears import linear
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.modules import Attention


@dropped_later
def opt(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """Queries are scaled first, on their own (transformers 5.23 modeling_opt.py OPTAttention)."""
    r = ctx.r
    q = ops.scale(r, linear(x, bound.linear(module.project[0]), ctx))
    k, v = (linear(x, bound.linear(one), ctx) for one in module.project[1:])
    r.where = bound.path(module.name)
    q, k, v = (views.heads(r, one, module.heads) for one in (q, k, v))
    k, v = remembered(k, v, module, bound, ctx)
    return projected(attend(q, k, v, module, ctx), module, bound, ctx)


@dropped_later
def biogpt(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """transformers 5.23 modeling_biogpt.py BioGptAttention."""
    r = ctx.r
    q, k, v = (
        views.heads(r, linear(x, bound.linear(one), ctx), module.heads) for one in module.project
    )
    k, v = remembered(k, v, module, bound, ctx)
    return projected(attend(q, k, v, module, ctx, unwidened), module, bound, ctx)


def projected(out: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    out = views.merged(ctx.r, out)
    return linear(out, bound.linear(module.out), ctx)


def unwidened(q: Tensor, k: Tensor, v: Tensor, module: Attention, ctx: Context) -> Tensor:
    """The softmax in the scores' own dtype, not cast back (modeling_biogpt.py
    eager_attention_forward)."""
    return weighed(
        softmax(masked(scaled(q, k, ctx), mask_of(module, ctx), ctx), ctx), v, module, ctx
    )


@dropped_later
def xglm(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """Heads and sequences as one batch, by no other kernel than this (transformers 5.23
    modeling_xglm.py XGLMAttention)."""
    r, b, n, s = ctx.r, ctx.batch, module.heads, ctx.tokens
    q = ops.scale(r, linear(x, bound.linear(module.project[0]), ctx))
    k, v = (linear(x, bound.linear(one), ctx) for one in module.project[1:])
    r.where = bound.path(module.name)
    k, v = (views.heads(r, one, n) for one in (k, v))
    k, v = remembered(k, v, module, bound, ctx)
    q, k, v = flat(r, views.heads(r, q, n)), flat(r, k), flat(r, v)
    keys, mask = k.shape[1], mask_of(module, ctx)
    assert mask is not None
    weights = softmax_of(
        views.reshape(
            r,
            raised(
                r,
                ops.add(
                    r,
                    views.reshape(r, batched(q, views.transpose(r, k, 1, 2), ctx), b, n, s, keys),
                    mask,
                ),
            ),
            b * n,
            s,
            keys,
        ),
        ctx,
    )
    ctx.held.append(weights)
    chances = ops.dropout(r, weights, ctx.dropout(module.dropout))
    return projected(
        views.reshape(r, batched(chances, v, ctx), b, n, s, module.head), module, bound, ctx
    )


def flat(r: Recorder, x: Tensor) -> Tensor:
    b, n, s, h = x.shape
    return views.reshape(r, x, b * n, s, h)


def batched(a: Tensor, b: Tensor, ctx: Context) -> Tensor:
    """`bmm`, in 16 bits under autocast."""
    if ctx.autocast is not None:
        b = ops.cast(ctx.r, b, ctx.autocast)  # the last argument first
        a = ops.cast(ctx.r, a, ctx.autocast)
    return views.bmm(ctx.r, a, b)


def softmax_of(weights: Tensor, ctx: Context) -> Tensor:
    """fp16 alone is cast up, and back."""
    if weights.format is FP16:
        return ops.cast(ctx.r, ops.softmax(ctx.r, weights, FP32), FP16)
    return softmax(weights, ctx)


def raised(r: Recorder, x: Tensor) -> Tensor:
    """`max(x, number)`; keeps what it compared."""
    number = r.tensor((1,), FP32, "full")
    return r.node("maximum", r.tensor(x.shape, x.format, "maximum"), (x,), back_raised, (x, number))


def back_raised(r: Recorder, node: Node, g: Tensor) -> Grads:
    """where(x = number, grad / 2, grad), and 0 where x is smaller (tools/autograd/derivatives.yaml
    maximum)."""
    x = node.saved[0]
    equal = r.tensor(x.shape, BOOL, "maximum")
    half = r.like(g, "maximum")
    out = r.like(g, "maximum")
    smaller = r.tensor(x.shape, BOOL, "maximum")
    del equal, half, smaller
    return (out,)
