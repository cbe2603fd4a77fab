"""Captured graphs as programs of `lower`: each operation becomes one of the small torch, so that
adapters, packed weights, checkpoints and layouts meet the same `linear` as in written programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.lower.tensors import Tensor
from memfit.model.modules import Captured, Layer, Model
from memfit.techniques.captured_graphs import setting_of

if TYPE_CHECKING:
    from memfit.lower.bound import Bound
    from memfit.lower.captured.run import Evaluation
    from memfit.lower.context import Context
    from memfit.lower.programs import Programs


def programs(own: Programs, model: Model) -> Programs:
    """With the captured graphs of this model in place of its pieces."""
    if model.encodes:
        from memfit.lower.captured import chain

        return chain.programs(own)
    return own.replace(start=start, layer=layer)


def evaluated(name: str, model: Model, ctx: Context) -> Evaluation:
    """The graph of this name with the dimensions of the pass."""
    from memfit.lower.captured.run import evaluation  # written programs start without graphs

    graphs = model.graphs
    batch, tokens = int(ctx.batch), int(ctx.tokens)
    graph = graphs.of(name, batch, setting_of(ctx.program))
    return evaluation(graph, graphs.whole(batch, tokens))


def start(ids: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """From token ids to the first layer's input; what every layer reads is left in the context."""
    module = next(one for one in model.embed if isinstance(one, Captured))
    given = {"ids": ids} if ctx.job.packing else {"ids": ids, "mask": ctx.inputs[2]}
    found = evaluated("start", model, ctx).run(given, ctx, bound, module.by_name)
    ctx.shared = {name: one for name, one in (given | found).items() if name not in ("ids", "x")}
    if model.graphs.holds(setting_of(ctx.program)):
        ctx.shared["held"] = found["x"].detach()
    return found["x"]


def layer(x: Tensor, layer: Layer, bound: Bound, ctx: Context) -> Tensor:
    """One layer by the graph of its kind."""
    piece = layer.captured
    assert piece is not None
    run = evaluated(piece.graph, ctx.program.model, ctx)
    caches = ctx.caches if ctx.cache is not None else None
    return run.run({"x": x, **ctx.shared}, ctx, bound, piece.by_name, caches=caches)["x"]


def final(x: Tensor, piece: Captured, bound: Bound, ctx: Context) -> Tensor:
    """From the last layer to the head; of encoders to the loss."""
    if ctx.program.model.encodes:
        from memfit.lower.captured import chain

        return chain.final(x, piece, bound, ctx)
    run = evaluated("final", ctx.program.model, ctx)
    run = run.uncast() if ctx.programs.own_head else run
    return run.run({"x": x, **ctx.shared}, ctx, bound, piece.by_name)["x"]


__all__ = ["final", "layer", "programs", "start"]
