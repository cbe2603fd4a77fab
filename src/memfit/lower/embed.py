"""From token ids to the first layer's input: tables, positions, norms and projections, dropout."""

from __future__ import annotations

from memfit.formats import FP32, INT64
from memfit.lower import ops
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.linears import linear
from memfit.lower.norms import norm
from memfit.lower.tensors import Dim, Tensor
from memfit.model.model import Model
from memfit.model.modules import Attention, Embedding, Linear, Norm

# Code that calls what dropout leaves of the embedding by the embedding's own name, and so lets go
# of the latter.
RENAMED = frozenset({"phi"})


def embedded(ids: Tensor, model: Model, bound: Bound, ctx: Context, held: list[Tensor]) -> Tensor:
    """The sum of tokens and positions. `held`: what variables of the model's forward keep until it
    returns."""
    r = ctx.r
    x, places = looked_up(ids, model.embed[0], bound, ctx, held), None  # type: ignore[arg-type]
    held.append(x)
    positions = ctx.positions
    if positions is None and not any(
        isinstance(module, Embedding) and module.style == "counted" for module in model.embed
    ):
        positions = r.tensor((1, ctx.tokens), INT64, "arange", "inputs")
    for module in model.embed[1:]:
        r.where = module.name
        if isinstance(module, Embedding):
            places = POSITIONS[module.style](module, positions, bound, ctx, held)
        elif isinstance(module, Norm):
            x = norm(x, module, bound, ctx)
        elif isinstance(module, Linear):
            x = held[0] = linear(x, bound.linear(module), ctx)
    held += [] if positions is None else [positions]
    r.where = model.prefix.rpartition(".")[0]
    if places is not None:
        x = ops.add(r, x, places)
    dropped = ops.dropout(r, x, ctx.dropout(model.embed_dropout))
    if dropped is not x and style(model) in RENAMED:
        held[0] = dropped
    return dropped


def style(model: Model) -> str:
    mixer = model.layers[0].blocks[0].mixer
    return mixer.style if isinstance(mixer, Attention) else ""


def looked_up(
    ids: Tensor, module: Embedding, bound: Bound, ctx: Context, held: list[Tensor]
) -> Tensor:
    ctx.r.where = module.name
    weight = bound[f"{module.name}.weight"]
    ids = ctx.engine.enter((weight,), ids)
    x = ctx.matrices.embedding(ids, weight, module, ctx)
    x = ops.scale(ctx.r, x) if module.scaled and not module.outside else x
    if ctx.program.input_gradients:
        x.needs = True  # enable_input_require_grads: the output becomes a leaf
    x = ctx.matrices.embedding_output(ctx.engine.leave((weight,), x), ctx)
    held += [x] if module.kept else []
    return ops.scale(ctx.r, x) if module.outside else x


def learned(
    module: Embedding, positions: Tensor | None, bound: Bound, ctx: Context, held: list[Tensor]
) -> Tensor:
    """One row for all sequences, and the variable `position_embeds` holds it."""
    assert positions is not None
    weight = bound[f"{module.name}.weight"]
    found = ops.embedding(ctx.r, ctx.engine.enter((weight,), positions), weight)
    held.append(ctx.matrices.embedding_output(ctx.engine.leave((weight,), found), ctx))
    return held[-1]


def counted(
    module: Embedding, positions: Tensor | None, bound: Bound, ctx: Context, held: list[Tensor]
) -> Tensor:
    """Places counted along an attention mask of ones, so that every sequence has its own
    (transformers 5.23 modeling_opt.py OPTDecoder.forward)."""
    r, shape = ctx.r, (ctx.batch, Dim(ctx.tokens, "S"))
    held.append(r.tensor((ctx.batch, ctx.keys), FP32, "ones", "inputs"))
    if ctx.positions is None:
        held.append(r.tensor(shape, INT64, "cumsum", "inputs"))
    return learned(module, r.tensor(shape, INT64, "add", "inputs"), bound, ctx, held)


def beside_mask(
    module: Embedding, positions: Tensor | None, bound: Bound, ctx: Context, held: list[Tensor]
) -> Tensor:
    """One row for all, beside an attention mask of ones that is made all the same (transformers
    5.23 modeling_biogpt.py BioGptModel.forward)."""
    held.append(ctx.r.tensor((ctx.batch, ctx.keys), FP32, "ones", "inputs"))
    return learned(module, positions, bound, ctx, held)


def sinusoidal(
    module: Embedding, positions: Tensor | None, bound: Bound, ctx: Context, held: list[Tensor]
) -> Tensor:
    """Rows of a table that is a buffer: no gradient, and no variable (transformers 5.23
    modeling_xglm.py)."""
    table = bound[f"{module.name}.weights"]
    return ctx.r.tensor((1, ctx.tokens, module.width), table.format, "index_select")


POSITIONS = {
    "learned": learned,
    "counted": counted,
    "beside_mask": beside_mask,
    "sinusoidal": sinusoidal,
}
