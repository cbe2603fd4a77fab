"""Captured graphs as programs of `lower`: each operation becomes one of the small torch, so that
adapters, packed weights, checkpoints and layouts meet the same `linear` as in written programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memfit.lower.tensors import Tensor
from memfit.model.families._captured import LATE
from memfit.model.model import Model
from memfit.model.modules import Captured, Layer, Linear
from memfit.techniques.captured_graphs import setting_of

if TYPE_CHECKING:
    from memfit.lower.bound import Bound
    from memfit.lower.cache import Cache
    from memfit.lower.captured.run import Evaluation
    from memfit.lower.context import Context
    from memfit.lower.programs import Programs
    from memfit.lower.recorder import Recorder
    from memfit.program import Program


def programs(own: Programs, model: Model) -> Programs:
    """With the captured graphs of this model in place of its pieces."""
    if model.encodes:
        from memfit.lower.captured import chain

        return chain.programs(own)
    return own.replace(start=start, layer=layer)


def evaluated(name: str, model: Model, ctx: Context) -> Evaluation:
    """The graph of this name with the dimensions of the pass."""
    from memfit.lower.captured.run import evaluation  # written programs start without graphs

    graphs, batch = model.graphs, int(ctx.batch)
    graph = graphs.of(name, batch, ctx.keys, setting(ctx))
    few = not ctx.job.training
    return evaluation(graph, graphs.whole(batch, ctx.keys), few=few)


def setting(ctx: Context) -> str:
    """The setting whose graphs a pass runs."""
    if ctx.cache is None or ctx.job.training:
        return setting_of(ctx.program)
    return "decode" if ctx.cache.seen else "prefill"


def start(ids: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """From token ids to the first layer's input; what every layer reads is left in the context."""
    given = {"ids": ids}
    if ctx.positions is not None:
        given["positions"] = ctx.positions
    elif not ctx.job.packing:
        given["mask"] = ctx.inputs[2]
    ctx.crossing = {}
    kept: list[Tensor] = []  # by variables of the model's own code until it returns
    found = evaluated("start", model, ctx).run(given, ctx, bound, linears_of(model), caches=kept)
    ctx.shared = {name: one for name, one in (given | found).items() if name not in ("ids", "x")}
    if model.graphs.holds(setting(ctx)):
        kept.append(found["x"])
    ctx.shared |= {f"held{number}": one.detach() for number, one in enumerate(kept)}
    return found["x"]


def linears_of(model: Model) -> Mapping[str, Linear]:
    """Linear layers before, between and behind the lists of layers, by name."""
    ends = (*model.embed, *model.final)
    return {linear.name: linear for one in ends for linear in one.linears()}


def layer(x: Tensor, layer: Layer, bound: Bound, ctx: Context) -> Tensor:
    """One layer by the graph of its kind."""
    piece = layer.captured
    assert piece is not None
    run = evaluated(piece.graph, ctx.program.model, ctx)
    if ctx.cache is not None and not ctx.job.training:
        return cached(x, run, ctx.cache, piece, bound, ctx)
    caches = ctx.caches if ctx.cache is not None else None
    given = {"x": x, **ctx.shared, **crossing(run, ctx)}
    return passed(run.run(given, ctx, bound, piece.by_name, caches=caches), ctx)


def crossing(run: Evaluation, ctx: Context) -> dict[str, Tensor]:
    """What this layer reads of earlier ones, beside what the one before hands on."""
    return {name: one for name, one in ctx.crossing.items() if name in run.graph.inputs}


def arguments(graph: str, ctx: Context) -> dict[str, Tensor]:
    """Of what other pieces left in the context, what this layer is given: a checkpoint holds it."""
    if ctx.program.model.encodes:
        from memfit.lower.captured import chain

        run = chain.of_piece(graph, ctx)
    else:
        run = evaluated(graph, ctx.program.model, ctx)
    own = (name for name in ctx.shared if name in run.graph.inputs)
    return {name: ctx.shared[name] for name in own if not name.startswith(LATE)}


def passed(found: dict[str, Tensor], ctx: Context) -> Tensor:
    """A layer's `x`; what it hands on beside that is left in the context."""
    others = {name: one for name, one in found.items() if name != "x"}
    if others:
        ctx.shared = {**ctx.shared, **others}
    return found["x"]


def cached(
    x: Tensor, run: Evaluation, cache: Cache, piece: Captured, bound: Bound, ctx: Context
) -> Tensor:
    """A layer with the tensors of its cache, of which it lets go where it makes new ones."""
    from memfit.lower.captured.again import run_layer
    from memfit.model.families._captured import PAST

    state = cache.states.pop(bound.prefix, {})
    given = {"x": x, **ctx.shared, **crossing(run, ctx), **state}
    state.clear()
    found = run_layer(run, given, ctx, bound, piece)
    kept = {name: one for name, one in given.items() if name.startswith(PAST)}
    kept |= {name: one for name, one in found.items() if name.startswith(PAST)}
    ctx.results += [one for name, one in found.items() if name.startswith(LATE)]
    if kept:
        cache.states[bound.prefix] = kept
    return passed(
        {name: one for name, one in found.items() if not name.startswith((PAST, LATE))}, ctx
    )


def skip_to(r: Recorder, program: Program, cache: Cache, length: int, step: int) -> None:
    """Bring the tensors of a cache to the sizes that they have before this pass, where passes in
    between were not walked."""
    from memfit.lower.captured.run import evaluation

    graphs = program.model.graphs
    kinds = {program.model.path(one.number): one.layer.captured for one in program.entries}
    for where, state in cache.states.items():
        piece = kinds[where]
        assert piece is not None
        batch = program.job.batch
        graph = graphs.of(piece.graph, batch, length, "decode")
        run = evaluation(graph, graphs.whole(batch, length), few=True)
        made = state.keys() & graph.outputs.keys()
        shapes = {name: run.specs[graph.outputs[name]].shape for name in sorted(made)}
        longer = [name for name in shapes if state[name].shape != shapes[name]]
        if not longer:
            continue
        r.mark("decode", where, step)
        formats = {name: state.pop(name).format for name in longer}
        for name, format in formats.items():
            whole = run.specs[run.root(graph.outputs[name])].shape
            block = r.tensor(whole, format, "cat", "kv_cache")
            state[name] = block.view(*shapes[name])


def final(x: Tensor, piece: Captured, bound: Bound, ctx: Context) -> Tensor:
    """From the last layer to the head; of encoders to the loss."""
    if ctx.program.model.encodes:
        from memfit.lower.captured import chain

        return chain.final(x, piece, bound, ctx)
    run = evaluated("final", ctx.program.model, ctx)
    run = run.uncast() if ctx.programs.own_head else run
    shared = {name: one for name, one in ctx.shared.items() if name in run.graph.inputs}
    if behind(run, ctx.program.model):
        ctx.shared = {}
    return run.run({"x": x, **shared}, ctx, bound, piece.by_name)["x"]


def behind(run: Evaluation, model: Model) -> bool:
    """Whether the head has modules outside the model. The model has returned by then, so its masks
    are gone."""
    root = model.prefix.partition(".")[0]
    return any(op.where and not f"{op.where}.".startswith(f"{root}.") for op in run.graph.ops)


__all__ = ["arguments", "final", "layer", "linears_of", "programs", "skip_to", "start"]
