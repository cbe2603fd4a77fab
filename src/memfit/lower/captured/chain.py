"""Encoders, and encoders with a decoder, by captured graphs: what the model is given, the pieces in
their order, and the loss, which is part of the last graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memfit.formats import FORMATS, FP32, Format
from memfit.graph import evaluated as size_of
from memfit.lower.captured import linears_of
from memfit.lower.captured.run import Evaluation, evaluation
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Dim, Tensor
from memfit.model.families._captured import LATE
from memfit.model.families._chains import CACHED, ENCODED, HANDED, HELD
from memfit.model.families._headless import LABELS
from memfit.model.model import Model
from memfit.model.modules import Captured, Layer, Linear
from memfit.program import Program

if TYPE_CHECKING:
    from memfit.lower.bound import Bound
    from memfit.lower.context import Context
    from memfit.lower.programs import Programs

HISTORY = "history:"  # begins the names of results that are only kept


def programs(own: Programs) -> Programs:
    """With the pieces of a chain in place of a language model's."""
    losses = {**own.losses, "plain": loss}
    return own.replace(start=start, middle=middle, layer=layer, batch=batch, losses=losses)


def batch(r: Recorder, program: Program, size: Dim, tokens: int) -> tuple[Tensor, ...]:
    """What the model is given: the loop's variable holds it until the next batch. Without labels
    where nothing is trained or evaluated."""
    graphs, job = program.model.graphs, program.job
    dims = graphs.whole(int(size), int(tokens), job.target_seq)
    found = []
    for name, shape, format in graphs.inputs(masked(program)):
        if job.training or name not in LABELS:
            sizes = tuple(size_of(one, dims) for one in shape)
            kind = input_format(program) if format == "model" else FORMATS[format]
            found.append(r.tensor(sizes, kind, "inputs", "inputs"))
    return tuple(found)


def input_format(program: Program) -> Format:
    """The dtype of the model's first parameter, which PEFT's preparation of packed weights casts up
    (transformers 5.23 modeling_utils.py get_parameter_dtype)."""
    widened = program.quant is not None and program.quant.prepared
    return FP32 if widened else FORMATS[program.weights]


def masked(program: Program) -> bool:
    """Whether the model is given a mask of padding: by the loop that trains."""
    return program.job.training and not program.job.packing


def named(ctx: Context) -> dict[str, Tensor]:
    """The model's inputs by the names of its arguments."""
    rows = ctx.program.model.graphs.inputs(masked(ctx.program))
    names = [name for name, _, _ in rows if ctx.job.training or name not in LABELS]
    return dict(zip(names, ctx.inputs, strict=True))


def of_piece(name: str, ctx: Context) -> Evaluation:
    graphs, rows = ctx.program.model.graphs, int(ctx.batch)
    tokens = ctx.job.seq if graphs.row.hears else int(ctx.tokens)  # of no sound
    dims = graphs.whole(rows, tokens, ctx.job.target_seq)
    form = graphs.row.form(dims)
    return evaluation(graphs.of(name, rows, masked(ctx.program), form), dims)


def start(ids: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """From the inputs to the first layer's input; what others read is left in the context."""
    shared = model.graphs.shared
    ctx.r.shared.update(shared)
    beside = (one.removesuffix(".weight") for one in shared if one.endswith(".weight"))
    ctx.r.shared.update(f"{one}.lora_{matrix}" for one in beside for matrix in "AB")
    return passed("start", ids, linears_of(model), bound, ctx)


def middle(x: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """From the encoder's last layer to the decoder's first."""
    ctx.shared = {**without_history(ctx), ENCODED: x}
    return passed("middle", x, linears_of(model), bound, ctx)


def layer(x: Tensor, layer: Layer, bound: Bound, ctx: Context) -> Tensor:
    """A layer without own weights runs those that all layers share."""
    piece = layer.captured
    assert piece is not None
    if ctx.program.model.graphs.history:
        ctx.shared = {**ctx.shared, f"{HISTORY}{bound.prefix}": x.detach()}
    if not piece.parts and bound.ends is not None:
        return passed(piece.graph, x, linears_of(ctx.program.model), bound.ends, ctx)
    return passed(piece.graph, x, piece.by_name, bound, ctx)


def without_history(ctx: Context, *more: str) -> dict[str, Tensor]:
    kept = HISTORY, LATE, *more
    return {name: one for name, one in ctx.shared.items() if not name.startswith(kept)}


def passed(
    name: str, x: Tensor, linears: Mapping[str, Linear], bound: Bound, ctx: Context
) -> Tensor:
    """One piece: its `x`, and what it makes for others, in the context."""
    found = run_piece(of_piece(name, ctx), x, linears, bound, ctx)
    out = found.pop("x")
    if ctx.job.checkpointing == "none":  # with checkpoints models make no cache
        ctx.caches += [one.detach() for name, one in found.items() if name.startswith(CACHED)]
    late = {name: one for name, one in found.items() if name.startswith(LATE)}
    ends = of_piece(name, ctx).graph.inputs  # what the next layer overwrites in its midst
    ctx.results += [one for name, one in late.items() if name not in ends]
    held = {
        f"{HISTORY}{len(ctx.shared)}{name}": one.detach()
        for name, one in found.items()
        if name.startswith(HELD)
    }
    others = {name: one for name, one in found.items() if not name.startswith((CACHED, HELD, LATE))}
    early = {name: one for name, one in late.items() if name in ends}
    ctx.shared = {**ctx.shared, **held, **others, **early}
    return out


def run_piece(
    run: Evaluation,
    x: Tensor,
    linears: Mapping[str, Linear],
    bound: Bound,
    ctx: Context,
    *,
    over: bool = False,
) -> dict[str, Tensor]:
    """A graph on its `x`, the model's inputs and what other pieces left in the context, of which it
    may let go. `over`: the loop over layers is, and its variable with it."""
    given = {"x": x.moved() if over and not ctx.training else x, **ctx.shared, **named(ctx)}
    names = tuple(ctx.shared)
    ctx.shared = {}
    try:
        return run.run(given, ctx, bound, linears, given)
    finally:  # a recomputation may stop early, and its checkpoint still holds what it was given
        ctx.shared = {name: given[name] for name in names if name in given}


def final(x: Tensor, piece: Captured, bound: Bound, ctx: Context) -> Tensor:
    """From the last layer to the loss, or to the first result where there are no labels. The model
    returns its results to a caller that lets go of them."""
    ctx.shared = without_history(ctx, HANDED)
    ctx.results.clear()
    run = of_piece("final", ctx)
    labelled = ctx.job.training
    linears = linears_of(ctx.program.model)
    run = run if labelled else run.without("loss")
    found = run_piece(run, x, linears, bound, ctx, over=True)
    names = ctx.program.model.graphs.returned
    results = [found.get(name, ctx.shared.get(name)) for name in names]
    ctx.returned += [one for one in results if one is not None]
    return found["loss"] if labelled else ctx.returned[0]


def loss(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """The graph ends in it."""
    return hidden


__all__ = ["programs"]
