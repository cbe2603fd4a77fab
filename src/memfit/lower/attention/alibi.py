"""Attention with distances added to the scores, by no other kernel than this: BLOOM and MPT."""

from __future__ import annotations

from memfit.formats import BOOL, FP32, INT64
from memfit.lower import ops, views
from memfit.lower.activations import clamp
from memfit.lower.attention.kernels import mask_of, product, remembered
from memfit.lower.attention.written import dropped_later, masked, scaled, where
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.linears import linear
from memfit.lower.tensors import Tensor
from memfit.model.model import Model
from memfit.model.modules import Attention


def bloom(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """Scores by `baddbmm` onto the distances. Its variables hold the scores, plain and masked,
    until the residual is added (transformers 5.23 modeling_bloom.py BloomAttention)."""
    r, b, n, s, h = ctx.r, ctx.batch, module.heads, ctx.tokens, module.head
    fused = linear(x, bound.linear(module.project[0]), ctx)
    r.where = bound.path(module.name)
    fused = views.reshape(r, fused, b, s, n, 3, h)
    q, k, v = (views.transpose(r, views.select(r, fused, 3), 1, 2) for _ in range(3))
    k, v = remembered(k, v, module, bound, ctx)
    keys = k.shape[2]
    q = views.reshape(r, q, b * n, s, h)
    k = views.transpose(r, views.reshape(r, k, b * n, keys, h), 1, 2)
    v = views.reshape(r, v, b * n, keys, h)
    scores = onto_distances(q, k, ctx)
    weights = masked(views.reshape(r, scores, b, n, s, keys), mask_of(module, ctx), ctx)
    chances = ops.cast(r, ops.softmax(r, weights, FP32), q.format)
    chances = ops.dropout(r, chances, ctx.dropout(module.dropout))
    ctx.results.append(chances)
    out = views.merged(r, product(r, chances, views.reshape(r, v, b, n, keys, h), ctx))
    out = linear(out, bound.linear(module.out), ctx)
    r.where = bound.path(module.name)
    ctx.open += [q, k, v, scores, weights, out]
    return ops.dropout(r, out, ctx.dropout(module.out_dropout))


def onto_distances(q: Tensor, k: Tensor, ctx: Context) -> Tensor:
    """`alibi.baddbmm(q, k)`; autocast casts all three, at every call."""
    r, start = ctx.r, ctx.distances
    assert start is not None
    if ctx.autocast is not None:
        k, q, start = (ops.cast(r, one, ctx.autocast) for one in (k, q, start))
    return views.baddbmm(r, q, k)


def bloom_distances(module: Attention, model: Model, ctx: Context) -> None:
    """(B·N, 1, keys) in the hidden state's dtype (BloomModel.forward)."""
    r, keys = ctx.r, ctx.keys
    places = r.tensor((keys,), INT64, "arange")
    single = r.tensor((module.heads, 1, keys), FP32, "mul")
    del places
    ctx.distances = ops.cast(
        r, r.tensor((ctx.batch * module.heads, 1, keys), FP32, "repeat"), ctx.format
    )
    del single


@dropped_later
def mpt(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """fp32 distances make the scores fp32, whatever they were (transformers 5.23 modeling_mpt.py
    MptAttention)."""
    r = ctx.r
    fused = linear(x, bound.linear(module.project[0]), ctx)
    r.where = bound.path(module.name)
    if module.clipped:
        fused = clamp(r, fused)
    width = fused.shape[2] // 3
    q, k, v = (
        views.heads(r, one, module.heads) for one in views.split(r, fused, 2, width, width, width)
    )
    k, v = remembered(k, v, module, bound, ctx)
    mask = mask_of(module, ctx)
    assert ctx.distances is not None
    assert mask is not None
    scores = [ops.add(r, scaled(q, k, ctx), views.narrow(r, ctx.distances, 2, ctx.keys))]
    scores.append(where(r, scores.pop(), mask))
    chances = ops.cast(r, ops.softmax(r, ops.cast(r, scores[0], FP32), FP32), v.format)
    chances = ops.dropout(r, chances, ctx.dropout(module.dropout))
    ctx.held.append(chances)
    ctx.results.append(chances)
    out = linear(views.merged(r, product(r, chances, v, ctx)), bound.linear(module.out), ctx)
    ctx.held.append(out)
    return out


def mpt_distances(module: Attention, model: Model, ctx: Context) -> None:
    """(N, 1, longest sequence) in fp32, however short this one is; and the mask as truth values
    (MptModel.forward)."""
    r = ctx.r
    ctx.distances = r.tensor((module.heads, 1, model.positions), FP32, "mul")
    mask = ctx.masks[0]
    assert mask is not None
    ctx.masks[0] = ops.cast(r, mask, BOOL)
