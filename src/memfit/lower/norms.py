"""Normalisation as each family's code writes it."""

from __future__ import annotations

from memfit.formats import FP32
from memfit.lower import ops
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.recorder import Tensor
from memfit.model.modules import Norm


def norm(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    ctx.r.where = bound.path(module.name)
    return ctx.programs.norms[module.style](x, module, bound, ctx)


def llama(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    """fp32 inside, cast back, then times the weight (transformers 5.23 modeling_llama.py LlamaRMSNorm)."""
    r = ctx.r
    wide = ops.cast(r, x, FP32)
    variance = ops.mean(r, ops.square(r, wide))
    hidden = ops.mul(r, wide, ops.rsqrt(r, ops.add_scalar(r, variance)))
    del wide
    return ops.mul(r, ops.cast(r, hidden, x.format), bound[f"{module.name}.weight"])


def layer(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    """torch.nn.LayerNorm; autocast runs it in fp32."""
    weight, bias = bound.tensors.get(f"{module.name}.weight"), bound.tensors.get(f"{module.name}.bias")
    if ctx.autocast is not None:
        x = ops.cast(ctx.r, x, FP32)
    return ops.layer_norm(ctx.r, x, weight, bias)


NORMS = {"llama": llama, "layer": layer}
