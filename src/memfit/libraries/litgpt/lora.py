"""LitGPT's projection of queries, keys and values: one matrix, and adapters for some of its three
parts (0.5.13 lora.py LoRAQKVLinear)."""

from __future__ import annotations

from dataclasses import replace

from memfit.formats import INT64
from memfit.libraries.bitsandbytes import linears as bnb
from memfit.lower import ops, views
from memfit.lower.bound import Adapted, Bound, BoundLinear
from memfit.lower.context import Context
from memfit.lower.linears import cast_weight
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.modules import Attention


def joined(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """(B, S, (N + 2·K)·H), whether the model's own checkpoint keeps one matrix or three."""
    layers = [bound.linear(one) for one in module.project]
    ctx.r.where = layers[0].path.rpartition(".")[0]
    if layers[0].packed is not None:
        out = from_packed(x, layers, ctx)
    else:
        out = product(
            x,
            [layer.weight for layer in layers],
            [layer.bias for layer in layers if layer.bias is not None],
            ctx,
        )
    adapters = [layer.adapter for layer in layers if layer.adapter is not None]
    if not adapters:
        return out
    return ops.add(ctx.r, out, adapted(x, adapters, layers, module, ctx))


def from_packed(x: Tensor, layers: list[BoundLinear], ctx: Context) -> Tensor:
    """The same of a packed matrix; int8 parts, which come from other publishers' checkpoints, are
    multiplied one by one here."""
    parts = [layer.packed for layer in layers if layer.packed is not None]
    if len(parts) == 1:
        return bnb.forward(x, layers[0], ctx)
    if parts[0].bits == 8:
        outs = tuple(bnb.forward(x, layer, ctx) for layer in layers)
        return ops.cat(ctx.r, outs, (*outs[0].shape[:-1], sum(out.shape[-1] for out in outs)))

    def joint(tensors: list[Tensor]) -> Tensor:
        return Tensor((sum(one.count for one in tensors),), tensors[0].format, None)

    outputs = sum(layer.outputs for layer in layers)
    whole = replace(
        parts[0],
        weight=joint([one.weight for one in parts]),
        scales=joint([one.scales for one in parts]),
        shape=(outputs, parts[0].shape[1]),
    )
    return bnb.forward(
        x, replace(layers[0], outputs=outputs, weight=whole.weight, packed=whole, adapter=None), ctx
    )


def product(x: Tensor, weights: list[Tensor], biases: list[Tensor], ctx: Context) -> Tensor:
    """One linear layer whose matrix is known in parts."""
    r = ctx.r
    if ctx.autocast is not None:
        x = ops.cast(r, x, ctx.autocast)
        weights, biases = ([cast_weight(one, ctx) for one in some] for some in (weights, biases))
    x = ops.packed(r, x)
    outputs = sum(weight.shape[0] for weight in weights)
    out = r.tensor((*x.shape[:-1], outputs), x.format, "linear")
    flops = 2 * x.count * outputs
    r.compute(
        "linear",
        flops,
        (x.count + out.count + x.shape[-1] * outputs) * x.format.block_bytes,
        x.format.math,
    )
    saved = (x if any(weight.needs for weight in weights) else None, *(weights if x.needs else ()))
    shapes = (
        x.shape,
        tuple(weight.shape for weight in weights),
        tuple(bias.shape for bias in biases),
        flops,
    )
    return r.node("linear", out, (x, *weights, *biases), back_product, saved, shapes)


def back_product(r: Recorder, node: Node, g: Tensor) -> Grads:
    """The parts' gradients are made at once; without a bias they are the first, with one the
    input's is."""
    shape, weights, biases, flops = node.extra
    g = ops.rows(r, g)
    traffic = (g.count + shape[0] * shape[-1]) * g.format.block_bytes

    def matrices() -> list[Tensor | None]:
        found = [
            r.tensor(one, g.format, "linear", ops.grad_part(node, 1 + index))
            if node.inputs[1 + index] is not None
            else None
            for index, one in enumerate(weights)
        ]
        if any(one is not None for one in found):
            r.compute("linear", flops, traffic, g.format.math)
        return [ops.turned(one) for one in found]

    def source() -> Tensor | None:
        if node.inputs[0] is None:
            return None
        r.compute("linear", flops, traffic, g.format.math)
        return ops.unfolded(r.tensor(shape, g.format, "linear"))

    if not biases:
        first = matrices()
        return [source(), *first]
    to_x, first = source(), matrices()
    place = 1 + len(weights)
    sums = [
        r.tensor(one, g.format, "sum", ops.grad_part(node, place + index))
        if node.inputs[place + index] is not None
        else None
        for index, one in enumerate(biases)
    ]
    return [to_x, *first, *sums]


# ---------------------------------------------------------------------------------------- adapters
def adapted(
    x: Tensor, adapters: list[Adapted], layers: list[BoundLinear], module: Attention, ctx: Context
) -> Tensor:
    """One A for all parts, a convolution with each part's B, zeros for parts without an adapter,
    and the scaling."""
    r = ctx.r
    low = product(
        ops.dropout(r, x, ctx.dropout(adapters[0].dropout)), [one.a for one in adapters], [], ctx
    )
    low = views.transpose(r, low, 1, 2)
    matrices = [one.b if ctx.autocast is None else cast_weight(one.b, ctx) for one in adapters]
    if len(layers) == 1 or module.heads == module.kv_heads:
        high = convolved(r, low, matrices)
    else:
        parts = [
            convolved(r, one, [matrix])
            for one, matrix in zip(
                views.split(r, low, 1, *(one.rank for one in adapters)), matrices, strict=True
            )
        ]
        high = ops.cat(
            r, tuple(parts), (low.shape[0], sum(part.shape[1] for part in parts), low.shape[2])
        )
        del parts
    high = views.transpose(r, high, 1, 2)
    outputs = sum(layer.outputs for layer in layers)
    if high.shape[2] != outputs:
        high = padded(r, high, outputs)
    return ops.scale(r, high)


def convolved(r: Recorder, x: Tensor, matrices: list[Tensor]) -> Tensor:
    """conv1d of (B, rank, S) with (out, rank, 1), grouped where there are several: operands are
    copied to lie in order (ATen/native/Convolution.cpp, cudnn/Conv_v8.cpp)."""
    copy = r.tensor(x.shape, x.format, "contiguous") if x.strides is not None else None
    out = r.tensor(
        (x.shape[0], sum(one.shape[0] for one in matrices), x.shape[2]), x.format, "conv1d"
    )
    r.compute(
        "conv1d",
        2 * out.count * matrices[0].shape[1],
        (x.count + out.count) * x.format.block_bytes,
        x.format.math,
    )
    del copy
    saved = (x, *matrices)
    return r.node(
        "conv1d",
        out,
        (x, *matrices),
        back_convolved,
        saved,
        (x.shape, tuple(one.shape for one in matrices)),
    )


def back_convolved(r: Recorder, node: Node, g: Tensor) -> Grads:
    shape, shapes = node.extra
    copies = [
        r.tensor(one.shape, one.format, "contiguous")
        for one in (g, node.saved[0])
        if one.strides is not None
    ]
    to_x = r.tensor(shape, g.format, "conv1d") if node.inputs[0] is not None else None
    r.compute(
        "conv1d",
        4 * g.count * shapes[0][1],
        (g.count + shape[0] * shape[1] * shape[2]) * g.format.block_bytes,
        g.format.math,
    )
    to_b = [
        r.tensor(one, g.format, "conv1d", ops.grad_part(node, 1 + index))
        for index, one in enumerate(shapes)
    ]
    del copies
    return [to_x, *to_b]


def padded(r: Recorder, x: Tensor, outputs: int) -> Tensor:
    """Zeros, and the parts copied into them along a copy of the places, which both are kept
    (LoRAQKVLinear.zero_pad; torch 2.13 tools/autograd/derivatives.yaml index_copy)."""
    out = r.tensor((*x.shape[:-1], outputs), x.format, "zeros")
    places = r.tensor((x.shape[-1],), INT64, "clone")
    return r.node("index_copy", out, (x,), back_padded, (places, x), x.shape)


def back_padded(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.tensor(node.extra, g.format, "index_select"),)
