"""Rows that ranks of experts exchange: how many come, the all-to-all, and its backward."""

from __future__ import annotations

from math import ceil

from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.modules import MoE


def ranks(ctx: Context) -> int:
    return ctx.program.strategy.size("ep")


def received(rows: int, module: MoE, ctx: Context) -> int:
    """Rows for this rank's experts, as many from each rank as it sends to its own: choices go to
    the experts in turn."""
    ep, strategy = ctx.program.strategy.ep, ctx.program.strategy
    assert ep is not None
    first = strategy.rank % ep.size * module.held
    each = (
        rows // module.experts + (expert < rows % module.experts)
        for expert in range(first, first + module.held)
    )
    return ep.size * sum(ceil(count * ep.imbalance) for count in each)


def exchanged(r: Recorder, x: Tensor, rows: int, size: int) -> Tensor:
    """All-to-all: rows that came in place of those that go."""
    return r.node(
        "all_to_all", moved(r, x, rows, size), (x,), back_exchanged, extra=(x.shape[0], size)
    )


def moved(r: Recorder, x: Tensor, rows: int, size: int) -> Tensor:
    out = r.tensor((rows, *x.shape[1:]), x.format, "all_to_all", "communication")
    r.comm("all_to_all", x.format.bytes(max(out.count, x.count)), size, "ep")
    return out


def back_exchanged(r: Recorder, node: Node, g: Tensor) -> Grads:
    rows, size = node.extra
    return (moved(r, g, rows, size),)


def put(r: Recorder, x: Tensor, places: Tensor) -> Tensor:
    """Rows written to their places in a fresh tensor: the backward picks them again."""

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        return (r.tensor(g.shape, g.format, "index"),)

    return r.node(
        "index_put",
        r.tensor(x.shape, x.format, "empty_like", "communication"),
        (x,),
        back,
        (places,),
    )
