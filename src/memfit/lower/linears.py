"""Linear layers as they run: plain, under autocast, from packed weights, with a LoRA adapter."""

from __future__ import annotations

from memfit.formats import FP32
from memfit.lower import ops, stored
from memfit.lower.bound import Adapted, BoundLinear
from memfit.lower.context import Context
from memfit.lower.lifetimes import Scope, Value, scoped
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Tensor
from memfit.model.modules import ROWS


@scoped
def linear(own: Scope, x: Value, layer: BoundLinear, ctx: Context, *, apart: bool = False) -> Value:
    """The layer's output for x; where nothing special applies, one matrix product. `apart`: the
    bias is added by itself."""
    ctx.r.where = layer.path
    return own(ctx.matrices.linear, lambda x, apart: whole(x, layer, ctx, apart), x, ctx, apart)


def linear_apart(x: Tensor, layer: BoundLinear, ctx: Context) -> Tensor:
    """The same with the bias added by itself."""
    return linear(x, layer, ctx, apart=True)


@scoped
def whole(own: Scope, x: Value, layer: BoundLinear, ctx: Context, apart: bool) -> Value:
    """With its adapter, if it has one; tensor parallelism does what it does around each matrix."""
    if layer.adapter is None:
        return own(base, x, layer, ctx, apart)
    if layer.packed is None or ctx.programs.plain_adapters:
        return own(adapted, x, layer, layer.adapter, ctx, apart)
    return own(adapted_packed, x, layer, layer.adapter, ctx)


@scoped
def base(own: Scope, x: Value, layer: BoundLinear, ctx: Context, apart: bool = False) -> Value:
    """The layer without its adapter."""
    own.assign(x, ctx.matrices.enter_linear, x, layer, ctx)
    if not ctx.engine.inner:
        out = own(product, x, layer, ctx, apart)
        return own(ctx.matrices.leave_linear, out.last, layer, ctx)
    leaves = layer.weight, layer.bias
    entered = own(ctx.engine.enter, leaves, x)
    out = own(product, entered.last, layer, ctx, apart)
    left = own(ctx.engine.leave, leaves, out.last)
    return own(ctx.matrices.leave_linear, left.last, layer, ctx)


@scoped
def product(own: Scope, x: Value, layer: BoundLinear, ctx: Context, apart: bool) -> Value:
    if layer.packed is not None:
        assert ctx.programs.packing is not None
        return own(ctx.programs.packing.forward, x, layer, ctx)
    if stored.is_stored(layer.weight):
        return own(stored.forward, x, layer, ctx)
    return own(added if apart else plain, x, layer.weight, layer.bias, layer.outputs, ctx)


@scoped
def plain(
    own: Scope, x: Value, weight: Value, bias: Value | None, outputs: int, ctx: Context
) -> Value:
    """Autocast casts the last argument first, as compilers go through a call
    (aten/src/ATen/autocast_mode.h WrapFunction_)."""
    if ctx.autocast is not None:
        if bias is not None:
            own.assign(bias, cast_weight, bias, ctx)
        own.assign(weight, cast_weight, weight, ctx)
        if x.leaf:
            own.assign(x, cast_weight, x, ctx)
        else:
            own.assign(x, ops.cast, ctx.r, x, ctx.autocast)
    return own(ops.linear, ctx.r, x, weight, bias, outputs)


@scoped
def added(
    own: Scope, x: Value, weight: Value, bias: Value | None, outputs: int, ctx: Context
) -> Value:
    """x @ weight.T + bias: autocast's cache takes no transposed view, and no sum is cast
    (transformers 5.23 modeling_falcon.py FalconLinear)."""
    r = ctx.r
    if ctx.autocast is not None:
        own.assign(weight, ops.cast, r, weight, ctx.autocast)
        own.assign(x, ops.cast, r, x, ctx.autocast)
    out = own(ops.linear, r, x, weight, None, outputs)
    return out if bias is None else own(ops.add, r, out, bias)


