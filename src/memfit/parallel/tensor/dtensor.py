"""Linear layers and the table of tokens that DTensor splits over ranks, as transformers' own plan
has it (transformers 5.23 distributed/tensor_parallel.py; torch 2.13
distributed/tensor/_redistribute.py): sums over the ranks are new tensors, beside what is summed.
"""

from __future__ import annotations

from memfit.formats import BOOL, INT64
from memfit.lower import ops
from memfit.lower.bound import BoundLinear
from memfit.lower.context import Context
from memfit.lower.matrix_layout import MatrixLayout
from memfit.lower.programs import Programs
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.modules import COLUMNS, ROWS, Embedding, Latent
from memfit.parallel.expert.check import stacks
from memfit.parallel.tensor.check import cut, summed, tabled
from memfit.program import Program

HEAD = "lm_head"


def ranks(ctx: Context) -> int:
    """Of tensor parallelism by this code; 1 where the framework has its own."""
    return ctx.program.strategy.size("tp") if ctx.program.split and not ctx.program.engine else 1


def summed_up(r: Recorder, x: Tensor, size: int) -> Tensor:
    r.comm("all_reduce", x.format.bytes(x.count), size, "tp")
    return r.tensor(x.shape, x.format, "all_reduce", "communication")


def sequential(ctx: Context) -> bool:
    """Whether norms and residuals have a part of each sequence (torch 2.13
    distributed/tensor/parallel/style.py SequenceParallel)."""
    return (
        ranks(ctx) > 1 and ctx.program.strategy.tp is not None and ctx.program.strategy.tp.sequence
    )


def positions(ctx: Context) -> Tensor | None:
    """Of a split sequence the caller says where each token stands: a model would count those of its
    part."""
    return (
        ops.integers(ctx.r, (1, ctx.tokens), "arange").view(ctx.batch, ctx.tokens)
        if sequential(ctx)
        else None
    )


def collected(x: Tensor, ctx: Context) -> Tensor:
    """What a block gets of a split sequence: all of it; the gradient of what its layers did with it
    is summed up and split."""
    if not sequential(ctx):
        return x
    size = ranks(ctx)

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        return (scattered(r, g, size),)

    return ctx.r.node("collect", together(ctx.r, x, size), (x,), back)


def together(r: Recorder, x: Tensor, size: int) -> Tensor:
    """Sequences are gathered one rank behind the other, and put side by side where there are
    several (_functional_collectives.py all_gather_single)."""
    shape = (x.shape[0], x.shape[1] * size, *x.shape[2:])
    r.comm("all_gather", x.format.bytes(x.count) * size, size, "tp")
    apart = r.tensor(shape, x.format, "all_gather", "communication")
    if shape[0] == 1:
        return apart
    out = r.tensor(shape, x.format, "cat", "communication")
    del apart
    return out


