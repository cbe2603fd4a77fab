"""The way to the experts, and to those that other ranks hold: rows go there by an all-to-all, and
their results come back by another (transformers 5.23 distributed/expert_parallel.py AllToAllEP).

What each function calls by a name stays until it returns, so that the rows that came are there as
long as the experts run. Every rank is taken to choose experts in turn, and this one to receive
`imbalance` times its share. Left out: the numbers of rows themselves, a few for each expert.
"""

from __future__ import annotations

from memfit.formats import INT64
from memfit.lazy_dataclass import dataclass
from memfit.lower import all_to_all, views
from memfit.lower import ops as plain
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.moe import experts, ops
from memfit.lower.programs import Programs
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.modules import MoE
from memfit.parallel.tensor.check import summed
from memfit.parallel.tensor.dtensor import by_dtensor
from memfit.program import Program


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """What brings the results back."""

    weights: Tensor
    order: Tensor


def run(
    x: Tensor,
    weights: Tensor,
    places: Tensor,
    module: MoE,
    bound: Bound,
    ctx: Context,
    gated: experts.Gate,
) -> Tensor:
    """As `experts.run`, of experts that other ranks hold or share."""
    ctx.r.where = bound.path(f"{module.name}.{module.experts_name}")
    if module.format != "mxfp4" and module.local:
        return elsewhere(x, weights, places, module, bound, ctx, gated)
    if module.format == "mxfp4" or not summed(ctx.program):
        return experts.run(x, weights, places, module, bound, ctx, gated)
    x, weights = (entering(one, ctx) for one in (x, weights))
    return leaving(experts.run(x, weights, places, module, bound, ctx, gated), ctx)


def entering(x: Tensor, ctx: Context) -> Tensor:
    """What ranks that share each expert's matrices all have: the gradients that each makes of it
    are summed up in place (MoeExpertsParallel)."""
    size = ctx.matrices.ranks(ctx)

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        r.comm("all_reduce", g.format.bytes(g.count), size, "tp")
        return (g.view(*g.shape),)

    return ctx.r.node("entering", x.view(*x.shape), (x,), back)


def leaving(out: Tensor, ctx: Context) -> Tensor:
    """The sum over ranks of what their experts give, in place."""
    ctx.r.comm("all_reduce", out.format.bytes(out.count), ctx.matrices.ranks(ctx), "tp")
    return out


def elsewhere(
    x: Tensor,
    weights: Tensor,
    places: Tensor,
    module: MoE,
    bound: Bound,
    ctx: Context,
    gated: experts.Gate,
) -> Tensor:
    """The experts are a module of their own to an engine, which stands around the way there and
    back. Without gradients, and where the ranks of experts are those of tensor parallelism, which
    have the same tokens, nothing is sent (AutoEP)."""
    name = f"{bound.prefix}.{module.name}.{module.experts_name}"
    x = ctx.engine.before(name, x)
    ctx.r.where = name
    way = (
        own_alone
        if not ctx.r.grad and all_to_all.ranks(ctx) == ctx.matrices.ranks(ctx)
        else over_ranks
    )
    return ctx.engine.after(
        name, plain.cast(ctx.r, way(x, weights, places, module, bound, ctx, gated), x.format)
    )


def own_alone(
    x: Tensor,
    weights: Tensor,
    places: Tensor,
    module: MoE,
    bound: Bound,
    ctx: Context,
    gated: experts.Gate,
) -> Tensor:
    """Each rank runs its own experts over all tokens, rows of others' without a weight, and the
    results are summed up in place (AllReduceEP)."""
    r = ctx.r
    owners = r.like(places, "floor_divide")
    others = ops.flags(r, places.shape, "ne")
    del owners
    turned = r.like(places, "remainder")
    local = r.like(places, "where")
    del turned
    masked = r.like(weights, "masked_fill")
    run = experts.decoding if ctx.decoding else experts.sorted_rows
    out = run(x, masked, local, module, bound, ctx, gated)
    r.comm("all_reduce", out.format.bytes(out.count), all_to_all.ranks(ctx), "ep")
    del others, local
    return out


