"""torch.nn.functional as CUDA runs it, where frameworks call it and transformers does not."""

from __future__ import annotations

from memfit import kernels
from memfit.formats import FP32
from memfit.lower import ops
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor

FUSED_SINCE = (2, 9)  # torch


def rms_norm(x: Tensor, weight: Tensor | None, ctx: Context) -> Tensor:
    """`F.rms_norm`: one kernel from 2.9 on where the dtypes agree, else a composite in fp32 whose
    result is cast before it is weighed (ATen/native/layer_norm.cpp). Autocast runs it in fp32
    (ATen/autocast_mode.h fp32 list)."""
    r = ctx.r
    if ctx.autocast is not None:
        x = ops.cast(r, x, FP32)
        weight = None if weight is None else ops.cast(r, weight, FP32)
    if ctx.torch >= FUSED_SINCE and (weight is None or weight.format is x.format):
        return fused_rms_norm(r, x, weight, ctx.program.processors)
    wide = ops.cast(r, x, FP32)
    roots = ops.rsqrt(r, ops.mean(r, ops.square(r, wide)))  # ε is added in place
    normed = ops.cast(r, ops.mul(r, wide, roots), x.format)
    return normed if weight is None else ops.mul(r, normed, weight)


def fused_rms_norm(r: Recorder, x: Tensor, weight: Tensor | None, processors: int) -> Tensor:
    """Keeps its input and one fp32 number a row (ATen/native/cuda/layer_norm_kernel.cu)."""
    x = ops.packed(r, x)
    out = r.tensor(x.shape, x.format, "rms_norm")
    rows = r.tensor((*x.shape[:-1], 1), FP32, "rms_norm")
    inputs = (x,) if weight is None else (x, weight)
    return r.node("rms_norm", out, inputs, back_rms_norm, (x, weight, rows), (x.shape, processors))


def back_rms_norm(r: Recorder, node: Node, g: Tensor) -> Grads:
    """The input's gradient, the weight's, and for many short rows the partial sums of the
    latter."""
    shape, processors = node.extra
    width = shape[-1]
    to_x = r.tensor(shape, g.format, "rms_norm") if node.inputs[0] is not None else None
    weighs = len(node.inputs) > 1
    to_weight = (
        r.tensor((width,), g.format, "rms_norm", ops.grad_part(node, 1))
        if weighs and node.inputs[1] is not None
        else None
    )
    partial = (
        kernels.norm_backward(g.count // width, width, g.format.block_bytes, processors)
        if to_weight is not None
        else 0
    )
    held = r.scratch(partial, "rms_norm")
    del held
    return (to_x, to_weight) if weighs else (to_x,)