def scattered(r: Recorder, x: Tensor, size: int) -> Tensor:
    """Sums over the ranks, of which each keeps its tokens; they are put behind one another
    first."""
    behind = r.tensor(x.shape, x.format, "cat", "communication")
    r.comm("reduce_scatter", x.format.bytes(x.count), size, "tp")
    out = r.tensor(
        (x.shape[0], x.shape[1] // size, *x.shape[2:]), x.format, "reduce_scatter", "communication"
    )
    del behind
    return out


def spread(x: Tensor, ctx: Context) -> Tensor:
    """The way back from `collected`."""
    size = ranks(ctx)

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        return (together(r, g, size),)

    return ctx.r.node("spread", scattered(ctx.r, x, size), (x,), back)


def is_head(layer: BoundLinear) -> bool:
    return layer.path.rpartition(".")[2] == HEAD


def entering(x: Tensor, layer: BoundLinear, ctx: Context) -> Tensor:
    """The input of a layer split by columns: its gradient is summed up over the ranks, of a split
    sequence that of the block's input. Of an input that is whole a layer split by rows takes this
    rank's part."""
    size = ranks(ctx)
    if size > 1 and layer.across == ROWS and layer.joined:
        return parted(ctx.r, x, size)
    if size == 1 or not (layer.across == COLUMNS or is_head(layer)):
        return x
    if sequential(ctx):
        return collected(x, ctx) if is_head(layer) else x

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        return (summed_up(r, g, size),)

    return ctx.r.node("from_local", x.view(*x.shape), (x,), back)


def leaving(out: Tensor, layer: BoundLinear, ctx: Context) -> Tensor:
    """The result of a layer split by rows is summed up, by inference in place; the head's is
    gathered."""
    size, r, apart = ranks(ctx), ctx.r, layer.across == ROWS
    if apart and sequential(ctx):
        return spread(out, ctx)
    if size > 1 and apart and not r.grad:
        r.comm("all_reduce", out.format.bytes(out.count), size, "tp")  # in place
        return out
    if size > 1 and apart:
        return r.node("all_reduce", summed_up(r, out, size), (out,), ops.back_through)
    tp = ctx.program.strategy.tp
    if size > 1 and layer.across == COLUMNS and layer.joined:
        return gathered(r, out, size)
    if size > 1 and is_head(layer) and tp is not None and tp.vocabulary and not tp.parallel_loss:
        return gathered(r, out, size)
    return out


def gathered(r: Recorder, x: Tensor, size: int) -> Tensor:
    """All-gather along the last dimension; each rank's part of the gradient is copied."""

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        return (r.tensor(node.extra, g.format, "contiguous"),)

    return r.node("all_gather", side_by_side(r, x, size), (x,), back, extra=x.shape)


def side_by_side(r: Recorder, x: Tensor, size: int) -> Tensor:
    """One rank behind the other, then side by side."""
    shape = (*x.shape[:-1], x.shape[-1] * size)
    r.comm("all_gather", x.format.bytes(x.count) * size, size, "tp")
    apart = r.tensor(shape, x.format, "all_gather", "communication")
    out = r.tensor(shape, x.format, "cat")
    del apart
    return out


def parted(r: Recorder, x: Tensor, size: int) -> Tensor:
    """The way back from `gathered`."""

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        return (side_by_side(r, g, size),)

    return r.node(
        "chunk", r.tensor((*x.shape[:-1], x.shape[-1] // size), x.format, "clone"), (x,), back
    )


def whole(ctx: Context, weight: Tensor) -> Tensor:
    """`full_tensor()` of a weight that is cut by rows; its gradient is cut to this rank's rows."""
    size, r = ranks(ctx), ctx.r
    if size == 1:
        return weight
    shape = (weight.shape[0] * size, *weight.shape[1:])
    r.comm("all_gather", weight.format.bytes(weight.count) * size, size, "tp")
    out = r.tensor(shape, weight.format, "all_gather", "communication")

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        return (r.tensor(node.extra, g.format, "clone", ops.sole_part(r, node, 0)),)

    return r.node("full_tensor", out, (weight,), back, extra=weight.shape)


def shares(module: Embedding, ctx: Context) -> bool:
    """Whether the ranks share the rows of this table."""
    return ranks(ctx) > 1 and module.style == "tokens" and tabled(ctx.program)


def table(ids: Tensor, weight: Tensor, ctx: Context) -> Tensor:
    """Rows of other ranks are zeroed, then all are summed up (torch 2.13
    distributed/tensor/_ops/_embedding_ops.py MaskPartial). The gradient is that of the whole table
    on every rank: the operator is told how many rows there are in all (`embedding_dense_backward`).
    """
    r, size = ctx.r, ranks(ctx)
    mask, moved = (
        r.tensor(ids.shape, BOOL, "or", "activations"),
        r.tensor(ids.shape, INT64, "sub", "activations"),
    )
    if ctx.program.model.tied:
        weight = r.node(
            "own_rows", weight.view(*weight.shape), (weight,), own_rows, extra=weight.shape
        )
    out = ops.embedding(r, moved, weight, weight.shape[0] * size)
    del mask
    return (
        spread(out, ctx)
        if sequential(ctx)
        else r.node("all_reduce", summed_up(r, out, size), (out,), ops.back_through)
    )


def own_rows(r: Recorder, node: Node, g: Tensor) -> Grads:
    """The head's gradient is that of this rank's rows: a copy of the same rows is added to it, out
    of place."""
    rows = r.tensor(node.extra, g.format, "clone")
    total = r.like(rows, "add")
    del total
    return (rows,)


def cross_entropy(ctx: Context, logits: Tensor, labels: Tensor) -> Tensor:
    """Of logits whose vocabulary is split, where the loss is told so: maxima, sums and what the
    labels find go over the ranks, the logits never do (torch 2.13
    distributed/tensor/parallel/loss.py `_log_softmax`, `_nll_loss_forward`,
    `_nll_loss_and_log_softmax_backward`)."""
    tp = ctx.program.strategy.tp
    if ranks(ctx) == 1 or tp is None or not tp.parallel_loss:
        return ops.cross_entropy(ctx.r, logits, labels)
    r, size, rows = ctx.r, ranks(ctx), logits.shape[0]

    def over(op: str) -> Tensor:
        own = r.tensor((rows,), logits.format, op)
        r.comm("all_reduce", own.format.bytes(own.count), size, "tp")
        out = r.tensor((rows,), logits.format, "all_reduce", "communication")
        del own
        return out

    most = over("amax")
    less = r.tensor(logits.shape, logits.format, "sub", "logits")
    powers = r.tensor(logits.shape, logits.format, "exp", "logits")
    total = over("sum")
    del powers
    logs = r.tensor(logits.shape, logits.format, "sub", "logits")
    del less, most, total
    found = over("gather")
    del found
    out = r.tensor((1,), logits.format, "nll_loss", "activations")
    return r.node("nll_loss", out, (logits,), back_split, (logs, labels), logits.shape)


def back_split(r: Recorder, node: Node, g: Tensor) -> Grads:
    """exp(log-probabilities), and minus one where the labels are."""
    zeros = r.tensor(node.extra, g.format, "zeros_like", "logits")
    powers = r.tensor(node.extra, g.format, "exp", "logits")
    summed = r.tensor(node.extra, g.format, "add", "logits")
    del powers
    out = r.tensor(node.extra, g.format, "mul", "logits")
    del summed, zeros
    return (out,)


def rejoined(compressed: Tensor, module: Latent, ctx: Context) -> Tensor:
    """Where ranks share the heads, transformers' plan takes latent and rotated key apart and puts
    them together again, lest the key's gradient be one rank's (5.23 distributed/tensor_parallel.py
    MlaKvAProjParallel)."""
    if not module.out.across:
        return compressed
    r, size = ctx.r, ranks(ctx)

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        own = r.tensor((*g.shape[:-1], module.rope), g.format, "contiguous")
        r.comm("all_reduce", own.format.bytes(own.count), size, "tp")
        out = r.like(g, "cat")
        del own
        return (out,)

    return r.node("cat", r.like(compressed, "cat"), (compressed,), back)


class DTensorLayout(MatrixLayout):
    """Matrices cut by DTensor, as transformers' own plan has it."""

    def ranks(self, ctx: Context) -> int:
        return ranks(ctx)

    def enter_linear(self, x: Tensor, layer: BoundLinear, ctx: Context) -> Tensor:
        return entering(x, layer, ctx)

    def leave_linear(self, out: Tensor, layer: BoundLinear, ctx: Context) -> Tensor:
        return leaving(out, layer, ctx)

    def block_input(self, x: Tensor, ctx: Context) -> Tensor:
        return collected(x, ctx)

    def positions(self, ctx: Context) -> Tensor | None:
        return positions(ctx)

    def embedding(self, ids: Tensor, weight: Tensor, module: Embedding, ctx: Context) -> Tensor:
        if not shares(module, ctx):
            return super().embedding(ids, weight, module, ctx)
        return table(ids, weight, ctx)

    def shared_key(self, compressed: Tensor, module: Latent, ctx: Context) -> Tensor:
        return rejoined(compressed, module, ctx)

    def full_weight(self, ctx: Context, weight: Tensor) -> Tensor:
        return whole(ctx, weight)

    def cross_entropy(self, ctx: Context, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(ctx, logits, labels)


LAYOUT = DTensorLayout()


def by_dtensor(program: Program) -> tuple[frozenset[str], ...]:
    """Names of the parameters that torch's tensor parallelism cuts, or that are experts spread over
    ranks."""
    split = cut(program) | (stacks(program) if summed(program) else frozenset())
    return (*([split] if program.split else ()), *([stacks(program)] if program.spread else ()))


def overlay(programs: Programs, program: Program) -> Programs:
    """Where the framework has no tensor parallelism of its own."""
    if program.engine:
        return programs
    programs = programs.replace(dtensors=by_dtensor)
    cut = program.split and program.strategy.size("tp") > 1
    return programs.replace(matrices=LAYOUT) if cut else programs
