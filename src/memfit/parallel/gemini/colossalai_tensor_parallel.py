"""ColossalAI's 1D tensor parallelism: every linear layer gets this rank's part of its input's
width, and the results are added up over the ranks, so that all between two of them is whole on
every rank, attention with all its heads too (colossalai 0.3.0 nn/_ops/linear.py colo_linear_1drow,
nn/_ops/embedding.py colo_embedding_1Dcol, tensor/dist_spec_mgr.py)."""

from __future__ import annotations

from collections.abc import Callable

from memfit.lower.context import Context
from memfit.lower.matrix_layout import MatrixLayout
from memfit.lower.programs import Programs
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.program import Program


class RowLayout(MatrixLayout):
    """Every linear layer cut along its inputs, every table of embeddings along its width."""

    def linear(
        self, run: Callable[[Tensor, bool], Tensor], x: Tensor, ctx: Context, apart: bool
    ) -> Tensor:
        size = ctx.program.strategy.size("tp")
        return summed(run(parted(x, size, ctx.r), True), size, ctx.r)

    def embedding_output(self, x: Tensor, ctx: Context) -> Tensor:
        return gathered(x, ctx.program.strategy.size("tp"), ctx.r)


LAYOUT = RowLayout()


def overlay(programs: Programs, program: Program) -> Programs:
    cut = program.strategy.size("tp") > 1
    return programs.replace(matrices=LAYOUT) if cut else programs


def parted(x: Tensor, size: int, r: Recorder) -> Tensor:
    """A copy of this rank's columns; the gradient is gathered (_shard_as)."""

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        return (whole(g, size, r),)

    return r.node("redistribute", columns(x, size, r), (x,), back)


def summed(out: Tensor, size: int, r: Recorder) -> Tensor:
    """In place (nn/_ops/_utils.py _reduce)."""
    r.comm("all_reduce", out.format.bytes(out.count), size, "tp")
    return out


def gathered(x: Tensor, size: int, r: Recorder) -> Tensor:
    """What a table gives, of all ranks; it is gathered twice, and the first is dropped."""
    first = whole(x, size, r)
    del first

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        return (columns(g, size, r),)

    return r.node("redistribute", whole(x, size, r), (x,), back)


def columns(x: Tensor, size: int, r: Recorder) -> Tensor:
    return r.tensor((*x.shape[:-1], x.shape[-1] // size), x.format, "clone")


def whole(x: Tensor, size: int, r: Recorder) -> Tensor:
    """Into one flat tensor, from there into one for each rank, which are put together (_gather;
    torch 2.0 ProcessGroupNCCL.cpp allgather)."""
    bytes = x.format.bytes(x.count)
    pieces = [r.scratch(bytes, "empty_like", "communication") for _ in range(size)]
    flat = r.scratch(size * bytes, "flatten", "communication")
    r.comm("all_gather", size * bytes, size, "tp")
    del flat
    out = r.tensor((*x.shape[:-1], x.shape[-1] * size), x.format, "cat")
    del pieces
    return out
