"""Experts whose matrices stay as they are stored: fp8 in blocks, or MXFP4. Such matrices are never
trained.

transformers 5.23 integrations/finegrained_fp8.py fp8_grouped_mm_experts_forward,
FP8GroupedMatmulFunction; integrations/mxfp4.py Mxfp4GptOssMLP. MXFP4's kernels (triton_kernels
matmul_ogs) gather rows as they read them, and write one row for each choice before they add a
token's rows together; what they hold beside that is small and left out.
"""

from __future__ import annotations

from memfit.formats import FP8, FP32, INT32
from memfit.lower import ops as plain
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.stored import BLOCK
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.modules import MoE

AT_ONCE = (
    2**30
    # bytes of matrices that backward unpacks at a time
    # (FP8GroupedMatmulFunction.dequant_budget_bytes)
)


def grouped(r: Recorder, x: Tensor, weight: Tensor, ends: Tensor, skew: float) -> Tensor:
    """The input is made fp8 for the occasion; nothing of it is kept. `skew`: the busiest expert's
    share over the balanced one."""
    rows, width, outputs = x.shape[0], x.shape[1], weight.shape[1]
    held = (
        r.tensor(x.shape, FP8, "quantize", "temporaries"),
        r.tensor((rows, -(-width // BLOCK)), FP32, "quantize", "temporaries"),
    )
    out = r.tensor((rows, outputs), x.format, "grouped_mm")
    r.compute(
        "matmul",
        2 * x.count * outputs,
        (x.count + out.count) * x.format.block_bytes + weight.format.bytes(weight.count),
        x.format.math,
    )
    del held
    return r.node("grouped_mm", out, (x,), back_grouped, (ends,), (x.shape, weight.shape, skew))


def back_grouped(r: Recorder, node: Node, g: Tensor) -> Grads:
    """Matrices are unpacked, all at once or a part of them at a time; the first part has the
    busiest expert."""
    shape, (experts, outputs, inputs), skew = node.extra
    size = outputs * inputs * g.format.block_bytes
    chunk = max(1, AT_ONCE // size)
    if chunk >= experts:
        unpacked = r.tensor((experts, outputs, inputs), g.format, "dequantize", "temporaries")
        out = r.tensor(shape, g.format, "grouped_mm")
        del unpacked
        return (out,)
    out = r.tensor(shape, g.format, "zeros")
    busiest = min(shape[0], int(skew * shape[0] / experts))
    for first in range(0, experts, chunk):
        count = min(chunk, experts - first)
        unpacked = r.tensor((count, outputs, inputs), g.format, "dequantize", "temporaries")
        rows = (shape[0] - busiest) * (count - (first == 0)) // (experts - 1) + busiest * (
            first == 0
        )
        part = r.tensor((rows, shape[1]), g.format, "grouped_mm")
        del part, unpacked
    return (out,)


def mxfp4(
    x: Tensor, weights: Tensor, places: Tensor, module: MoE, bound: Bound, ctx: Context
) -> Tensor:
    """Two products whose activation and whose sum over a token's experts are part of them."""
    r, rows = ctx.r, places.count
    name = f"{module.name}.{module.experts_name}"
    order = [r.tensor((rows,), INT32, op) for op in ("sort", "argsort")]
    scale = r.tensor((rows,), weights.format, "index")
    wide = plain.cast(r, bound[f"{name}.gate_up_proj_bias"], FP32)
    inner = product(r, rows, module.inputs, module.width, 2, x)
    wide = plain.cast(r, bound[f"{name}.down_proj_bias"], FP32)
    apart = product(r, rows, module.width, module.inputs, 1, x)
    out = r.like(x, "sum")
    del apart, inner, wide, scale, order
    return out


def product(r: Recorder, rows: int, inputs: int, outputs: int, halves: int, like: Tensor) -> Tensor:
    """Of `halves` as many columns as come out."""
    out = r.tensor((rows, outputs), like.format, "matmul_ogs")
    r.compute(
        "matmul",
        2 * rows * inputs * outputs * halves,
        (rows * inputs + out.count) * like.format.block_bytes,
        like.format.math,
    )
    return out
