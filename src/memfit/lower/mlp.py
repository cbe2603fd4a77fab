"""Feed-forward layers."""

from __future__ import annotations

from memfit.lower import ops
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.linears import linear
from memfit.lower.recorder import Tensor
from memfit.model.modules import MLP


def gated(x: Tensor, module: MLP, bound: Bound, ctx: Context) -> Tensor:
    """down(act(gate(x)) · up(x)) (transformers 5.23 modeling_llama.py LlamaMLP)."""
    assert module.gate is not None
    r = ctx.r
    opened = activate(linear(x, bound.linear(module.gate), ctx), module, ctx)
    inner = ops.mul(r, opened, linear(x, bound.linear(module.up), ctx))
    del opened
    return linear(inner, bound.linear(module.down), ctx)


def activate(x: Tensor, module: MLP, ctx: Context) -> Tensor:
    return ops.activation(ctx.r, x, module.activation)


MLPS = {"gated": gated}
