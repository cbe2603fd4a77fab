"""Normalisation as each family's code writes it. Names of variables follow that code, so that what
it holds is held here."""

from __future__ import annotations

from memfit.formats import FP32
from memfit.lower import ops
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Tensor
from memfit.model.modules import Norm


def norm(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    ctx.r.where = bound.path(module.name)
    if ctx.engine.inner:
        leaves = tuple(bound.tensors.get(f"{module.name}.{name}") for name in ("weight", "bias"))
        return ctx.engine.leave(
            leaves,
            ctx.programs.norms[module.style](ctx.engine.enter(leaves, x), module, bound, ctx),
        )
    return ctx.programs.norms[module.style](x, module, bound, ctx)


def weight_of(module: Norm, bound: Bound) -> Tensor:
    return bound[f"{module.name}.weight"]


def llama(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    """fp32 inside, cast back, then times the weight (transformers 5.23 modeling_llama.py
    LlamaRMSNorm)."""
    r = ctx.r
    hidden = ops.cast(r, x, FP32)
    variance = ops.mean(r, ops.square(r, hidden))
    hidden = unit(r, hidden, variance)
    return ops.mul(r, weight_of(module, bound), ops.cast(r, hidden, x.format))


def unit(r: Recorder, hidden: Tensor, variance: Tensor) -> Tensor:
    """hidden · rsqrt(variance + ε)."""
    return ops.mul(r, hidden, ops.rsqrt(r, ops.add_scalar(r, variance)))


def olmo2(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    """The weight's product in fp32, then cast (modeling_olmo2.py Olmo2RMSNorm, modeling_gpt_oss.py
    GptOssRMSNorm)."""
    return weighed_wide(x, weight_of(module, bound), ctx)


def helium(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    """As olmo2, with the weight cast up first, after the rest (modeling_helium.py
    HeliumRMSNorm)."""
    return weighed_wide(x, weight_of(module, bound), ctx, widened=True)


def weighed_wide(x: Tensor, weight: Tensor, ctx: Context, *, widened: bool = False) -> Tensor:
    r = ctx.r
    hidden = ops.cast(r, x, FP32)
    variance = ops.mean(r, ops.square(r, hidden))
    hidden = unit(r, hidden, variance)
    return ops.cast(
        r, ops.mul(r, ops.cast(r, weight, FP32) if widened else weight, hidden), x.format
    )


def gemma(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    """Everything in fp32, the weight as its difference from 1, then cast (modeling_gemma.py
    GemmaRMSNorm)."""
    r = ctx.r
    output = itself_unit(r, ops.cast(r, x, FP32))
    output = ops.mul(r, output, ops.add_scalar(r, ops.cast(r, weight_of(module, bound), FP32)))
    return ops.cast(r, output, x.format)


def itself_unit(r: Recorder, x: Tensor) -> Tensor:
    """GemmaRMSNorm._norm: one expression, no variable."""
    return ops.mul(r, x, ops.rsqrt(r, ops.add_scalar(r, ops.mean(r, ops.square(r, x)))))


def cohere(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    """Mean and variance by hand in fp32; the distance from the mean is computed twice
    (modeling_cohere.py CohereLayerNorm)."""
    r = ctx.r
    hidden = ops.cast(r, x, FP32)
    mean = ops.mean(r, hidden)
    variance = ops.mean(r, ops.square(r, ops.sub(r, hidden, mean)))
    hidden = unit(r, ops.sub(r, hidden, mean), variance)
    hidden = ops.mul(r, ops.cast(r, weight_of(module, bound), FP32), hidden)
    return ops.cast(r, hidden, x.format)


def layer(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    """torch.nn.LayerNorm; autocast runs it in fp32, casting what is not."""
    weight, bias = (
        bound.tensors.get(f"{module.name}.weight"),
        bound.tensors.get(f"{module.name}.bias"),
    )
    if ctx.autocast is not None:
        x = ops.cast(ctx.r, x, FP32)
        weight, bias = (
            None if one is None else ops.cast(ctx.r, one, FP32) for one in (weight, bias)
        )
    return ops.layer_norm(ctx.r, x, weight, bias, (ctx.program.processors, ctx.torch))


def layer1p(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    """torch's kernel with the weight plus 1; under autocast everything is cast down for it
    (modeling_nemotron.py NemotronLayerNorm1P)."""
    r = ctx.r
    weight, bias = ops.add_scalar(r, weight_of(module, bound)), bound[f"{module.name}.bias"]
    if ctx.autocast is not None:
        x, weight, bias = (ops.cast(r, one, ctx.autocast) for one in (x, weight, bias))
    return ops.layer_norm(r, x, weight, bias, (ctx.program.processors, ctx.torch))


def olmo(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    """torch's kernel in fp32 without weights, then cast (modeling_olmo.py OlmoLayerNorm)."""
    return ops.cast(ctx.r, ops.layer_norm(ctx.r, ops.cast(ctx.r, x, FP32), None, None), x.format)


NORMS = {
    "llama": llama,
    "olmo2": olmo2,
    "helium": helium,
    "gemma": gemma,
    "cohere": cohere,
    "layer": layer,
    "layer1p": layer1p,
    "olmo": olmo,
}
