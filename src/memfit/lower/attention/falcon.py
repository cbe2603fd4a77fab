"""Attention of Falcon: heads in groups or one for all, rotated or with distances, never without a
mask."""

from __future__ import annotations

from memfit import kernels
from memfit.formats import BF16, BOOL, FP32, INT64
from memfit.lower import masks, ops, views
from memfit.lower.attention.kernels import (
    interface,
    mask_of,
    product,
    remembered,
    through_flash_attn,
)
from memfit.lower.attention.rotary import rotary
from memfit.lower.attention.sdpa import Call, sdpa
from memfit.lower.attention.written import dropped_later, scores
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.linears import linear
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.model import Model
from memfit.model.modules import Attention

Three = tuple[Tensor, Tensor, Tensor]


@dropped_later
def falcon(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """Rotated; nothing is dropped out of the scores (transformers 5.23 modeling_falcon.py
    FalconAttention)."""
    whole = linear(x, bound.linear(module.project[0]), ctx, apart=True)
    q, k, v = parts(whole, module, bound, ctx)
    q, k = rotary(q, k, ctx)
    k, v = remembered(k, v, module, bound, ctx)
    kind = interface(module, ctx)
    if kind == "eager":
        return projected(rotated_scores(q, k, v, x, module, ctx), x, module, bound, ctx)
    return projected(
        fused(q, k, v, module, ctx) if kind == "sdpa" else through_flash_attn(q, k, v, module, ctx),
        x,
        module,
        bound,
        ctx,
    )


@dropped_later
def falcon_alibi(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """With distances, which are in the mask already (the same class); the flash-attn package is
    refused there."""
    whole = linear(x, bound.linear(module.project[0]), ctx, apart=True)
    q, k, v = parts(whole, module, bound, ctx)
    k, v = remembered(k, v, module, bound, ctx)
    kept: list[Tensor] = []
    eager = interface(module, ctx) == "eager"
    out = projected(
        distant_scores(q, k, v, x, module, ctx, kept) if eager else fused(q, k, v, module, ctx),
        x,
        module,
        bound,
        ctx,
    )
    del kept
    return out


def projected(out: Tensor, x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """The output. Variables of the layer keep what went in and what came out."""
    out = views.merged(ctx.r, out)
    out = linear(out, bound.linear(module.out), ctx, apart=True)
    ctx.held += [x, out]
    return out


def parts(whole: Tensor, module: Attention, bound: Bound, ctx: Context) -> Three:
    """Queries, keys and values as (B, heads, S, H) of one projection
    (FalconAttention._split_heads)."""
    r, h = ctx.r, module.head
    r.where = bound.path(module.name)
    b, s, _ = whole.shape
    if module.expanded:
        q, k, v = of_groups(
            r,
            views.reshape(r, whole, b, s, module.kv_heads, module.heads // module.kv_heads + 2, h),
            module,
        )
    elif module.kv_heads == module.heads:
        whole = views.reshape(r, whole, b, s, module.heads, 3, h)
        q, k, v = (views.select(r, whole, 3) for _ in range(3))
    else:
        whole = views.reshape(r, whole, b, s, module.heads + 2, h)
        q, k, v = views.narrow(r, whole, 2, module.heads), picked(r, whole, 2), picked(r, whole, 2)
    q, k, v = (views.transpose(r, one, 1, 2) for one in (q, k, v))
    return q, k, v


def of_groups(r: Recorder, whole: Tensor, module: Attention) -> Three:
    """The last two of each group are its key and its value, repeated for its queries."""
    b, s, _, _, h = whole.shape
    q = views.narrow(r, whole, 3, module.heads // module.kv_heads)
    k, v = picked(r, whole, 3), picked(r, whole, 3)
    k, v = views.expand(r, k, *q.shape), views.expand(r, v, *q.shape)
    q, k, v = (views.reshape(r, one, b, s, module.heads, h) for one in (q, k, v))
    return q, k, v


def picked(r: Recorder, x: Tensor, dim: int) -> Tensor:
    """`x[:, :, [i]]`: an index, so a copy; its gradient is put into zeros."""
    shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    index = r.tensor((1,), INT64, "index")
    return r.node("index", r.tensor(shape, x.format, "index"), (x,), back_picked, (index,), x.shape)


def back_picked(r: Recorder, node: Node, g: Tensor) -> Grads:
    out = r.tensor(node.extra, g.format, "index_put")
    held = r.scratch(kernels.index_put_accumulate(1), "index_put")
    del held
    return (out,)


def fused(q: Tensor, k: Tensor, v: Tensor, module: Attention, ctx: Context) -> Tensor:
    """A single key/value head is broadcast, not told to be a group, and so there is no fused kernel
    for it."""
    mask = mask_of(module, ctx)
    call = Call(
        q=q,
        k=k,
        v=v,
        mask=mask,
        causal=mask is None and ctx.tokens > 1,
        dropout=ctx.dropout(module.dropout),
        groups=False,
    )
    return sdpa(call, ctx)


def rotated_scores(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor, module: Attention, ctx: Context
) -> Tensor:
    """Divided in place; the softmax in the dtype of the layer's input."""
    r, mask = ctx.r, mask_of(module, ctx)
    assert mask is not None
    divided = in_place(r, scores(q, k, ctx))
    weights = softmax_of(ops.add(r, divided, mask), x, ctx)
    del divided
    ctx.results.append(weights)
    return product(r, weights, v, ctx)


def in_place(r: Recorder, x: Tensor) -> Tensor:
    """`x /= number`, `x *= number`."""
    return r.node("scale", x.view(*x.shape), (x,), ops.back_like, extra=x.shape)


def softmax_of(weights: Tensor, x: Tensor, ctx: Context) -> Tensor:
    return ops.softmax(ctx.r, weights, x.format)


def distant_scores(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor, module: Attention, ctx: Context, kept: list[Tensor]
) -> Tensor:
    """In fp32, distances added and then scaled in place; the scores stay in variables until the
    layer is through with attention."""
    r, mask = ctx.r, mask_of(module, ctx)
    assert mask is not None
    assert ctx.distances is not None
    kept.append(scores(q, k, ctx))
    kept.append(ops.cast(r, kept[0], FP32))
    kept.append(in_place(r, ops.add(r, kept[1], ctx.distances)))
    weights = [softmax_of(ops.add(r, kept[2], mask), x, ctx)]
    weights.append(ops.dropout(r, weights.pop(), ctx.dropout(module.dropout)))
    ctx.results.append(weights[0])
    return product(r, weights[0], v, ctx)


def falcon_mask(module: Attention, model: Model, ctx: Context) -> None:
    """`allow_is_causal_skip=False`: SDPA is always given one, so it never takes flash attention
    (FalconModel.forward)."""
    if ctx.masks[0] is None and not ctx.job.attention.startswith("flash-attn"):
        keys = ctx.span(0)
        whole = masks.crossed(ctx, keys, False, not ctx.job.packing)
        ctx.masks[0] = views.expand(ctx.r, whole, ctx.batch, 1, ctx.tokens, keys)


def falcon_distances(module: Attention, model: Model, ctx: Context) -> None:
    """Made in bf16; then one mask of all heads takes them in (build_alibi_tensor,
    FalconModel.forward)."""
    r, heads = ctx.r, module.heads
    places = r.tensor((ctx.batch, ctx.keys), INT64, "cumsum")
    distances = ops.cast(r, r.tensor((ctx.batch, heads, ctx.keys), BF16, "mul"), ctx.format)
    ctx.distances = distances.view(ctx.batch, heads, 1, ctx.keys)
    del places, distances
    falcon_mask(module, model, ctx)
    before = ctx.masks[0]
    assert before is not None
    if before.format is BOOL:
        before = ctx.masks[0] = r.tensor((ctx.batch, 1, ctx.tokens, ctx.keys), ctx.format, "where")
    divided = r.like(ctx.distances, "div")
    small = r.tensor(before.shape, BOOL, "lt")
    del before
    ctx.masks[0] = r.tensor((ctx.batch, heads, ctx.tokens, ctx.keys), ctx.format, "masked_fill")
    del divided, small
