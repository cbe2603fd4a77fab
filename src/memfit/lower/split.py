"""Linear layers and the table of tokens that DTensor splits over ranks, as transformers' own plan has it (transformers 5.23
distributed/tensor_parallel.py; torch 2.13 distributed/tensor/_redistribute.py): sums over the ranks are new tensors, beside what is summed.
"""

from __future__ import annotations

from memfit.formats import BOOL, INT64
from memfit.lower import ops
from memfit.lower.context import Context
from memfit.lower.recorder import Grads, Node, Recorder, Tensor
from memfit.model.modules import Embedding
from memfit.techniques.tp import COLUMNS, ROWS, tabled

HEAD = "lm_head"


def ranks(ctx: Context) -> int:
    """Of tensor parallelism by this code; 1 where the framework has its own."""
    return ctx.program.strategy.size("tp") if ctx.program.split and not ctx.program.engine else 1


def summed(r: Recorder, x: Tensor, size: int) -> Tensor:
    r.comm("all_reduce", x.format.bytes(x.count), size, "tp")
    return r.tensor(x.shape, x.format, "all_reduce", "communication")


def entering(x: Tensor, name: str, ctx: Context) -> Tensor:
    """The input of a layer split by columns: its gradient is summed up over the ranks."""
    size = ranks(ctx)
    if size == 1 or name not in COLUMNS | {HEAD}:
        return x

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        return (summed(r, g, size),)

    return ctx.r.node("from_local", x.view(*x.shape), (x,), back)


def leaving(out: Tensor, name: str, ctx: Context) -> Tensor:
    """The result of a layer split by rows is summed up, by inference in place; the head's is gathered."""
    size, r = ranks(ctx), ctx.r
    if size > 1 and name in ROWS and not r.grad:
        r.comm("all_reduce", out.format.bytes(out.count), size, "tp")  # in place
        return out
    if size > 1 and name in ROWS:
        return r.node("all_reduce", summed(r, out, size), (out,), ops.back_through)
    if size > 1 and name == HEAD and ctx.program.strategy.tp is not None and ctx.program.strategy.tp.vocabulary:
        return gathered(r, out, size)
    return out


def gathered(r: Recorder, x: Tensor, size: int) -> Tensor:
    """All-gather along the last dimension: one rank behind the other, then side by side."""
    shape = (*x.shape[:-1], x.shape[-1] * size)
    r.comm("all_gather", x.format.bytes(x.count) * size, size, "tp")
    apart = r.tensor(shape, x.format, "all_gather", "communication")
    out = r.tensor(shape, x.format, "cat")
    del apart

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        return (r.tensor(node.extra, g.format, "contiguous"),)

    return r.node("all_gather", out, (x,), back, extra=x.shape)


def shares(module: Embedding, ctx: Context) -> bool:
    """Whether the ranks share the rows of this table."""
    return ranks(ctx) > 1 and module.style == "tokens" and tabled(ctx.program)


def table(ids: Tensor, weight: Tensor, ctx: Context) -> Tensor:
    """Rows of other ranks are zeroed, then all are summed up (torch 2.13 distributed/tensor/_ops/_embedding_ops.py MaskPartial). The gradient is
    that of the whole table on every rank: the operator is told how many rows there are in all (`embedding_dense_backward`)."""
    r, size = ctx.r, ranks(ctx)
    mask, moved = r.tensor(ids.shape, BOOL, "or", "activations"), r.tensor(ids.shape, INT64, "sub", "activations")
    if ctx.program.model.tied:
        weight = r.node("own_rows", weight.view(*weight.shape), (weight,), own_rows, extra=weight.shape)
    out = ops.embedding(r, moved, weight, weight.shape[0] * size)
    del mask
    return r.node("all_reduce", summed(r, out, size), (out,), ops.back_through)


def own_rows(r: Recorder, node: Node, g: Tensor) -> Grads:
    """The head's gradient is that of this rank's rows: a copy of the same rows is added to it, out of place."""
    rows = r.tensor(node.extra, g.format, "clone")
    total = r.like(rows, "add")
    del total
    return (rows,)
