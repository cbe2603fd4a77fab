"""Views and what copies where a view cannot be: `transpose`, `reshape`, `split`, `expand`, and the
batched matrix product.

As torch 2.13 runs them: a view allocates nothing and its gradient is a view or a copy
(ATen/native/TensorShape.cpp); pieces give a gradient of the whole's size
(tools/autograd/derivatives.yaml); `matmul` flattens its batch, and copies what does not flatten
(ATen/native/LinearAlgebra.cpp `_matmul_impl`).
"""

from __future__ import annotations

from memfit import kernels
from memfit.lower import ops
from memfit.lower.recorder import Recorder
from memfit.lower.strides import Strides, contiguous, normal, viewed
from memfit.lower.tensors import Grads, Node, Shape, Tensor


def seen(x: Tensor, shape: Shape, strides: Strides) -> Tensor:
    """The same storage otherwise. The view holds what it is a view of."""
    out = Tensor(shape, x.format, x.storage)
    out.strides, out.offset = strides, x.offset
    out.base = x.base or x.detach()
    return out


def indexed(r: Recorder, x: Tensor, shape: Shape, where: Tensor) -> Tensor:
    """`x[i]`, a copy; its gradient is put into zeros of the whole size (derivatives.yaml index)."""
    return r.node(
        "index", r.tensor(shape, x.format, "index"), (x,), back_indexed, (where,), x.shape
    )


def back_indexed(r: Recorder, node: Node, g: Tensor) -> Grads:
    whole = r.tensor(node.extra, g.format, "zeros")
    held = r.scratch(kernels.index_put_accumulate(g.shape[0]), "index_put")
    del held
    return (whole,)


def lying(x: Tensor) -> tuple[int, ...]:
    return contiguous(x.shape) if x.strides is None else x.strides


def permuted(x: Tensor, order: tuple[int, ...]) -> Tensor:
    strides = lying(x)
    shape = tuple(x.shape[dim] for dim in order)
    return seen(x, shape, normal(shape, tuple(strides[dim] for dim in order)))


def permute(r: Recorder, x: Tensor, *order: int) -> Tensor:
    return r.node(
        "permute",
        permuted(x, order),
        (x,),
        back_permute,
        extra=tuple(order.index(dim) for dim in range(len(order))),
    )


