"""torchtitan's mixture of experts (0.3.0 models/common/moe.py, token_dispatcher.py
LocalTokenDispatcher, AllToAllTokenDispatcher): scores in fp32, every choice a row, rows sorted by
expert and multiplied by three stacks, results times their scores in fp32 and added up token by
token.

With experts over ranks rows go there by an all-to-all, are sorted once more, and come back by
another. Every rank is taken to choose experts in turn, and this one to receive `imbalance` times
its share. Left out: the numbers of rows for each expert. Nothing is padded.
"""

from __future__ import annotations

from memfit import kernels
from memfit.formats import BF16, BOOL, FP32, INT32, INT64
from memfit.lower import all_to_all, views
from memfit.lower import ops as plain
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.moe import ops
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.modules import MoE


def experts(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> Tensor:
    """MoE.forward: what the router says, which experts it chose, and how many rows each gets are
    variables to the end."""
    r = ctx.r
    scores, weights, places = routed(x, module, bound, ctx)
    r.where = bound.path(module.name)
    chart = r.tensor(scores.shape, BOOL, "zeros_like")
    counts = r.tensor((module.experts,), INT64, "sum")
    out = chosen(x, weights, places, module, bound, ctx)
    if module.shared is not None:
        shared = ctx.programs.mlps[module.shared.style](x, module.shared, bound, ctx)
        r.where = bound.path(module.name)
        out = plain.add(r, out, shared)
    del chart, counts
    return out


def routed(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
    """All scores, those of the chosen experts, and which they are (TokenChoiceTopKRouter); a bias
    steers the choice alone."""
    r = ctx.r
    r.where = bound.path(f"{module.name}.{module.router}")
    weight = plain.cast(r, bound[f"{module.name}.{module.router}.weight"], FP32)
    logits = plain.linear(r, plain.cast(r, x, FP32), weight, None, module.experts)
    del weight
    scores = (
        plain.activation(r, logits, "sigmoid")
        if module.correction_bias
        else plain.softmax(r, logits, FP32)
    )
    del logits
    steered = r.like(scores.detach(), "add")
    best, places = ops.topk(r, steered, module.active)
    weights = ops.gather(r, scores, places)
    if module.normed:
        below = plain.add_scalar(r, ops.total(r, weights))
        weights = ops.ratio(r, weights, below)
    weights = plain.scale(r, weights)
    del steered, best
    return scores, weights, places


def chosen(
    x: Tensor, weights: Tensor, places: Tensor, module: MoE, bound: Bound, ctx: Context
) -> Tensor:
    """RoutedExperts.forward: rows to their experts, through them, and back."""
    r, width = ctx.r, x.shape[-1]
    flat = views.reshape(r, x, x.count // width, width)
    order = sorted_places(r, places)
    scores = ops.rows_of(r, views.reshape(r, weights, weights.count), order)
    tokens = r.like(order, "floor_divide")
    del order
    rows = ops.rows_of(r, flat, tokens)
    spread = module.local > 0
    turned: Tensor | None = None
    if spread:
        going = rows
        rows, turned = sent(going, module, ctx)
        del going
    out = multiplied(rows, module, bound, ctx)
    r.where = bound.path(f"{module.name}.{module.experts_name}")
    back = out if turned is None else returned(out, turned, tokens.count, ctx)
    total = added_up(back, scores, tokens, flat, r)
    del rows, out
    return views.reshape(r, total, *x.shape)


def sorted_places(r: Recorder, places: Tensor) -> Tensor:
    """`argsort(stable=True)`."""
    values, order = ops.sort(r, places.view(places.count))
    del values
    return order


def multiplied(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> Tensor:
    """GroupedExperts: silu(x·w1) · (x·w3), then w2, in bf16 whatever comes; each of the three casts
    its own operands."""
    r, path = ctx.r, f"{module.name}.{module.experts_name}"
    r.where = bound.path(path)
    ends = r.tensor((module.held,), INT32, "cumsum")

    def product(rows: Tensor, name: str) -> Tensor:
        weight = bound[f"{path}.{name}"]
        return ops.grouped(
            r, plain.cast(r, rows, BF16), plain.cast(r, weight, BF16), ends, transposed=False
        )

    hidden = plain.activation(r, product(x, "gate_proj"), "silu")
    hidden = plain.mul(r, hidden, product(x, "up_proj"))
    return plain.cast(r, product(hidden, "down_proj"), x.format)


def added_up(out: Tensor, scores: Tensor, tokens: Tensor, like: Tensor, r: Recorder) -> Tensor:
    """The rows in fp32 times their scores, cast back, and added to zeros by an operator of
    torchtitan's own, which asks torch for an order that is always the same: a sort of the rows'
    places (ops/scatter_add.py; ATen/native/TensorAdvancedIndexing.cpp _scatter_via_index_put)."""
    zeros = r.like(like.detach(), "zeros_like")
    wide = plain.cast(r, out, FP32)
    weighted = plain.mul(r, wide, views.reshape(r, scores, scores.count, 1))
    del wide
    narrow = plain.cast(r, weighted, out.format)
    del weighted
    total = r.like(zeros, "scatter_add")
    scratch = r.scratch(kernels.index_put_accumulate(tokens.count), "index_put")
    del scratch
    return r.node("scatter_add", total, (narrow,), back_added, (tokens,), narrow.shape)


def back_added(r: Recorder, node: Node, g: Tensor) -> Grads:
    """Each row's gradient is a copy of its token's."""
    return (r.tensor(node.extra, g.format, "gather"),)


# -------------------------------------------------------------------------------------- over ranks
def sent(rows: Tensor, module: MoE, ctx: Context) -> tuple[Tensor, Tensor]:
    """The rows that came for this rank's experts, put in their order, and what that order is
    (`_permute`)."""
    r = ctx.r
    count = all_to_all.received(rows.shape[0], module, ctx)
    came = all_to_all.exchanged(r, rows, count, all_to_all.ranks(ctx))
    segments = r.tensor((count,), INT64, "repeat_interleave")
    starts = r.tensor((count,), INT64, "index")
    numbers = r.tensor((count,), INT64, "arange")
    summed = r.tensor((count,), INT64, "add")
    del starts, numbers
    ends = r.tensor((count,), INT64, "index")
    order = r.tensor((count,), INT64, "sub")
    del ends, summed
    out = ops.rows_of(r, came, order)
    del segments
    return out, order


def returned(out: Tensor, order: Tensor, count: int, ctx: Context) -> Tensor:
    """The results where their senders expect them, and there (`_unpermute`)."""
    return all_to_all.exchanged(
        ctx.r, all_to_all.put(ctx.r, out, order), count, all_to_all.ranks(ctx)
    )
