"""Attention whose scores are changed before the softmax: Gemma 2 caps them, gpt-oss adds a sink to
each row. Fused kernels of torch cannot do that, so transformers 5.23 writes the scores out, or
leaves them to flash-attn."""

from __future__ import annotations

from functools import partial

from memfit.formats import FP32
from memfit.lower import ops, views
from memfit.lower.attention import llama, rotary
from memfit.lower.attention.kernels import by_tokens, mask_of, product, repeated
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.moe.ops import largest
from memfit.lower.tensors import Tensor
from memfit.model.modules import Attention


def gemma2(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    return llama.run(x, module, bound, ctx, prepare=llama.straight, eager=capped)


def gpt_oss(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    sinks = bound[f"{module.name}.sinks"]
    return llama.run(
        x,
        module,
        bound,
        ctx,
        prepare=partial(llama.straight, turn=rotary.gpt_oss),
        eager=partial(with_sinks, sinks=sinks),
    )


def capped(q: Tensor, k: Tensor, v: Tensor, module: Attention, ctx: Context) -> Tensor:
    """c · tanh(scores / c) where there is a cap (modeling_gemma2.py eager_attention_forward)."""
    r = ctx.r
    result = q.format
    keys, values = repeated(r, k, module), repeated(r, v, module)
    weights = ops.scale(r, product(r, q, views.transpose(r, keys, 2, 3), ctx))
    if module.softcap:
        weights = ops.scale(r, weights)
        weights = ops.activation(r, weights, "tanh")
        weights = ops.scale(r, weights)
    mask = mask_of(module, ctx)
    if mask is not None:
        weights = ops.add(r, weights, mask)
    weights = ops.cast(r, ops.softmax(r, weights, FP32), result)
    weights = ops.dropout(r, weights, ctx.dropout(module.dropout))
    ctx.held.append(weights)
    return by_tokens(r, product(r, weights, values, ctx))


def with_sinks(
    q: Tensor, k: Tensor, v: Tensor, module: Attention, ctx: Context, *, sinks: Tensor
) -> Tensor:
    """A column of sinks beside the scores, the row's largest taken off, softmax in the scores' own
    dtype; the column is cut off again (modeling_gpt_oss.py eager_attention_forward)."""
    r = ctx.r
    batch, heads, tokens, _ = q.shape
    keys, values = repeated(r, k, module), repeated(r, v, module)
    weights = ops.scale(r, product(r, q, views.transpose(r, keys, 2, 3), ctx))
    mask = mask_of(module, ctx)
    if mask is not None:
        weights = ops.add(r, weights, mask)
    column = views.expand(r, views.reshape(r, sinks, 1, heads, 1, 1), batch, heads, tokens, 1)
    logits = ops.cat(r, (weights, column), (batch, heads, tokens, weights.shape[-1] + 1))
    logits = ops.sub(r, logits, largest(r, logits, kept=True)[0])
    probabilities = ops.softmax(r, logits, logits.format)
    scores = views.narrow(r, probabilities, 3, weights.shape[-1])
    weights = ops.cast(r, ops.dropout(r, scores, ctx.dropout(module.dropout)), v.format)
    ctx.held.append(weights)
    return by_tokens(r, product(r, weights, values, ctx))
