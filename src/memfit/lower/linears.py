"""Linear layers as they run: plain, under autocast, with a LoRA adapter, from quantized weights."""

from __future__ import annotations

from memfit.formats import BF16, FP16, FP32, Format
from memfit.lower import ops
from memfit.lower.bound import BoundLinear
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder, Tensor


def linear(x: Tensor, layer: BoundLinear, ctx: Context) -> Tensor:
    """The layer's output for x; where nothing special applies, one matrix product."""
    r = ctx.r
    r.where = layer.path
    out = base(x, layer, ctx)
    return out if layer.adapter is None else adapted(r, x, out, layer, ctx)


def base(x: Tensor, layer: BoundLinear, ctx: Context) -> Tensor:
    return plain(x, layer.weight, layer.bias, layer.outputs, ctx)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int, ctx: Context) -> Tensor:
    if ctx.autocast is not None:
        x = ops.cast(ctx.r, x, ctx.autocast)
        weight = cast_weight(weight, ctx)
        bias = None if bias is None else cast_weight(bias, ctx)
    return ops.linear(ctx.r, x, weight, bias, outputs)


def cast_weight(weight: Tensor, ctx: Context) -> Tensor:
    """Autocast keeps the cast of a trained fp32 weight until the outermost autocast ends; a frozen one is cast at every
    use (aten/src/ATen/autocast_mode.cpp cached_cast, torch 2.13)."""
    if ctx.autocast is None or weight.format is ctx.autocast:
        return weight
    if not weight.needs:
        return ops.cast(ctx.r, weight, ctx.autocast)
    cache = ctx.casts.setdefault(ctx.r.span, {})
    known = cache.get(id(weight))
    if known is None:
        known = cache[id(weight)] = ops.cast(ctx.r, weight, ctx.autocast)
    return known


def adapted(r: Recorder, x: Tensor, out: Tensor, layer: BoundLinear, ctx: Context) -> Tensor:
    """PEFT's LoRA layer: the input cast to the adapter's dtype, through A and B, scaled and added, cast back
    (peft 0.21 tuners/lora/layer.py Linear.forward)."""
    adapter = layer.adapter
    assert adapter is not None
    result: Format = out.format
    x = ops.cast(r, x, adapter.a.format)  # the cast input is a variable of the layer's: it lives until the layer returns
    low = plain(ops.dropout(r, x, ctx.dropout(adapter.dropout)), adapter.a, None, adapter.rank, ctx)
    high = plain(low, adapter.b, None, layer.outputs, ctx)
    del low
    high = ops.scale(r, high)
    out = ops.add(r, out, high)
    del high
    return ops.cast(r, out, result)


SIXTEEN = (BF16, FP16)
__all__ = ["FP32", "linear", "plain"]
