"""Experts as separate feed-forwards, as in most models before transformers 5: a loop runs one after
the other on the rows that chose it."""

from __future__ import annotations

from collections.abc import Callable

from memfit.formats import INT64
from memfit.lower import ops as plain
from memfit.lower import views
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.lifetimes import Scope, Value, scoped
from memfit.lower.moe import ops
from memfit.lower.programs import Experts
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.modules import MLP, MoE

Gate = Callable[[Tensor, MoE, Context], Tensor]


def shares(choices: int, experts: int, skew: float, most: int) -> list[int]:
    """The rows of each expert, the busiest first: `skew` times a balanced share, but no more than
    `most`, since a token chooses an expert once; all others get the same."""
    busiest = min(most, max(int(skew * choices / experts), -(-choices // experts)))
    rest = choices - busiest
    others = experts - 1
    if not others:
        return [choices]
    return [busiest, *(rest // others + (number < rest % others) for number in range(others))]


def rows_of(x: Tensor, places: Tensor, module: MoE, ctx: Context) -> list[tuple[MLP, int]]:
    """The experts that get rows of x, and how many."""
    found = shares(places.count, module.experts, ctx.job.router_skew, x.shape[0])
    return [(expert, rows) for expert, rows in zip(module.each, found, strict=True) if rows]


@scoped
def one_by_one(
    own: Scope,
    x: Value,
    weights: Value,
    places: Value,
    module: MoE,
    bound: Bound,
    ctx: Context,
    gated: Gate,
) -> Value:
    """Each expert's rows are gathered, weighted and added into the whole, in x's dtype
    (transformers 4.46 modeling_mixtral.py MixtralSparseMoeBlock; 4.57 skips experts without rows).
    The loop's variables stand until the next expert's replace them."""
    r = ctx.r
    r.where = bound.path(module.name)
    final = own(r.like, x, "zeros")
    mask = own(one_hot, r, places, module.experts)
    where, state, out = own.empty(), own.empty(), own.empty()
    for expert, rows in rows_of(x.held(), places.held(), module, ctx):
        r.where = bound.path(module.name)
        own.assign(where, r.tensor, (rows, 2), INT64, "nonzero")
        own.assign(state, views.indexed, r, x, (rows, x.shape[1]), where)
        fed = own(ctx.programs.mlps[expert.style], state, expert, bound, ctx)
        r.where = bound.path(module.name)
        weight = own(views.indexed, r, weights, (rows, 1), where)
        own.assign(out, plain.mul, r, fed.last, weight.last)
        narrow = own(plain.cast, r, out, final.format)
        own.assign(final, added_at, r, final, narrow.last, where)
    own.drop(mask, where)
    return final


@scoped
def wide(
    own: Scope,
    x: Value,
    weights: Value,
    places: Value,
    module: MoE,
    bound: Bound,
    ctx: Context,
    gated: Gate,
) -> Value:
    """The same, added up in the dtype of the weights, fp32 (4.57 modeling_deepseek_v3.py
    DeepseekV3MoE.moe)."""
    r = ctx.r
    r.where = bound.path(module.name)
    final = own(r.tensor, x.shape, weights.format, "zeros")
    mask = own(one_hot, r, places, module.experts)
    where, weight, state = own.empty(), own.empty(), own.empty()
    fed, out = own.empty(), own.empty()
    for expert, rows in rows_of(x.held(), places.held(), module, ctx):
        r.where = bound.path(module.name)
        own.assign(where, r.tensor, (rows, 2), INT64, "nonzero")
        own.assign(weight, views.indexed, r, weights, (rows, 1), where)
        own.assign(state, views.indexed, r, x, (rows, x.shape[1]), where)
        own.assign(fed, ctx.programs.mlps[expert.style], state, expert, bound, ctx)
        r.where = bound.path(module.name)
        own.assign(out, plain.mul, r, fed, weight)
        own.assign(final, added_at, r, final, out, where)
    own.drop(mask, where)
    return own(plain.cast, r, final, x.format)


@scoped
def joined(
    own: Scope,
    x: Value,
    weights: Value,
    places: Value,
    module: MoE,
    bound: Bound,
    ctx: Context,
    gated: Gate,
) -> Value:
    """Rows are sorted by expert, cut, joined again and put back in order (4.57
    modeling_deepseek_v2.py DeepseekV2MoE.moe)."""
    r, tokens, active = ctx.r, x.shape[0], places.shape[-1]
    r.where = bound.path(module.name)
    counts = own(r.tensor, (tokens, module.experts), INT64, "zeros")
    totals = own(r.tensor, (module.experts,), INT64, "sum")
    order = own(argsort, r, places)
    inputs = own(gathered, r, x, order)
    outputs: list[Value] = []
    cut = own.empty()
    for expert, rows in rows_of(x.held(), places.held(), module, ctx):
        own.assign(cut, views.narrow, r, inputs, 0, rows)
        outputs.append(own(ctx.programs.mlps[expert.style], cut, expert, bound, ctx))
    r.where = bound.path(module.name)
    parts = tuple(one.held() for one in outputs)
    outs = own(plain.cat, r, parts, (tokens * active, x.shape[1]))
    del parts
    back = own(put_back, r, outs, order)
    shaped = own(views.reshape, r, back, tokens, active, x.shape[1])
    each = own(plain.cast, r, shaped.last, weights.format)
    weighted = own(multiplied, r, each.last, weights)
    total = own(summed, r, weighted.last)
    own.drop(counts, totals)
    return own(plain.cast, r, total.last, x.format)


def one_hot(r: Recorder, places: Tensor, experts: int) -> Tensor:
    """64-bit ones and zeros, (T, active, E)."""
    return r.tensor((*places.shape, experts), INT64, "one_hot")


def added_at(r: Recorder, total: Tensor, rows: Tensor, where: Tensor) -> Tensor:
    """`total.index_add_(0, where, rows)`, which saves the rows for their shape (derivatives.yaml
    index_add)."""
    saved = (where, rows if rows.needs else None)
    out = total.view(*total.shape)
    return r.node("index_add", out, (total, rows), back_added_at, saved, rows.shape)


def back_added_at(r: Recorder, node: Node, g: Tensor) -> Grads:
    """The whole's gradient as it is, and the rows of it."""
    return [
        g.view(*g.shape) if node.inputs[0] is not None else None,
        r.tensor(node.extra, g.format, "index_select") if node.inputs[1] is not None else None,
    ]


def argsort(r: Recorder, places: Tensor) -> Tensor:
    return ops.sort(r, places.view(places.count))[1]


def gathered(r: Recorder, x: Tensor, order: Tensor) -> Tensor:
    """`x[order // active]`."""
    return ops.rows_of(r, x, r.like(order, "floor_divide"))


def put_back(r: Recorder, x: Tensor, order: Tensor) -> Tensor:
    """`new[order] = x`."""
    return r.node("index_put", r.like(x, "empty_like"), (x,), back_put, (order,))


def back_put(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.like(g, "index"),)


def multiplied(r: Recorder, x: Tensor, weights: Tensor) -> Tensor:
    """`x.mul_(weights)`: in place, so the weights' gradient needs a copy of what x was."""
    before = r.like(x, "clone") if r.grad and weights.needs else None
    saved = (before, weights if x.needs else None)
    out = Tensor(x.shape, x.format, x.storage)
    return r.node("mul", out, (x, weights), back_multiplied, saved, weights.shape)


def back_multiplied(r: Recorder, node: Node, g: Tensor) -> Grads:
    to_x = r.like(g, "mul") if node.inputs[0] is not None else None
    to_weights = None
    if node.inputs[1] is not None:
        product = r.like(g, "mul")
        to_weights = r.tensor(node.extra, g.format, "sum")
        del product
    return [to_x, to_weights]


def summed(r: Recorder, x: Tensor) -> Tensor:
    """Over a token's experts."""
    return ops.total(r, x, 1, kept=False)


LOOPS: dict[str, Experts] = {"deepseek_v2": joined, "deepseek_v3": wide}  # others run one_by_one
