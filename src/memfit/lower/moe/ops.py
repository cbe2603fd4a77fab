"""Operations of routing: choosing, sorting, gathering rows, and products of groups of rows with
stacked matrices.

What each saves and holds follows torch 2.13 tools/autograd/derivatives.yaml and
FunctionsManual.cpp; scratch that kernels take for themselves is in `memfit.kernels`.
"""

from __future__ import annotations

from memfit import kernels
from memfit.formats import BOOL, INT64, Format
from memfit.lower.ops import grad_part
from memfit.lower.recorder import Recorder
from memfit.lower.strides import contiguous
from memfit.lower.tensors import Grads, Node, Shape, Tensor
from memfit.lower.views import seen


def topk(r: Recorder, x: Tensor, count: int, op: str = "topk") -> tuple[Tensor, Tensor]:
    """The largest of the last dimension and where they stand; the places are kept."""
    shape = (*x.shape[:-1], count) if count else x.shape[:-1]
    values, places = r.tensor(shape, x.format, op), r.tensor(shape, INT64, op)
    return r.node(op, values, (x,), back_zeros, (places,), x.shape), places


def back_zeros(r: Recorder, node: Node, g: Tensor) -> Grads:
    """Zeros of the input's size, written where the values came from."""
    return (r.tensor(node.extra, g.format, "zeros"),)


def largest(r: Recorder, x: Tensor, *, kept: bool = False) -> tuple[Tensor, Tensor]:
    """`x.max(dim=-1)`."""
    return topk(r, x, 1 if kept else 0, "max")


def gather(r: Recorder, x: Tensor, places: Tensor) -> Tensor:
    out = r.tensor(places.shape, x.format, "gather")
    return r.node("gather", out, (x,), back_zeros, (places,), x.shape)


def total(
    r: Recorder, x: Tensor, dim: int = -1, *, kept: bool = True, format: Format | None = None
) -> Tensor:
    """`x.sum(dim)`; the gradient is a view that repeats the sum's."""
    dim %= len(x.shape)
    short = (*x.shape[:dim], *((1,) if kept else ()), *x.shape[dim + 1 :])
    out = r.tensor(short, format or x.format, "sum")
    return r.node("sum", out, (x,), back_total, extra=(x.shape, dim, x.format))


def back_total(r: Recorder, node: Node, g: Tensor) -> Grads:
    shape, dim, format = node.extra
    strides = list(contiguous((*shape[:dim], 1, *shape[dim + 1 :])))
    strides[dim] = 0
    wide = seen(g, shape, tuple(strides))
    return (wide if g.format is format else r.tensor(shape, format, "to"),)


def divided(r: Recorder, x: Tensor, by: Tensor) -> Tensor:
    """`x /= by`: in place, so the divisor's gradient needs a copy of what x was."""
    before = r.like(x, "clone") if r.grad and by.needs else None
    out = Tensor(x.shape, x.format, x.storage)
    return r.node(
        "div", out, (x, by), back_divided, (before, by if x.needs else None), (x.shape, by.shape)
    )


def back_divided(r: Recorder, node: Node, g: Tensor) -> Grads:
    """−g · ((x / by) / by), then g / by (FunctionsManual.cpp div_tensor_other_grad)."""
    before, _ = node.saved
    to_by = None
    if before is not None:
        once = r.like(g, "div")
        twice = r.like(g, "div")
        negated = r.like(g, "neg")
        to_by = r.like(g, "mul")
        del once, twice, negated
    to_x = r.like(g, "div") if node.inputs[0] is not None else None
    if to_by is not None:
        to_by = r.tensor(node.extra[1], g.format, "sum")
    return [to_x, to_by]


def ratio(r: Recorder, x: Tensor, by: Tensor) -> Tensor:
    """`x / by`."""
    return r.node(
        "div",
        r.like(x, "div"),
        (x, by),
        back_divided,
        (x if by.needs else None, by if x.needs else None),
        (x.shape, by.shape),
    )


