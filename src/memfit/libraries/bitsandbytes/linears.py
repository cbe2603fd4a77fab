"""bitsandbytes' linear layers: what undoing the packing holds, forward and backward.

Both are autograd functions whose context keeps what it needs as plain attributes: no saved-tensor
hook sees them, so a checkpoint neither drops nor counts them, and they go with the graph
(bitsandbytes 0.50 autograd/_functions.py).
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.formats import BF16, BOOL, FORMATS, FP16, FP32, INT8, INT32, Format
from memfit.kernels import up
from memfit.libraries.bitsandbytes.packing import BLOCK, PLAIN, pack, unpacked, unpacked_scales
from memfit.lower import ops
from memfit.lower.bound import BoundLinear
from memfit.lower.context import Context
from memfit.lower.packing import Packed
from memfit.lower.programs import Programs
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.modules import Linear
from memfit.program import Program

FUSED = (0, 50)  # the first version whose kernel multiplies by packed weights, for few rows
FUSED_ROWS = (
    4  # rows that always take it; up to 1536 it depends on the GPU, and unpacking is assumed here
)
NAMED = (
    0,
    47,
    # before, the first input decided the compute dtype, whatever was asked for
    # (Linear4bit.set_compute_type)
)
LEAN = (0, 43)  # before, the input was kept for a gradient of the weight that never comes


def forward(x: Tensor, layer: BoundLinear, ctx: Context) -> Tensor:
    assert layer.packed is not None
    return (
        four_bits(x, layer, layer.packed, ctx)
        if layer.packed.bits == 4
        else eight_bits(x, layer, layer.packed, ctx)
    )


def four_bits(x: Tensor, layer: BoundLinear, packed: Packed, ctx: Context) -> Tensor:
    """`Linear4bit.forward`: the input in the compute dtype, the output cast back."""
    r, kind = ctx.r, x.format
    x = ops.cast(r, x, compute_format(x, ctx))
    rows = x.count // x.shape[-1]
    version = ctx.job.version("bitsandbytes")
    aligned = x.shape[-1] % BLOCK == 0
    fused = aligned and (
        rows <= FUSED_ROWS if version >= FUSED else rows == 1 and not (r.grad and x.needs)
    )
    if fused:
        scales = unpacked_scales(r, packed) if version < FUSED else []
        out = r.tensor((*x.shape[:-1], layer.outputs), x.format, "gemm_4bit")
        r.compute(
            "gemm_4bit",
            2 * rows * x.shape[-1] * layer.outputs,
            packed.weight.count + (x.count + out.count) * x.format.block_bytes,
            x.format.math,
        )
        del scales
    else:
        out = unpacked_product(x, layer, packed, ctx)
    kept = r.keep(x) if version < LEAN and x.needs else None
    out = r.node("gemm_4bit", out, (x,), back_four_bits, extra=(packed, x.shape, x.format, kept))
    return ops.cast(r, out, kind)


def compute_format(x: Tensor, ctx: Context) -> Format:
    assert ctx.program.quant is not None
    if ctx.job.version("bitsandbytes") < NAMED and x.format in (FP32, BF16):
        return x.format
    return FORMATS[ctx.program.quant.compute]


def unpacked_product(x: Tensor, layer: BoundLinear, packed: Packed, ctx: Context) -> Tensor:
    """The weight unpacked, then an ordinary product. From 0.50 on it comes in the input's dtype and
    the scales stay beside it (backends/cuda/ops.py _dequant_linear_fallback); before, it comes as
    it was packed and is cast."""
    r = ctx.r
    rows = x.count // x.shape[-1]
    if ctx.job.version("bitsandbytes") >= FUSED:
        scales = unpacked_scales(r, packed)
        if scales:
            scales.append(r.like(scales[0], "add", "temporaries"))
        weight = r.tensor(packed.shape, x.format, "dequantize_4bit", "temporaries")
    else:
        scales = []
        weight = unpacked(r, packed, x.format)
    factor, result = x, x.format
    if ctx.autocast is not None and ctx.autocast is not x.format:
        result = ctx.autocast
        factor = r.tensor(x.shape, result, "to", "temporaries")
        cast = r.tensor(packed.shape, result, "to", "temporaries")
    else:
        cast = None
    out = r.tensor((*x.shape[:-1], layer.outputs), result, "linear")
    r.compute(
        "linear",
        2 * rows * x.shape[-1] * layer.outputs,
        (x.count + out.count + weight.count) * result.block_bytes,
        result.math,
    )
    del weight, scales, factor, cast
    return out


def back_four_bits(r: Recorder, node: Node, g: Tensor) -> Grads:
    """Unpacked once more, in the gradient's dtype."""
    packed, shape, format, _ = node.extra
    g = ops.rows(r, g)
    weight = unpacked(r, packed, g.format)
    to_x = r.tensor(shape, g.format, "linear")
    r.compute(
        "linear",
        2 * g.count * shape[-1],
        (g.count + to_x.count + weight.count) * g.format.block_bytes,
        g.format.math,
    )
    del weight
    return (to_x if g.format is format else r.tensor(shape, format, "to"),)


