"""Normalisation as each family's code writes it. Names of variables follow that code, so that what
it holds is held here. Lifetimes are explicit (`lifetimes`)."""

from __future__ import annotations

from memfit.formats import FP32
from memfit.lower import ops
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.lifetimes import Scope, Value, scoped
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Tensor
from memfit.model.modules import Norm


@scoped
def norm(own: Scope, x: Value, module: Norm, bound: Bound, ctx: Context) -> Value:
    ctx.r.where = bound.path(module.name)
    run = ctx.programs.norms[module.style]
    if not ctx.engine.inner:
        return own(run, x, module, bound, ctx)
    leaves = tuple(bound.tensors.get(f"{module.name}.{name}") for name in ("weight", "bias"))
    entered = own(ctx.engine.enter, leaves, x)
    out = own(run, entered.last, module, bound, ctx)
    return own(ctx.engine.leave, leaves, out.last)


def weight_of(module: Norm, bound: Bound) -> Tensor:
    return bound[f"{module.name}.weight"]


@scoped
def llama(own: Scope, x: Value, module: Norm, bound: Bound, ctx: Context) -> Value:
    """fp32 inside, cast back, then times the weight (transformers 5.23 modeling_llama.py
    LlamaRMSNorm)."""
    r, format = ctx.r, x.format
    hidden = own(ops.cast, r, x, FP32)
    variance = own(variance_of, r, hidden)
    own.assign(hidden, unit, r, hidden, variance)
    narrow = own(ops.cast, r, hidden, format)
    return own(ops.mul, r, weight_of(module, bound), narrow.last)


@scoped
def variance_of(own: Scope, r: Recorder, x: Value) -> Value:
    """The mean of the squares over the last dimension."""
    squares = own(ops.square, r, x.last)
    return own(ops.mean, r, squares.last)


@scoped
def unit(own: Scope, r: Recorder, hidden: Value, variance: Value) -> Value:
    """hidden · rsqrt(variance + ε)."""
    above = own(ops.add_scalar, r, variance)
    roots = own(ops.rsqrt, r, above.last)
    return own(ops.mul, r, hidden, roots.last)


def olmo2(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    """The weight's product in fp32, then cast (modeling_olmo2.py Olmo2RMSNorm, modeling_gpt_oss.py
    GptOssRMSNorm)."""
    return weighed_wide(x, weight_of(module, bound), False, ctx)


def helium(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    """As olmo2, with the weight cast up first, after the rest (modeling_helium.py
    HeliumRMSNorm)."""
    return weighed_wide(x, weight_of(module, bound), True, ctx)


@scoped
def weighed_wide(own: Scope, x: Value, weight: Value, widened: bool, ctx: Context) -> Value:
    r, format = ctx.r, x.format
    hidden = own(ops.cast, r, x, FP32)
    variance = own(variance_of, r, hidden)
    own.assign(hidden, unit, r, hidden, variance)
    wide = own(ops.cast, r, weight, FP32) if widened else weight
    product = own(ops.mul, r, wide.last if widened else weight, hidden)
    return own(ops.cast, r, product.last, format)


@scoped
def gemma(own: Scope, x: Value, module: Norm, bound: Bound, ctx: Context) -> Value:
    """Everything in fp32, the weight as its difference from 1, then cast (modeling_gemma.py
    GemmaRMSNorm)."""
    r, format = ctx.r, x.format
    wide = own(ops.cast, r, x, FP32)
    output = own(itself_unit, r, wide.last)
    weight = own(ops.cast, r, weight_of(module, bound), FP32)
    above = own(ops.add_scalar, r, weight.last)
    own.assign(output, ops.mul, r, output, above.last)
    return own(ops.cast, r, output, format)


@scoped
def itself_unit(own: Scope, r: Recorder, x: Value) -> Value:
    """GemmaRMSNorm._norm: one expression, no variable."""
    mean = own(variance_of, r, x)
    above = own(ops.add_scalar, r, mean.last)
    roots = own(ops.rsqrt, r, above.last)
    return own(ops.mul, r, x, roots.last)


@scoped
def cohere(own: Scope, x: Value, module: Norm, bound: Bound, ctx: Context) -> Value:
    """Mean and variance by hand in fp32; the distance from the mean is computed twice
    (modeling_cohere.py CohereLayerNorm)."""
    r, format = ctx.r, x.format
    hidden = own(ops.cast, r, x, FP32)
    mean = own(ops.mean, r, hidden)
    distance = own(ops.sub, r, hidden, mean)
    variance = own(variance_of, r, distance.last)
    again = own(ops.sub, r, hidden, mean)
    own.assign(hidden, unit, r, again.last, variance)
    weight = own(ops.cast, r, weight_of(module, bound), FP32)
    own.assign(hidden, ops.mul, r, weight.last, hidden)
    return own(ops.cast, r, hidden, format)


@scoped
def layer(own: Scope, x: Value, module: Norm, bound: Bound, ctx: Context) -> Value:
    """torch.nn.LayerNorm; autocast runs it in fp32, casting what is not."""
    weights = [bound.tensors.get(f"{module.name}.{name}") for name in ("weight", "bias")]
    if ctx.autocast is None:
        return own(on_device, x, *weights, ctx)
    own.assign(x, ops.cast, ctx.r, x, FP32)
    wide = [None if one is None else own(ops.cast, ctx.r, one, FP32) for one in weights]
    return own(on_device, x, *wide, ctx)


def on_device(x: Tensor, weight: Tensor | None, bias: Tensor | None, ctx: Context) -> Tensor:
    """torch's own kernel."""
    return ops.layer_norm(ctx.r, x, weight, bias, (ctx.program.processors, ctx.torch))


@scoped
def layer1p(own: Scope, x: Value, module: Norm, bound: Bound, ctx: Context) -> Value:
    """torch's kernel with the weight plus 1; under autocast everything is cast down for it
    (modeling_nemotron.py NemotronLayerNorm1P)."""
    weight, bias = (
        own(ops.add_scalar, ctx.r, weight_of(module, bound)),
        bound[f"{module.name}.bias"],
    )
    if ctx.autocast is None:
        return own(on_device, x, weight, bias, ctx)
    narrow = [own(ops.cast, ctx.r, one, ctx.autocast) for one in (x, weight, bias)]
    own.drop(x, weight)
    return own(on_device, *narrow, ctx)


@scoped
def olmo(own: Scope, x: Value, module: Norm, bound: Bound, ctx: Context) -> Value:
    """torch's kernel in fp32 without weights, then cast (modeling_olmo.py OlmoLayerNorm)."""
    r, format = ctx.r, x.format
    wide = own(ops.cast, r, x, FP32)
    normed = own(ops.layer_norm, r, wide.last, None, None)
    return own(ops.cast, r, normed.last, format)


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