def jittered(r: Recorder, x: Tensor, training: bool) -> Tensor:
    """`x *= noise` while training: the noise is kept."""
    return (
        r.node("mul", x.detach(), (x,), back_jittered, (r.like(x, "uniform_"),)) if training else x
    )


def back_jittered(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.like(g, "mul"),)


def masked(r: Recorder, x: Tensor, mask: Tensor) -> Tensor:
    """`x.masked_fill(mask, value)`: keeps the mask."""
    return r.node("masked_fill", r.like(x, "masked_fill"), (x,), back_masked, (mask,))


def blanked(r: Recorder, x: Tensor, mask: Tensor) -> Tensor:
    """`x.masked_fill_(mask, 0)`."""
    out = Tensor(x.shape, x.format, x.storage)
    return r.node("masked_fill", out, (x,), back_masked, (mask,))


def back_masked(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.like(g, "masked_fill"),)


def flags(r: Recorder, shape: Shape, op: str) -> Tensor:
    return r.tensor(shape, BOOL, op)


def sort(r: Recorder, x: Tensor) -> tuple[Tensor, Tensor]:
    """One row of integers and where they stood."""
    out = r.like(x, "sort"), r.like(x, "sort")
    scratch = r.scratch(kernels.sort_buffers(1, x.count, x.format.block_bytes), "sort")
    del scratch
    return out


def rows_of(r: Recorder, x: Tensor, places: Tensor) -> Tensor:
    """`x[places]`: a copy of those rows; the backward adds into zeros, with the places sorted
    first."""
    out = r.tensor((*places.shape, *x.shape[1:]), x.format, "index")
    return r.node("index", out, (x,), back_rows, (places,), x.shape)


def back_rows(r: Recorder, node: Node, g: Tensor) -> Grads:
    out = r.tensor(node.extra, g.format, "zeros", grad_part(node, 0))
    scratch = r.scratch(kernels.index_put_accumulate(node.saved[0].count), "index_put")
    del scratch
    return (out,)


def grouped(r: Recorder, x: Tensor, weight: Tensor, ends: Tensor, *, transposed: bool) -> Tensor:
    """`grouped_mm`: rows up to each of `ends` times their group's matrix; rows of the result start
    at 16 bytes (ATen/native/GroupedMMUtils.h create_grouped_gemm_output_tensor)."""
    width = weight.shape[2] if transposed else weight.shape[1]
    aligned = kernels.up(width, 16 // x.format.block_bytes)
    out = r.tensor((x.shape[0], aligned), x.format, "grouped_mm")
    if aligned != width:
        out = seen(out, (x.shape[0], width), (aligned, 1))
        out.base = None
    flops = 2 * x.count * width
    r.compute(
        "matmul",
        flops,
        (x.count + weight.count + x.shape[0] * width) * x.format.block_bytes,
        x.format.math,
    )
    saved = (x if weight.needs else None, weight if x.needs else None, ends)
    return r.node(
        "grouped_mm", out, (x, weight), back_grouped, saved, (x.shape, weight.shape, flops)
    )


def back_grouped(r: Recorder, node: Node, g: Tensor) -> Grads:
    """The stacked matrices' gradient first, then the rows'."""
    x, weight, _ = node.saved
    shape, stack, flops = node.extra
    to_weight = product(r, node, 1, stack, g, flops) if x is not None else None
    return [product(r, node, 0, shape, g, flops) if weight is not None else None, to_weight]


def product(r: Recorder, node: Node, index: int, shape: Shape, g: Tensor, flops: int) -> Tensor:
    out = r.tensor(shape, g.format, "grouped_mm", grad_part(node, index))
    r.compute("matmul", flops, (g.count + out.count) * g.format.block_bytes, g.format.math)
    return out


def added_into(r: Recorder, x: Tensor, b: Tensor) -> Tensor:
    """`x.add_(b)`."""
    out = Tensor(x.shape, x.format, x.storage)
    out.strides, out.base = x.strides, x.base
    return r.node("add", out, (x, b), back_added)


def back_added(r: Recorder, node: Node, g: Tensor) -> Grads:
    return [g.view(*g.shape) if target is not None else None for target in node.inputs]