def cast_weight(weight: Tensor, ctx: Context) -> Tensor:
    """Autocast keeps the cast of an fp32 leaf that is trained, and of an embedding's output that
    was made one, until the outermost autocast ends; a frozen weight is cast at every use
    (aten/src/ATen/autocast_mode.cpp cached_cast, torch 2.13)."""
    if ctx.autocast is None or weight.format is ctx.autocast:
        return weight
    if not weight.needs or weight.format is not FP32:
        return ops.cast(ctx.r, weight, ctx.autocast)
    everywhere = weight.name in ctx.r.shared  # by layers that run the same weights
    cache = ctx.casts.setdefault("" if everywhere else ctx.r.span, {})
    known = cache.get(id(weight))
    if known is None:
        known = cache[id(weight)] = ops.cast(ctx.r, weight, ctx.autocast)
    return known


@scoped
def adapted(
    own: Scope, x: Value, layer: BoundLinear, adapter: Adapted, ctx: Context, apart: bool
) -> Value:
    """PEFT's LoRA layer: the input cast to the adapter's dtype, through A and B, scaled and added,
    cast back (peft 0.21 tuners/lora/layer.py Linear.forward). The cast input is a variable of the
    layer's: it lives until the layer returns."""
    r, out = ctx.r, own(base, x, layer, ctx, apart)
    result = out.format
    own.assign(x, ops.cast, r, x, ctx.engine.seen(adapter.a))
    high = own(low_rank, r, x, layer, adapter, ctx)
    own.assign(out, ops.add, r, out, high)
    own.drop(high)
    return own(ops.cast, r, out, result)


@scoped
def adapted_packed(
    own: Scope, x: Value, layer: BoundLinear, adapter: Adapted, ctx: Context
) -> Value:
    """PEFT's layers over packed weights: the result of 4 bits is cloned first, the adapter's is
    cast before it is added, and under autocast nothing is cast (peft 0.21 tuners/lora/bnb.py)."""
    r, out = ctx.r, own(base, x, layer, ctx)
    result = out.format
    if layer.packed is not None and layer.packed.bits == 4:
        own.assign(out, ops.clone, r, out)
    if ctx.autocast is None:
        own.assign(x, ops.cast, r, x, adapter.a.format)
    high = own(low_rank, r, x, layer, adapter, ctx)
    if ctx.autocast is None:
        own.assign(high, ops.cast, r, high, result)
    return own(ops.add, r, out, high)


@scoped
def low_rank(
    own: Scope, r: Recorder, x: Value, layer: BoundLinear, adapter: Adapted, ctx: Context
) -> Value:
    """dropout(x)·Aᵀ·Bᵀ, scaled. What is beside a layer split by columns has its B split so, beside
    one split by rows its A (peft 0.21 tuners/lora/model.py add_lora_tp_hooks_dtensor)."""
    dropped = own(ops.dropout, r, x, ctx.dropout(adapter.dropout))
    low = own(matrix, dropped.last, adapter.a, adapter.rank, ctx)
    if layer.across == ROWS:
        own.assign(low, ctx.matrices.leave_linear, low, layer, ctx)
    entered = own(ctx.matrices.enter_linear, low, layer, ctx)
    high = own(matrix, entered.last, adapter.b, layer.outputs, ctx)
    own.drop(low)
    return own(ops.scale, r, high)


@scoped
def matrix(own: Scope, x: Value, weight: Value, outputs: int, ctx: Context) -> Value:
    """One of the two layers of an adapter."""
    if not ctx.engine.inner:
        return own(plain, x, weight, None, outputs, ctx)
    leaves = own.leaves(weight)
    entered = own(ctx.engine.enter, leaves, x)
    out = own(plain, entered.last, weight, None, outputs, ctx)
    return own(ctx.engine.leave, leaves, out.last)


__all__ = ["linear", "linear_apart", "plain"]
