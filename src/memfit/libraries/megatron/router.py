"""Megatron's router: scores, the choice of experts, dropping, and the loss that balances them
(megatron-core 0.16.1 transformer/moe/router.py, moe_utils.py; without `--moe-router-fusion`). Its
tables have a row a token and a column an expert.

The recipe is the family's: softmax before the choice (DeepSeek-V2) or after it (Mixtral, Qwen), or
sigmoid steered by a bias (DeepSeek-V3). Left out: sums of a number an expert, and the noise of
`--moe-input-jitter-eps`.
"""

from __future__ import annotations

from memfit.formats import BOOL, FP32, INT32, INT64
from memfit.lower import ops
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.moe import ops as plain
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.modules import MoE
from memfit.strategy import EP


def settings(ctx: Context) -> EP:
    return ctx.program.strategy.ep or EP(size=1)


def routed(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> tuple[Tensor, Tensor]:
    """(weight of each expert for each token, zero where it was not chosen; which were chosen)."""
    r, ep, name = ctx.r, settings(ctx), f"{module.name}.{module.router}"
    r.where = bound.path(name)
    scores = gating(x, bound[f"{name}.weight"], ctx)
    weights, chosen = top(r, scores, module)
    if ep.capacity:
        weights, chosen = dropped(
            r, weights, chosen, capacity(scores.shape[0], module, ep), ep.padded
        )
    if ep.aux_loss and ctx.training and r.grad:
        weights = balanced(r, weights, scores, module)
    return weights, chosen


def capacity(tokens: int, module: MoE, ep: EP) -> int:
    """Rows of each expert from one rank (moe_utils.py get_capacity)."""
    return -(-int(tokens * module.active * ep.capacity) // module.experts)


def gating(x: Tensor, weight: Tensor, ctx: Context) -> Tensor:
    """One product of TE's, in 16 bits or with an fp32 result; keeps its input
    (RouterGatingLinearFunction)."""
    r = ctx.r
    format = FP32 if settings(ctx).router_dtype == "fp32" else x.format
    out = r.tensor((x.count // x.shape[-1], weight.shape[0]), format, "router")
    flops = 2 * x.count * weight.shape[0]
    r.compute("te_linear", flops, (x.count + out.count) * x.format.block_bytes, x.format.math)
    return r.node("router", out, (x, weight), back_gating, (x, weight), (x.shape, x.format, flops))


def back_gating(r: Recorder, node: Node, g: Tensor) -> Grads:
    """Operands are cast where the scores are fp32; the matrix's gradient is a tensor of its own."""
    x, weight = node.saved
    shape, format, flops = node.extra
    wide = r.tensor(weight.shape, g.format, "to") if g.format is not weight.format else None
    to_x = r.tensor(shape, g.format, "router")
    copy = r.tensor(x.shape, g.format, "to") if g.format is not x.format else None
    to_weight = r.tensor(weight.shape, g.format, "router")
    del wide, copy
    for _ in range(2):
        r.compute("te_linear", flops, x.count * format.block_bytes, format.math)
    if format is not g.format:
        to_x = r.tensor(shape, format, "to")
        to_weight = r.tensor(weight.shape, weight.format, "to")
    return to_x, to_weight


# -------------------------------------------------------------------------------------- the choice
def top(r: Recorder, logits: Tensor, module: MoE) -> tuple[Tensor, Tensor]:
    """topk_routing_with_score_function."""
    tokens, format = logits.shape[0], logits.format
    scores = logits
    if module.correction_bias:
        scores = ops.cast(r, ops.activation(r, ops.cast(r, logits, FP32), "sigmoid"), format)
        steered = r.tensor(logits.shape, FP32, "add")
        _, places = best(r, steered.detach(), module)
        del steered
        chosen = plain.gather(r, scores, places)
        chosen = plain.ratio(r, chosen, ops.add_scalar(r, plain.total(r, chosen)))
    elif module.groups or module.style == "deepseek_v2":
        scores = ops.cast(r, ops.softmax(r, logits, FP32), format)
        chosen, places = best(r, scores, module)
    else:
        chosen, places = best(r, scores, module)
        chosen = ops.cast(r, ops.softmax(r, chosen, FP32), format)
    if module.style.startswith("deepseek"):
        chosen = ops.scale(r, chosen)
    del scores
    zeros = r.like(logits.detach(), "zeros")
    weights = r.node(
        "scatter",
        r.tensor((tokens, module.experts), format, "scatter"),
        (chosen,),
        back_scatter,
        (places,),
        chosen.shape,
    )
    del zeros
    return weights, chart(r, logits, places)


def best(r: Recorder, scores: Tensor, module: MoE) -> tuple[Tensor, Tensor]:
    """The largest scores of a row, within the best groups where there are any
    (group_limited_topk)."""
    if not module.groups or module.open_groups >= module.groups:
        return plain.topk(r, scores, module.active)
    tokens, format = scores.shape[0], scores.format
    each = max(1, module.active // module.open_groups)
    inner = (
        r.tensor((tokens, module.groups, each), format, "topk"),
        r.tensor((tokens, module.groups, each), INT64, "topk"),
    )
    sums = r.tensor((tokens, module.groups), format, "sum")
    del inner
    places = (
        r.tensor((tokens, module.open_groups), format, "topk"),
        r.tensor((tokens, module.open_groups), INT64, "topk"),
    )
    open_ = r.tensor((tokens, module.groups), format, "zeros")
    wide = r.tensor(scores.shape, format, "contiguous")
    flags = r.tensor(scores.shape, BOOL, "to")
    closed = r.tensor(scores.shape, BOOL, "not")
    del flags
    masked = plain.masked(r, scores, closed)
    found = plain.topk(r, masked, module.active)
    del sums, places, open_, wide
    return found


def back_scatter(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.tensor(node.extra, g.format, "gather"),)


def chart(r: Recorder, like: Tensor, places: Tensor) -> Tensor:
    """`zeros_like(x).int().scatter(1, places, 1).bool()`."""
    zeros = r.like(like.detach(), "zeros")
    whole = r.tensor(like.shape, INT32, "to")
    del zeros
    written = r.tensor(like.shape, INT32, "scatter")
    del whole
    out = r.tensor(like.shape, BOOL, "to")
    del written
    return out


def dropped(
    r: Recorder, weights: Tensor, chosen: Tensor, rows: int, padded: bool
) -> tuple[Tensor, Tensor]:
    """Of each expert's tokens the `rows` with the largest weights stay
    (apply_router_token_dropping)."""
    rows = min(rows, weights.shape[0])
    values, places = (
        r.tensor((rows, weights.shape[1]), format, "topk") for format in (weights.format, INT64)
    )
    del values
    zeros = r.like(weights.detach(), "zeros")
    written = r.like(weights.detach(), "scatter")
    del zeros
    mask = r.tensor(weights.shape, BOOL, "to")
    del written, places
    kept = mask if padded else r.tensor(weights.shape, BOOL, "and")
    del mask
    return r.node("mul", r.like(weights, "mul"), (weights,), back_dropped, (kept,)), kept


def back_dropped(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.like(g, "mul"),)


# ---------------------------------------------------------------------------------------- the loss
def balanced(r: Recorder, weights: Tensor, logits: Tensor, module: MoE) -> Tensor:
    """The loss hangs on the weights, so that its gradient is made in the same backward: of the
    probabilities of all experts, in fp32, or of the sigmoid's in the scores' own format
    (compute_routing_scores_for_aux_loss, MoEAuxLossAutoScaler)."""
    sigmoid = module.correction_bias
    if sigmoid:
        scores = ops.activation(r, logits, "sigmoid")
        scores = plain.ratio(r, scores, ops.add_scalar(r, plain.total(r, scores)))
    else:
        scores = ops.softmax(r, logits, FP32)
    _, places = plain.topk(r, scores.detach(), module.active)
    map = chart(r, logits, places)
    del places, map
    loss = plain.total(r, scores, 0, kept=False)
    return r.node(
        "aux_loss",
        weights.view(*weights.shape),
        (weights, loss),
        back_balanced,
        extra=(loss.shape, loss.format),
    )


def back_balanced(r: Recorder, node: Node, g: Tensor) -> Grads:
    shape, format = node.extra
    return g.view(*g.shape), r.tensor(shape, format, "mul")
