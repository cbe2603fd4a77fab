"""From the last layer to the loss: final norm, head, cross-entropy as each version computes it."""

from __future__ import annotations

from memfit.formats import FP32
from memfit.lower import ops, views
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.engine import TAIL
from memfit.lower.lifetimes import Scope, Value, scoped
from memfit.lower.linears import linear
from memfit.lower.norms import norm
from memfit.lower.tensors import Tensor
from memfit.model.model import Model
from memfit.model.modules import Captured, Linear, Norm
from memfit.tape import Alloc, Part

# The torch from which `x[..., :-1, :]` makes no slice of the last dimension, all of which it takes
# (ATen/TensorIndexing.h applySlice: `length == stop` in 2.8.0, where `:` stops at 2**63 - 1;
# `length <= stop` in 2.9.1).
SKIPS_WHOLE = (2, 9)


@scoped
def final(own: Scope, x: Value, model: Model, bound: Bound, ctx: Context) -> Value:
    for module in model.final:
        if isinstance(module, Norm):
            own.assign(x, norm, x, module, bound, ctx)
        elif isinstance(module, Linear):
            own.assign(x, linear, x, bound.linear(module), ctx)
        elif isinstance(module, Captured):
            from memfit.lower import captured

            own.assign(x, captured.final, x, module, bound, ctx)
    return x


@scoped
def logits(
    own: Scope, x: Value, model: Model, bound: Bound, ctx: Context, *, capped: bool = True
) -> Value:
    """Called logits by their width: what the head casts or unpacks to make them is not."""
    r = ctx.r
    first = len(r.events)
    with r.hooked(None if r.hooks is not None and r.hooks.spares else r.hooks):
        out = own(linear, x, bound.linear(model.head), ctx)
    for index in range(first, len(r.events)):
        event = r.events[index]
        if type(event) is Alloc and event.part == "activations" and event.formula[:-1] == out.shape:
            r.events[index] = event._replace(part="logits")
    r.where = ""
    part, r.part = r.part, "logits"
    if model.softcap and capped:  # c · tanh(logits / c) (modeling_gemma2.py Gemma2ForCausalLM)
        scaled = own(ops.scale, r, out)
        curve = own(ops.activation, r, scaled.last, "tanh")
        own.assign(out, ops.scale, r, curve.last)
    if model.logit_scale:
        own.assign(out, ops.scale, r, out)
    r.part = part
    return own(ctx.engine.after, TAIL, out)


@scoped
def loss(own: Scope, scores: Value, labels: Value, model: Model, ctx: Context) -> Value:
    """fp32 logits, labels padded and shifted, cross-entropy (transformers 5.23 loss/loss_utils.py
    ForCausalLMLoss)."""
    r = ctx.r
    part, r.part = r.part, "logits"
    wide = own(ops.cast, r, scores, FP32)
    padded, shifted = own.several(targets, labels, ctx, "activations")
    rows = own(Tensor.view, wide, ctx.batch * ctx.tokens, wide.shape[-1])
    out = own(ctx.matrices.cross_entropy, ctx, rows.last, shifted)
    own.drop(padded)  # the function's variable
    r.part = part
    return out


def targets(labels: Tensor, ctx: Context, part: Part = "logits") -> tuple[Tensor, Tensor]:
    """Labels padded, and shifted, unless they come so."""
    if ctx.shifted:
        return labels, labels
    padded = ops.integers(ctx.r, (ctx.batch, ctx.tokens + 1), "pad", part)
    return padded, ops.integers(
        ctx.r, (ctx.batch, ctx.tokens), "contiguous", part
    ) if ctx.batch > 1 else padded


def all_but_last(scores: Tensor, ctx: Context) -> Tensor:
    """`scores[..., :-1, :].contiguous()`: a copy unless there is one sequence. Each slice fills a
    tensor as large as what it was cut from in the backward."""
    r = ctx.r
    rows = whole(ops.cut(r, scores, (ctx.batch, ctx.tokens - 1, scores.shape[-1])), ctx)
    return ops.clone(r, rows, "contiguous") if ctx.batch > 1 else rows


def whole(rows: Tensor, ctx: Context) -> Tensor:
    """The colon over all words in `scores[..., :-1, :]`, which is a slice in older versions."""
    return views.colon(ctx.r, rows) if ctx.torch < SKIPS_WHOLE else rows
