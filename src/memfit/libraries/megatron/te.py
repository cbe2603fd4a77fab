"""Transformer Engine's modules (2.11 and 2.18): norm and product in one, products, SwiGLU and
rotary positions fused. Gradients of weights are added into one fp32 buffer; tokens stand before
sequences.

With tensor parallelism a column-parallel product gathers its normed input and a row-parallel one
scatters its result where tokens are split between them (sequence parallelism); else the results are
added up in place.
"""

from __future__ import annotations

from memfit.formats import FP32
from memfit.libraries.megatron.ranks import Ranks, of
from memfit.lower import functional, ops
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.modules import MLP, Attention, Block, Linear, Norm


def parts_of(mixer: Attention | MLP) -> tuple[tuple[Linear, ...], Linear]:
    """The layers that are one product after the norm, and the one at the end."""
    if isinstance(mixer, Attention):
        return mixer.project, mixer.out
    assert mixer.gate is not None
    return (mixer.gate, mixer.up), mixer.down


def rms_norm(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    """TENorm: keeps its input and an fp32 number a row."""
    return functional.fused_rms_norm(
        ctx.r, x, bound[f"{module.name}.weight"], ctx.program.processors
    )


def entered(x: Tensor, block: Block, bound: Bound, ctx: Context) -> Tensor:
    """The norm before a block, and the layers after it that are one product."""
    assert block.norm is not None
    assert isinstance(block.mixer, (Attention, MLP))
    return normed_product(x, block.norm, parts_of(block.mixer)[0], bound, ctx)


def normed_product(
    x: Tensor, norm: Norm, linears: tuple[Linear, ...], bound: Bound, ctx: Context
) -> Tensor:
    """LayerNormLinear, column-parallel: keeps its input, the normed one, and an fp32 number a row;
    what it gathers goes when the product is made (module/layernorm_linear.py)."""
    r, ranks, layers = ctx.r, of(ctx), [bound.linear(one) for one in linears]
    r.where = layers[0].path
    x = ops.packed(r, x)
    weight, outputs = bound[f"{norm.name}.weight"], sum(one.outputs for one in layers)
    normed, rows = (
        r.tensor(x.shape, x.format, "layernorm_linear"),
        r.tensor(x.shape[:-1], FP32, "layernorm_linear"),
    )
    whole = ranks.gather(r, normed) if ranks.sequence else normed
    out = r.tensor((*whole.shape[:-1], outputs), x.format, "layernorm_linear")
    flops = cost(r, whole, outputs)
    del whole
    biases = [one.bias for one in layers if one.bias is not None]
    inputs = (x, weight, *biases, *(one.weight for one in layers))
    saved = (x, normed, rows, *(one.weight for one in layers))
    return r.node(
        "layernorm_linear",
        out,
        inputs,
        back_entered,
        saved,
        (tuple(one.shape for one in biases), flops, ranks),
    )


def back_entered(r: Recorder, node: Node, g: Tensor) -> Grads:
    """The gathered input again, the normed input's gradient and its sum over the ranks, the
    matrix's gradient into the fp32 buffer; then what was normed is let go, and the norm's backward
    follows. The gradient before the sum is a variable until the end."""
    x, normed, *_ = node.saved
    biases, flops, ranks = node.extra
    sums = [r.tensor(one, g.format, "layernorm_linear") for one in biases]
    whole = ranks.gather(r, normed) if ranks.sequence else None
    inner = r.tensor((*g.shape[:-1], x.shape[-1]), g.format, "layernorm_linear")
    part = summed(r, inner, ranks)
    gradients(r, "layernorm_linear", g, x.shape[-1], flops)
    del whole, normed
    node.saved = (x,)
    to_x, to_norm = (
        r.tensor(x.shape, g.format, "layernorm_linear"),
        r.tensor(x.shape[-1:], g.format, "layernorm_linear"),
    )
    del inner, part
    dummy(r, g, x.shape[-1])
    return [to_x, to_norm, *sums, *(None for _ in node.inputs[2 + len(sums) :])]


def entering(
    x: Tensor, linears: tuple[Linear, ...], bound: Bound, ctx: Context, ranks: Ranks
) -> Tensor:
    """TE's Linear: column-parallel over `ranks`, or of one rank, whole on each. Keeps its input as
    it is, and gathers it again in backward (module/linear.py)."""
    r, layers = ctx.r, [bound.linear(one) for one in linears]
    r.where = layers[0].path
    x = ops.packed(r, x)
    whole = ranks.gather(r, x) if ranks.sequence else x
    out = r.tensor((*whole.shape[:-1], sum(one.outputs for one in layers)), x.format, "te_linear")
    flops = cost(r, whole, out.shape[-1])
    del whole
    biases = [one.bias for one in layers if one.bias is not None]
    extra = (tuple(one.shape for one in biases), flops, ranks)
    return r.node(
        "te_linear", out, (x, *biases, *(one.weight for one in layers)), back_entering, (x,), extra
    )


def back_entering(r: Recorder, node: Node, g: Tensor) -> Grads:
    (x,) = node.saved
    biases, flops, ranks = node.extra
    sums = [r.tensor(one, g.format, node.op) for one in biases]
    whole = ranks.gather(r, x) if ranks.sequence else None
    inner = r.tensor((*g.shape[:-1], x.shape[-1]), g.format, node.op)
    to_x = summed(r, inner, ranks)
    gradients(r, node.op, g, x.shape[-1], flops)
    del whole, inner
    dummy(r, g, x.shape[-1])
    return [to_x, *sums, *(None for _ in node.inputs[1 + len(sums) :])]


def summed(r: Recorder, x: Tensor, ranks: Ranks) -> Tensor:
    """A sum over the ranks: scattered, or in place."""
    if ranks.sequence:
        return ranks.scatter(r, x)
    if ranks.size > 1:
        ranks.add_up(r, x)
    return x


def product(x: Tensor, linear: Linear, bound: Bound, ctx: Context) -> Tensor:
    """TE's Linear, row-parallel: keeps its input (module/linear.py)."""
    layer, r, ranks = bound.linear(linear), ctx.r, of(ctx)
    r.where = layer.path
    x = ops.packed(r, x)
    whole = r.tensor((*x.shape[:-1], layer.outputs), x.format, "te_linear")
    flops = cost(r, x, layer.outputs)
    out = summed(r, whole, ranks)
    del whole
    return r.node(
        "te_linear", out, (x, layer.weight), back_product, (x, layer.weight), (flops, ranks)
    )


def back_product(r: Recorder, node: Node, g: Tensor) -> Grads:
    """The gathered gradient goes when the matrix's is made."""
    x, _ = node.saved
    flops, ranks = node.extra
    whole = ranks.gather(r, g) if ranks.sequence else g
    to_x = r.tensor(x.shape, g.format, node.op)
    gradients(r, node.op, whole, x.shape[-1], flops)
    dummy(r, whole, x.shape[-1])
    return [to_x, None]


def head_product(x: Tensor, weight: Tensor, outputs: int, ctx: Context) -> Tensor:
    """Megatron's own column-parallel product, which gathers into a buffer that is never given back
    (core/tensor_parallel/layers.py LinearWithGradAccumulationAndAsyncCommunication)."""
    r, ranks = ctx.r, of(ctx)
    x = ops.packed(r, x)
    tokens = x.shape[0] * ranks.parts
    if ranks.sequence:
        r.comm(
            "all_gather",
            tokens * x.count // x.shape[0] * x.format.block_bytes,
            ranks.size,
            ranks.name,
        )
    out = r.tensor((tokens, *x.shape[1:-1], outputs), x.format, "linear")
    flops = cost(r, out, x.shape[-1], "linear")
    return r.node("linear", out, (x, weight), back_head, (x, weight), (flops, ranks))


def back_head(r: Recorder, node: Node, g: Tensor) -> Grads:
    x, _ = node.saved
    flops, ranks = node.extra
    gradients(r, node.op, g, x.shape[-1], flops)
    to_x = r.tensor((*g.shape[:-1], x.shape[-1]), g.format, node.op)
    out = summed(r, to_x, ranks)
    dummy(r, g, x.shape[-1])
    return [out, None]


def dummy(r: Recorder, g: Tensor, inputs: int) -> None:
    """What stands for a matrix's gradient, which is added into a buffer: a block for each shape,
    made once (module/base.py get_dummy_wgrad)."""
    r.standing((g.shape[-1], inputs), g.format, "dummy_wgrad", "workspace")


def gradients(r: Recorder, op: str, g: Tensor, inputs: int, flops: int, kernels: int = 1) -> None:
    """The input's gradient, and the matrix's, which is added to a sum in fp32 (Megatron's gradient
    accumulation fusion). `kernels`: matrices that share the rows of `g`."""
    size, rows = g.format.block_bytes, g.count // g.shape[-1]
    passed, weights = (g.count + rows * inputs) * size, kernels * inputs * g.shape[-1]
    r.compute(op, flops, passed + weights * size, g.format.math, kernels=kernels)
    r.compute(op, flops, passed + 2 * weights * FP32.block_bytes, g.format.math, kernels=kernels)


def cost(r: Recorder, x: Tensor, outputs: int, op: str = "te_linear") -> int:
    flops = 2 * x.count * outputs
    rows = x.count // x.shape[-1]
    r.compute(
        op,
        flops,
        (x.count + rows * outputs + x.shape[-1] * outputs) * x.format.block_bytes,
        x.format.math,
    )
    return flops


def swiglu(x: Tensor, where: str, r: Recorder) -> Tensor:
    """silu(x₁)·x₂, compiled: keeps its input (fusions/fused_bias_swiglu.py SwiGLUFunction)."""
    r.where = where
    return r.node(
        "swiglu",
        r.tensor((*x.shape[:-1], x.shape[-1] // 2), x.format, "swiglu"),
        (x,),
        back_alike,
        (x,),
        x.shape,
    )


def turned(x: Tensor, r: Recorder) -> Tensor:
    """Fused rotary positions keep the angles alone (TE attention/rope.py FusedRoPEFunc)."""
    return r.node("rope", r.tensor(x.shape, x.format, "rope"), (x,), back_alike, (), x.shape)


def back_alike(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.tensor(node.extra, g.format, node.op),)
