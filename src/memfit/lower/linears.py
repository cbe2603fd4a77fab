"""Linear layers as they run: plain, under autocast, from packed weights, with a LoRA adapter."""

from __future__ import annotations

from memfit.formats import FP32
from memfit.lower import ops, stored
from memfit.lower.bound import Adapted, BoundLinear
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Tensor
from memfit.model.modules import ROWS


def linear(x: Tensor, layer: BoundLinear, ctx: Context, *, apart: bool = False) -> Tensor:
    """The layer's output for x; where nothing special applies, one matrix product. `apart`: the
    bias is added by itself."""
    ctx.r.where = layer.path
    return ctx.matrices.linear(lambda x, apart: whole(x, layer, ctx, apart), x, ctx, apart)


def linear_apart(x: Tensor, layer: BoundLinear, ctx: Context) -> Tensor:
    """The same with the bias added by itself."""
    return linear(x, layer, ctx, apart=True)


def whole(x: Tensor, layer: BoundLinear, ctx: Context, apart: bool) -> Tensor:
    """With its adapter, if it has one; tensor parallelism does what it does around each matrix."""
    if layer.adapter is None:
        return base(x, layer, ctx, apart)
    if layer.packed is None or ctx.programs.plain_adapters:
        return adapted(x, layer, layer.adapter, ctx, apart)
    return adapted_packed(x, layer, layer.adapter, ctx)


def base(x: Tensor, layer: BoundLinear, ctx: Context, apart: bool = False) -> Tensor:
    """The layer without its adapter."""
    x = ctx.matrices.enter_linear(x, layer, ctx)
    if ctx.engine.inner:
        leaves = layer.weight, layer.bias
        return ctx.matrices.leave_linear(
            ctx.engine.leave(leaves, product(ctx.engine.enter(leaves, x), layer, ctx, apart)),
            layer,
            ctx,
        )
    return ctx.matrices.leave_linear(product(x, layer, ctx, apart), layer, ctx)


def product(x: Tensor, layer: BoundLinear, ctx: Context, apart: bool) -> Tensor:
    if layer.packed is not None:
        assert ctx.programs.packing is not None
        return ctx.programs.packing.forward(x, layer, ctx)
    if stored.is_stored(layer.weight):
        return stored.forward(x, layer, ctx)
    return (added if apart else plain)(x, layer.weight, layer.bias, layer.outputs, ctx)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int, ctx: Context) -> Tensor:
    """Autocast casts the last argument first, as compilers go through a call
    (aten/src/ATen/autocast_mode.h WrapFunction_)."""
    if ctx.autocast is not None:
        bias = None if bias is None else cast_weight(bias, ctx)
        weight = cast_weight(weight, ctx)
        x = cast_weight(x, ctx) if x.node is None else ops.cast(ctx.r, x, ctx.autocast)
    return ops.linear(ctx.r, x, weight, bias, outputs)


def added(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int, ctx: Context) -> Tensor:
    """x @ weight.T + bias: autocast's cache takes no transposed view, and no sum is cast
    (transformers 5.23 modeling_falcon.py FalconLinear)."""
    r = ctx.r
    if ctx.autocast is not None:
        weight = ops.cast(r, weight, ctx.autocast)
        x = ops.cast(r, x, ctx.autocast)
    out = ops.linear(r, x, weight, None, outputs)
    return out if bias is None else ops.add(r, out, bias)


def cast_weight(weight: Tensor, ctx: Context) -> Tensor:
    """Autocast keeps the cast of an fp32 leaf that is trained, and of an embedding's output that
    was made one, until the outermost autocast ends; a frozen weight is cast at every use
    (aten/src/ATen/autocast_mode.cpp cached_cast, torch 2.13)."""
    if ctx.autocast is None or weight.format is ctx.autocast:
        return weight
    if not weight.needs or weight.format is not FP32:
        return ops.cast(ctx.r, weight, ctx.autocast)
    cache = ctx.casts.setdefault(ctx.r.span, {})
    known = cache.get(id(weight))
    if known is None:
        known = cache[id(weight)] = ops.cast(ctx.r, weight, ctx.autocast)
    return known


def adapted(x: Tensor, layer: BoundLinear, adapter: Adapted, ctx: Context, apart: bool) -> Tensor:
    """PEFT's LoRA layer: the input cast to the adapter's dtype, through A and B, scaled and added,
    cast back (peft 0.21 tuners/lora/layer.py Linear.forward)."""
    r, out = ctx.r, base(x, layer, ctx, apart)
    result = out.format
    x = ops.cast(
        r, x, ctx.engine.seen(adapter.a)
    )  # the cast input is a variable of the layer's: it lives until the layer returns
    high = low_rank(r, x, layer, adapter, ctx)
    out = ops.add(r, out, high)
    del high
    return ops.cast(r, out, result)


def adapted_packed(x: Tensor, layer: BoundLinear, adapter: Adapted, ctx: Context) -> Tensor:
    """PEFT's layers over packed weights: the result of 4 bits is cloned first, the adapter's is
    cast before it is added, and under autocast nothing is cast (peft 0.21 tuners/lora/bnb.py)."""
    r, out = ctx.r, base(x, layer, ctx)
    result = out.format
    if layer.packed is not None and layer.packed.bits == 4:
        out = ops.clone(r, out)
    if ctx.autocast is None:
        x = ops.cast(r, x, adapter.a.format)
    high = low_rank(r, x, layer, adapter, ctx)
    if ctx.autocast is None:
        high = ops.cast(r, high, result)
    return ops.add(r, out, high)


def low_rank(r: Recorder, x: Tensor, layer: BoundLinear, adapter: Adapted, ctx: Context) -> Tensor:
    """dropout(x)·Aᵀ·Bᵀ, scaled. What is beside a layer split by columns has its B split so, beside
    one split by rows its A (peft 0.21 tuners/lora/model.py add_lora_tp_hooks_dtensor)."""
    low = matrix(ops.dropout(r, x, ctx.dropout(adapter.dropout)), adapter.a, adapter.rank, ctx)
    if layer.across == ROWS:
        low = ctx.matrices.leave_linear(low, layer, ctx)
    high = matrix(ctx.matrices.enter_linear(low, layer, ctx), adapter.b, layer.outputs, ctx)
    del low
    return ops.scale(r, high)


def matrix(x: Tensor, weight: Tensor, outputs: int, ctx: Context) -> Tensor:
    """One of the two layers of an adapter."""
    if ctx.engine.inner:
        return ctx.engine.leave(
            (weight,), plain(ctx.engine.enter((weight,), x), weight, None, outputs, ctx)
        )
    return plain(x, weight, None, outputs, ctx)


__all__ = ["linear", "linear_apart", "plain"]
