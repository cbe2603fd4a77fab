"""Routers: which experts a token goes to, and with what weight. Each returns (logits, weights,
places); the logits stay alive in the block that called it."""

from __future__ import annotations

from memfit.formats import FP32
from memfit.lower import ops as plain
from memfit.lower import views
from memfit.lower.activations import clamp
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.linears import linear
from memfit.lower.linears import plain as product
from memfit.lower.moe import ops
from memfit.lower.stacks import Replaced
from memfit.lower.tensors import Tensor
from memfit.model.modules import MoE

Routed = tuple[Tensor, Tensor, Tensor]


def parts(module: MoE, bound: Bound, ctx: Context) -> tuple[Tensor, Tensor | None]:
    """The router's weight and bias."""
    name = f"{module.name}.{module.router}"
    ctx.r.where = bound.path(name)
    return Replaced((f"{name}.weight",), bound, ctx)[f"{name}.weight"], bound.tensors.get(
        f"{name}.bias"
    )


def logits_of(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> Tensor:
    if module.gate is not None:
        return linear(x, bound.linear(module.gate), ctx)
    weight, bias = parts(module, bound, ctx)
    return product(x, weight, bias, module.experts, ctx)


def wide_logits_of(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> Tensor:
    """Input and weight cast to fp32 first (under autocast they are then cast down again)."""
    weight, _ = parts(module, bound, ctx)
    return product(
        plain.cast(ctx.r, x, FP32), plain.cast(ctx.r, weight, FP32), None, module.experts, ctx
    )


def plain_logits_of(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> Tensor:
    """In fp32, with autocast switched off around it."""
    if module.gate is None:
        weight, _ = parts(module, bound, ctx)
        wide = plain.cast(ctx.r, x, FP32)
        return plain.linear(ctx.r, wide, plain.cast(ctx.r, weight, FP32), None, module.experts)
    outside, ctx.autocast = ctx.autocast, None
    try:
        return linear(plain.cast(ctx.r, x, FP32), bound.linear(module.gate), ctx)
    finally:  # a recomputation may stop anywhere
        ctx.autocast = outside


def normed(weights: Tensor, ctx: Context) -> Tensor:
    """`weights /= weights.sum(-1)`."""
    return ops.divided(ctx.r, weights, ops.total(ctx.r, weights))


def mixtral(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> Routed:
    """Softmax in fp32, the best of it, divided by their sum (modeling_mixtral.py
    MixtralTopKRouter); before transformers 5 they were cast back (4.57 MixtralSparseMoeBlock)."""
    r = ctx.r
    logits = logits_of(x, module, bound, ctx)
    weights, places = ops.topk(r, plain.softmax(r, logits, FP32), module.active)
    weights = normed(weights, ctx)
    return logits, plain.cast(r, weights, x.format) if module.each else weights, places


def qwen2_moe(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> Routed:
    """As Mixtral; divided only where the config says so, and cast back (modeling_qwen2_moe.py
    Qwen2MoeTopKRouter)."""
    r = ctx.r
    logits = logits_of(x, module, bound, ctx)
    weights, places = ops.topk(r, plain.softmax(r, logits, FP32), module.active)
    if module.normed:
        weights = normed(weights, ctx)
    return logits, plain.cast(r, weights, logits.format), places


def granitemoe(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> Routed:
    """The best logits in fp32, then their softmax (modeling_granitemoe.py GraniteMoeTopKRouter)."""
    r = ctx.r
    logits = plain.cast(r, logits_of(x, module, bound, ctx), FP32)
    best, places = ops.topk(r, logits, module.active)
    return logits, plain.cast(r, plain.softmax(r, best, FP32), x.format), places


def gpt_oss(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> Routed:
    """The best logits, then their softmax in the same dtype (modeling_gpt_oss.py
    GptOssTopKRouter)."""
    r = ctx.r
    logits = logits_of(x, module, bound, ctx)
    best, places = ops.topk(r, logits, module.active)
    return logits, plain.softmax(r, best, best.format), places


def minimax_m2(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> Routed:
    """Sigmoids chosen with a bias beside them (modeling_minimax_m2.py MiniMaxM2TopKRouter)."""
    r = ctx.r
    logits = logits_of(x, module, bound, ctx)
    scores = plain.activation(r, plain.cast(r, logits, FP32), "sigmoid")
    choice = plain.add(r, scores, bound[f"{module.name}.e_score_correction_bias"])
    places = ops.topk(r, choice, module.active)[1]
    weights = normed(ops.gather(r, scores, places), ctx)
    return logits, weights, places


def deepseek_v3(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> Routed:
    """Sigmoids in fp32; the best two of each group decide which groups are open
    (modeling_deepseek_v3.py DeepseekV3TopkRouter)."""
    r, tokens = ctx.r, x.shape[0]
    logits = wide_logits_of(x, module, bound, ctx)
    scores = plain.activation(r, logits, "sigmoid")
    choice = plain.add(r, scores, bound[f"{module.name}.{module.router}.e_score_correction_bias"])
    size = module.experts // module.groups
    best = ops.topk(r, views.reshape(r, choice, tokens, module.groups, size), 2)[0]
    group_scores = ops.total(r, best, kept=False)
    del best
    closed, held = closed_experts(group_scores, module, ctx)
    choice = ops.masked(r, choice, closed)
    del closed
    places = ops.topk(r, choice, module.active)[1]
    weights = ops.gather(r, scores, places)
    if module.normed:
        denominator = plain.add_scalar(r, ops.total(r, weights))
        weights = ops.divided(r, weights, denominator)
    weights = plain.scale(r, weights)
    del held
    return logits, weights, places


def closed_experts(
    group_scores: Tensor, module: MoE, ctx: Context
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The mask of experts in groups that are not open, and what the router holds of its making
    until it returns."""
    r, tokens = ctx.r, group_scores.shape[0]
    group_places = ops.topk(r, group_scores, module.open_groups)[1]
    group_mask = r.like(group_scores, "zeros_like")
    score_mask = (
        group_mask
        if module.groups == 1
        else r.tensor((tokens, module.experts), group_mask.format, "contiguous")
    )
    open_ = ops.flags(r, (tokens, module.experts), "to")
    closed = r.like(open_, "bitwise_not")
    return closed, (group_scores, group_places, group_mask, score_mask)


def deepseek_v2(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> Routed:
    """Softmax in fp32, the best of all or of the best groups (modeling_deepseek_v2.py
    DeepseekV2TopkRouter)."""
    r, tokens = ctx.r, x.shape[0]
    logits = wide_logits_of(x, module, bound, ctx)
    scores = plain.softmax(r, logits, FP32)
    held: tuple[Tensor, ...] = ()
    if module.groups:
        apart = views.reshape(r, scores, tokens, module.groups, module.experts // module.groups)
        closed, held = closed_experts(ops.largest(r, apart)[0], module, ctx)
        del apart
        scores = ops.masked(r, scores, closed)
        del closed
    weights, places = ops.topk(r, scores, module.active)
    weights = plain.scale(r, weights)
    del held
    return logits, weights, places


def ernie4_5_moe(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> Routed:
    """In fp32 outside autocast; chosen with a bias beside the softmax (modeling_ernie4_5_moe.py
    Ernie4_5_MoeTopKRouter)."""
    r = ctx.r
    logits = plain_logits_of(x, module, bound, ctx)
    weights = plain.softmax(r, logits, FP32)
    corrected = plain.add(
        r,
        weights,
        bound[f"{module.name}.{module.router}.moe_statics.e_score_correction_bias"].view(
            module.experts
        ),
    )
    places = ops.topk(r, corrected, module.active)[1]
    del corrected
    weights = ops.gather(r, weights, places)
    weights = ops.ratio(r, weights, clamp(r, ops.total(r, weights), 1))
    return logits, plain.cast(r, weights, x.format), places