def eight_bits(x: Tensor, layer: BoundLinear, packed: Packed, ctx: Context) -> Tensor:
    """`Linear8bitLt.forward` with threshold 6: the input in fp16, then in bytes with a scale a row;
    its outliers are looked for (and, here, not found: they would add a product as large as the
    output after the int32 one is gone). The input is kept, though nothing asks for it."""
    r = ctx.r
    if len(x.shape) > 3:  # bitsandbytes 0.50 backends/cuda/ops.py _int8_linear_matmul_impl
        raise InputError.one(
            (
                f"bitsandbytes' int8 does not support inputs with {len(x.shape)} "
                f"dimensions: `{layer.path}`"
            ),
            where="job.quant",
            hint="use `nf4`, or `quant_skip`",
        )
    x = ops.packed(r, x)
    if ctx.job.version("bitsandbytes") < PLAIN:
        return tiled_eight_bits(x, layer, packed, r)
    rows = (x.count // x.shape[-1], x.shape[-1])
    half = x if x.format is FP16 else r.tensor(x.shape, FP16, "to", "temporaries")
    scales = r.tensor((rows[0],), FP32, "int8_vectorwise_quant", "temporaries")
    values = r.tensor(x.shape, INT8, "int8_vectorwise_quant", "temporaries")
    size = r.tensor(x.shape, FP16, "abs", "temporaries")
    large = r.tensor(x.shape, BOOL, "ge", "temporaries")
    del size
    found = r.tensor((1,), BOOL, "any", "temporaries")
    del large, found, half
    shape = (*x.shape[:-1], layer.outputs)
    product = r.tensor(shape, INT32, "int8_linear_matmul", "temporaries")
    r.compute(
        "int8_linear_matmul",
        2 * rows[0] * rows[1] * layer.outputs,
        x.count + packed.weight.count + 4 * product.count,
        "int8",
    )
    half_out = r.tensor(shape, FP16, "int8_mm_dequant")
    out = half_out if x.format is FP16 else r.tensor(shape, x.format, "to")
    del product, half_out
    del values, scales
    return r.node(
        "int8_matmul",
        out,
        (x,),
        back_eight_bits,
        extra=(packed, x.shape, x.format, r.keep(x) if x.needs else None),
    )


def tiled_eight_bits(x: Tensor, layer: BoundLinear, packed: Packed, r: Recorder) -> Tensor:
    """As it ran before 0.45, without gradients: bytes by rows and by columns, tiles of 32 for
    input, weight and product, and a copy of the output. The weight is laid in tiles at its first
    use, beside the rows (0.43 autograd/_functions.py MatMul8bitLt, nn/modules.py
    Linear8bitLt.forward)."""
    tokens, inputs = x.count // x.shape[-1], x.shape[-1]
    half = x if x.format is FP16 else r.tensor(x.shape, FP16, "to", "temporaries")
    scales = [r.tensor((count,), FP32, "double_quant", "temporaries") for count in (tokens, inputs)]
    counts = r.tensor(
        (up(tokens, 16) * (up(inputs, 256) // 256) + 1,), INT32, "double_quant", "temporaries"
    )
    values = [r.tensor(x.shape, INT8, "double_quant", "temporaries") for _ in ("columns", "rows")]
    del counts, half
    weight = packed.weight
    if not packed.tiled:
        layer.weight = packed.weight = r.tensor(
            (up(layer.outputs, 32), up(inputs, 32)), INT8, "transform", "weights"
        )
        packed.tiled = True
    tiles = r.tensor((tokens, up(inputs, 32)), INT8, "transform", "temporaries")
    product = r.tensor((tokens, up(layer.outputs, 32)), INT32, "igemmlt", "temporaries")
    r.compute(
        "int8_linear_matmul",
        2 * tokens * inputs * layer.outputs,
        x.count + packed.weight.count + 4 * product.count,
        "int8",
    )
    shape = (*x.shape[:-1], layer.outputs)
    out = r.tensor(shape, FP16, "mm_dequant", "temporaries")
    stats = [
        r.tensor((count,), FP32, "mm_dequant", "temporaries") for count in (tokens, layer.outputs)
    ]
    del stats
    cast = out if x.format is FP16 else r.tensor(shape, x.format, "to", "temporaries")
    del out
    result = r.tensor(shape, x.format, "clone")
    del cast, product, tiles, values, scales, weight
    return result


def back_eight_bits(r: Recorder, node: Node, g: Tensor) -> Grads:
    """The weight once more in the input's dtype, scaled in place; the result is a view of the
    product."""
    packed, shape, format, _ = node.extra
    g = ops.rows(r, g)
    weight = r.tensor(packed.shape, format, "to", "temporaries")
    scale = r.tensor((packed.shape[0], 1), FP32, "mul", "temporaries")
    del scale
    cast = g if g.format is format else r.tensor(g.shape, format, "to")
    to_x = r.tensor(shape, format, "linear")
    r.compute(
        "linear",
        2 * g.count * shape[-1],
        (g.count + to_x.count + weight.count) * format.block_bytes,
        format.math,
    )
    del weight, cast
    return (ops.unfolded(to_x),)


class BitsAndBytes:
    """Weights of 4 or 8 bits."""

    def pack(self, r: Recorder, program: Program, linear: Linear, format: Format) -> Packed:
        return pack(r, program, linear, format)

    def forward(self, x: Tensor, layer: BoundLinear, ctx: Context) -> Tensor:
        return forward(x, layer, ctx)


PACKING = BitsAndBytes()


def overlay(programs: Programs, program: Program) -> Programs:
    return programs.replace(packing=PACKING)