def back_permute(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (permuted(g, node.extra),)


def transpose(r: Recorder, x: Tensor, a: int, b: int) -> Tensor:
    order = list(range(len(x.shape)))
    order[a], order[b] = order[b], order[a]
    return permute(r, x, *order)


def reshape(r: Recorder, x: Tensor, *shape: int) -> Tensor:
    """A view where there can be one, else a copy."""
    out = reshaped(r, x, shape)
    return r.node("view", out, (x,), back_reshape, extra=x.shape)


def reshaped(r: Recorder, x: Tensor, shape: Shape) -> Tensor:
    possible, strides = viewed(x.shape, x.strides, shape)
    return seen(x, shape, strides) if possible else r.tensor(shape, x.format, "contiguous")


def back_reshape(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (reshaped(r, g, node.extra),)


def back_parts(r: Recorder, node: Node, g: Tensor) -> Grads:
    """The same block in the other form."""
    shape, format = node.extra
    out = seen(g, shape, None)
    out.format = format
    return (out,)


def heads(r: Recorder, x: Tensor, count: int) -> Tensor:
    """(B, S, N·H) as (B, N, S, H)."""
    b, s, width = x.shape
    return transpose(r, reshape(r, x, b, s, count, width // count), 1, 2)


def merged(r: Recorder, x: Tensor) -> Tensor:
    """(B, N, S, H) as (B, S, N·H), contiguous."""
    b, n, s, h = x.shape
    return reshape(r, ops.packed(r, transpose(r, x, 1, 2)), b, s, n * h)


def expand(r: Recorder, x: Tensor, *shape: int) -> Tensor:
    strides = tuple(
        0 if size == 1 and wanted != 1 else step
        for size, step, wanted in zip(x.shape, lying(x), shape, strict=True)
    )
    return r.node(
        "expand", seen(x, shape, normal(shape, strides)), (x,), back_expand, extra=x.shape
    )


def back_expand(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.tensor(node.extra, g.format, "sum"),)


def narrow(r: Recorder, x: Tensor, dim: int, size: int, step: int = 1) -> Tensor:
    """`x[..., a:b:step]` along `dim`. All of it is x itself."""
    dim %= len(x.shape)
    if size == x.shape[dim] and step == 1:
        return x
    strides = lying(x)
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    out = seen(x, shape, normal(shape, (*strides[:dim], strides[dim] * step, *strides[dim + 1 :])))
    return r.node("slice", out, (x,), back_piece, extra=x.shape)


def colon(r: Recorder, x: Tensor) -> Tensor:
    """`x[..., :]` where torch makes a slice of it."""
    return r.node("slice", seen(x, x.shape, x.strides), (x,), back_piece, extra=x.shape)


def select(r: Recorder, x: Tensor, dim: int) -> Tensor:
    """`x[..., i, :]`: the dimension is gone."""
    dim %= len(x.shape)
    strides = lying(x)
    shape = x.shape[:dim] + x.shape[dim + 1 :]
    return r.node(
        "select",
        seen(x, shape, normal(shape, strides[:dim] + strides[dim + 1 :])),
        (x,),
        back_piece,
        extra=x.shape,
    )


def back_piece(r: Recorder, node: Node, g: Tensor) -> Grads:
    """Zeros of the whole's size, written in part."""
    return (r.tensor(node.extra, g.format, node.op),)


def split(r: Recorder, x: Tensor, dim: int, *sizes: int) -> list[Tensor]:
    """`split` and `chunk`: views; the backward joins their gradients."""
    dim %= len(x.shape)
    return ops.split(r, x, tuple((*x.shape[:dim], size, *x.shape[dim + 1 :]) for size in sizes))


def matmul(r: Recorder, a: Tensor, b: Tensor) -> Tensor:
    """a @ b over the last two dimensions of four; heads that b shares are copied for each of
    a's."""
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    count = a.count // (rows * inner)
    if b.shape[:-2] != a.shape[:-2]:
        b = expand(r, b, *a.shape[:-2], inner, columns)
    out = bmm(r, reshape(r, a, count, rows, inner), reshape(r, b, count, inner, columns))
    return r.node("view", out.view(*a.shape[:-1], columns), (out,), back_reshape, extra=out.shape)


def bmm(r: Recorder, a: Tensor, b: Tensor) -> Tensor:
    shape = (*a.shape[:-1], b.shape[-1])
    chosen = r.chosen("bmm")
    out = r.put_out(lambda: r.tensor(shape, a.format, "matmul"), chosen)
    flops = 2 * out.count * a.shape[-1]
    r.compute(
        "matmul",
        flops,
        (a.count + b.count + out.count) * a.format.block_bytes,
        a.format.math,
        kept=chosen,
    )
    return r.node(
        "matmul",
        out,
        (a, b),
        ops.back_matmul,
        (a if b.needs else None, b if a.needs else None),
        (a.shape, b.shape, flops),
    )


def baddbmm(r: Recorder, a: Tensor, b: Tensor) -> Tensor:
    """β·start + α·a @ b, where `start` wants no gradient and α is not 1."""
    out = r.tensor((*a.shape[:-1], b.shape[-1]), a.format, "matmul")
    flops = 2 * out.count * a.shape[-1]
    r.compute(
        "matmul", flops, (a.count + b.count + out.count) * a.format.block_bytes, a.format.math
    )
    return r.node(
        "matmul",
        out,
        (a, b),
        back_baddbmm,
        (a if b.needs else None, b if a.needs else None),
        (a.shape, b.shape, flops),
    )


def back_baddbmm(r: Recorder, node: Node, g: Tensor) -> Grads:
    """The products, then α times them; `batch1` first."""
    a, b = node.saved
    return [
        None
        if other is None
        else r.like(ops.product(r, node, index, node.extra[index], g), "scale")
        for index, other in enumerate((b, a))
    ]