def over_ranks(
    x: Tensor,
    weights: Tensor,
    places: Tensor,
    module: MoE,
    bound: Bound,
    ctx: Context,
    gated: experts.Gate,
) -> Tensor:
    """Rows go to the ranks that have their experts, and come back (AllToAllEP)."""
    name = ctx.r.where
    came, ids, ones, sent = dispatched(x, weights, places, module, ctx)
    out = experts.sorted_rows(came, ones, ids, module, bound, ctx, gated)
    ctx.r.where = name
    out = combined(out, sent, ctx)
    del came, ids, ones
    return out


def dispatched(
    x: Tensor, weights: Tensor, places: Tensor, module: MoE, ctx: Context
) -> tuple[Tensor, Tensor, Tensor, Sent]:
    """The rows that came for this rank's experts, whose each is, ones for weights (the sender's are
    applied when they are back)."""
    r = ctx.r
    x, places, weights = (own_part(one, ctx) for one in (x, places, weights))
    rows = places.count
    sorted_ids, order = ops.sort(r, places.view(rows))
    del sorted_ids
    going = ops.rows_of(r, x, r.like(order, "floor_divide"))
    counting = r.like(order, "ones_like")
    del counting
    count = all_to_all.received(rows, module, ctx)
    came = all_to_all.exchanged(r, going, count, all_to_all.ranks(ctx))
    ids = r.tensor((count, 1), INT64, "repeat_interleave")
    ones = r.tensor((count, 1), came.format, "ones_like")
    return came, ids, ones, Sent(weights=weights, order=order)


def combined(out: Tensor, sent: Sent, ctx: Context) -> Tensor:
    """Each choice's result on the rank that sent it, put where it belongs, weighted and added
    up."""
    r, rows, width = ctx.r, sent.order.count, out.shape[-1]
    back = all_to_all.exchanged(r, out, rows, all_to_all.ranks(ctx))
    apart = all_to_all.put(r, back, sent.order)
    apart = views.reshape(r, apart, *sent.weights.shape, width)
    weighted = plain.mul(r, apart, views.reshape(r, sent.weights, *sent.weights.shape, 1))
    return all_parts(experts.added_up(weighted, ctx), ctx)


def own_part(x: Tensor, ctx: Context) -> Tensor:
    """Of tokens that ranks of tensor parallelism all have, a copy of this rank's share; gradients
    are gathered."""
    size = ctx.matrices.ranks(ctx)
    if size == 1:
        return x
    rows = -(-x.shape[0] // size)
    out = ctx.r.tensor(
        (max(0, min(rows, x.shape[0] - ctx.program.strategy.rank % size * rows)), *x.shape[1:]),
        x.format,
        "clone",
    )
    return ctx.r.node("own_part", out, (x,), back_part, extra=(x.shape, size))


def back_part(r: Recorder, node: Node, g: Tensor) -> Grads:
    shape, size = node.extra
    return (put_together(r, g, shape[0], size),)


def put_together(r: Recorder, x: Tensor, rows: int, size: int) -> Tensor:
    r.comm("all_gather", x.format.bytes(x.count) * size, size, "tp")
    return r.tensor((rows, *x.shape[1:]), x.format, "all_gather", "communication")


def all_parts(x: Tensor, ctx: Context) -> Tensor:
    """The way back from `own_part`."""
    size = ctx.matrices.ranks(ctx)
    if size == 1:
        return x

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        return (r.tensor(node.extra, g.format, "clone"),)

    return ctx.r.node(
        "all_parts", put_together(ctx.r, x, ctx.batch * ctx.tokens, size), (x,), back, extra=x.shape
    )


def overlay(programs: Programs, program: Program) -> Programs:
    """Frameworks with code of their own for mixtures bring that for several ranks, too."""
    return programs if program.engine else programs.replace(experts=run, dtensors=by_dtensor)
