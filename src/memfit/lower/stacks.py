"""LoRA on parameters that belong to no linear layer: routers and stacked experts (peft 0.21
tuners/lora/layer.py ParamWrapper).

For as long as the module runs, its parameter is replaced by W + s·B·A, as large as itself: made
once when the replacement is registered and dropped (torch 2.13 nn/utils/parametrize.py checks dtype
and shape so), then at the first use, and kept by what the products save.
"""

from __future__ import annotations

from collections.abc import Iterable

from memfit.formats import Format
from memfit.lower import ops
from memfit.lower.bound import Adapted, Bound
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor


class Replaced:
    """A module's parameters while it runs; `names` from the outermost wrapper to the innermost."""

    def __init__(self, names: Iterable[str], bound: Bound, ctx: Context) -> None:
        self.bound, self.ctx = bound, ctx
        self.factors: dict[str, tuple[Tensor, ...]] = {}
        self.known: dict[str, Tensor] = {}
        for name in names:
            adapter = bound.stacks.get(name)
            if adapter is not None:
                self.factors[name] = factors(adapter, bound[name], ctx)
                self.replacement(name)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.factors:
            return self.bound[name]
        if name not in self.known:
            self.known[name] = self.replacement(name)
        return self.known[name]

    def replacement(self, name: str) -> Tensor:
        r, weight, given = self.ctx.r, self.bound[name], self.factors[name]
        if len(given) == 1:
            return ops.add(r, weight, given[0])
        return folded(r, weight, given[0], given[1], self.bound.stacks[name].scaled)


def factors(adapter: Adapted, weight: Tensor, ctx: Context) -> tuple[Tensor, ...]:
    """Of a stack: B as (E, out, r) and A as (E, r, in), in its dtype (get_delta_factors). Of a
    matrix: their product, scaled, in its dtype (get_delta_weight)."""
    r = ctx.r
    if len(weight.shape) == 3:
        return factor(r, adapter.b, weight.format, True, weight.shape[0]), factor(
            r, adapter.a, weight.format, False, weight.shape[0]
        )
    from memfit.lower.linears import cast_weight

    a, b = (cast_weight(one, ctx) for one in (adapter.a, adapter.b))
    product = matrix_product(r, b, a)
    scaled = ops.scale(r, product)
    del product
    return (ops.cast(r, scaled, weight.format),)


def factor(r: Recorder, leaf: Tensor, format: Format, permuted: bool, experts: int) -> Tensor:
    """A view of the adapter's matrix by experts, or a copy in another dtype that lies like it."""
    rows, columns = leaf.shape
    shape = (experts, rows, columns // experts) if permuted else (experts, rows // experts, columns)
    out = (
        Tensor(shape, format, leaf.storage)
        if leaf.format is format
        else r.tensor(shape, format, "to")
    )
    return r.node("factor", out, (leaf,), back_factor, extra=(leaf.shape, leaf.format, permuted))


def back_factor(r: Recorder, node: Node, g: Tensor) -> Grads:
    """Cast back; what was permuted is then copied into the matrix's own order."""
    shape, format, permuted = node.extra
    if not permuted:
        return (
            r.tensor(shape, format, "to", "gradients")
            if g.format is not format
            else g.view(*shape),
        )
    cast = r.tensor(g.shape, format, "to") if g.format is not format else g
    out = r.tensor(shape, format, "clone", "gradients")
    del cast
    return (out,)


def folded(r: Recorder, weight: Tensor, b: Tensor, a: Tensor, scaled: bool) -> Tensor:
    """`baddbmm(W, B, A, alpha=s)`; B lies expert by expert innermost, which the kernel copies
    (ATen/native/cuda/Blas.cpp)."""
    out = r.tensor(weight.shape, weight.format, "baddbmm")
    copy = r.scratch(b.count * b.format.block_bytes, "contiguous_operand")
    flops = 2 * out.count * a.shape[-2]
    r.compute(
        "matmul",
        flops,
        (2 * out.count + a.count + b.count) * out.format.block_bytes,
        out.format.math,
    )
    del copy
    return r.node(
        "baddbmm",
        out,
        (b, a),
        back_folded,
        (b if a.needs else None, a if b.needs else None),
        (b.shape, a.shape, flops, scaled),
    )


def back_folded(r: Recorder, node: Node, g: Tensor) -> Grads:
    """To B first; each product, then s times it where s is not 1."""
    b, a = node.saved
    shapes, flops, scaled = node.extra[:2], node.extra[2], node.extra[3]
    results: list[Tensor | None] = [None, None]
    for index, other in enumerate((a, b)):
        if other is None:
            continue
        out = r.tensor(shapes[index], g.format, "matmul")
        copy = r.scratch(
            other.count * other.format.block_bytes if index else 0, "contiguous_operand"
        )
        r.compute(
            "matmul",
            flops,
            (g.count + out.count + other.count) * g.format.block_bytes,
            g.format.math,
        )
        del copy
        results[index] = r.like(out, "scale") if scaled else out
        del out
    return results


def matrix_product(r: Recorder, b: Tensor, a: Tensor) -> Tensor:
    """`B @ A` of two matrices."""
    chosen = r.chosen("mm")
    out = r.put_out(lambda: r.tensor((b.shape[0], a.shape[1]), b.format, "matmul"), chosen)
    flops = 2 * out.count * a.shape[0]
    r.compute(
        "matmul",
        flops,
        (a.count + b.count + out.count) * b.format.block_bytes,
        b.format.math,
        kept=chosen,
    )
    return r.node(
        "matmul",
        out,
        (b, a),
        ops.back_matmul,
        (b if a.needs else None, a if b.needs else None),
        (b.shape, a.shape, flops),
    )
