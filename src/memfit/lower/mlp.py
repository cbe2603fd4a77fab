"""Feed-forward layers."""

from __future__ import annotations

from memfit.lower import ops, views
from memfit.lower.activations import activate
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.linears import linear
from memfit.lower.tensors import Tensor
from memfit.model.modules import MLP


def gated(x: Tensor, module: MLP, bound: Bound, ctx: Context) -> Tensor:
    """down(act(gate(x)) · up(x)) (transformers 5.23 modeling_llama.py LlamaMLP)."""
    assert module.gate is not None
    r = ctx.r
    opened = activate(linear(x, bound.linear(module.gate), ctx), module.activation, ctx)
    inner = ops.mul(r, opened, linear(x, bound.linear(module.up), ctx))
    del opened
    return ops.dropout(
        r, linear(inner, bound.linear(module.down), ctx), ctx.dropout(module.dropout)
    )


def fused(x: Tensor, module: MLP, bound: Bound, ctx: Context) -> Tensor:
    """Gate and up from one product, cut in two: down(up · act(gate)) (transformers 5.23
    modeling_phi3.py Phi3MLP)."""
    r = ctx.r
    gate, up = views.split(
        r, linear(x, bound.linear(module.up), ctx), -1, module.width, module.width
    )
    inner = ops.mul(r, up, activate(gate, module.activation, ctx))
    return ops.dropout(
        r, linear(inner, bound.linear(module.down), ctx), ctx.dropout(module.dropout)
    )


def qwen(x: Tensor, module: MLP, bound: Bound, ctx: Context) -> Tensor:
    """down(up(x) · act(gate(x))), `up` first; the variables stay (Qwen/Qwen-7B modeling_qwen.py
    QWenMLP)."""
    assert module.gate is not None
    up = linear(x, bound.linear(module.up), ctx)
    gate = linear(x, bound.linear(module.gate), ctx)
    inner = ops.mul(ctx.r, up, activate(gate, module.activation, ctx))
    out = linear(inner, bound.linear(module.down), ctx)
    del up, gate, inner
    return out


def plain(x: Tensor, module: MLP, bound: Bound, ctx: Context) -> Tensor:
    """down(act(up(x))); the variable is one all along (transformers 5.23 modeling_gpt2.py
    GPT2MLP)."""
    r = ctx.r
    x = linear(x, bound.linear(module.up), ctx)
    x = activate(x, module.activation, ctx)
    x = ops.dropout(r, x, ctx.dropout(module.inner_dropout))
    x = linear(x, bound.linear(module.down), ctx)
    return ops.dropout(r, x, ctx.dropout(module.dropout))


def nested(x: Tensor, module: MLP, bound: Bound, ctx: Context) -> Tensor:
    """act(up(x)) in one statement, so that x stays until it is done (modeling_xglm.py
    XGLMDecoderLayer)."""
    r = ctx.r
    x = activate(linear(x, bound.linear(module.up), ctx), module.activation, ctx)
    x = ops.dropout(r, x, ctx.dropout(module.inner_dropout))
    x = linear(x, bound.linear(module.down), ctx)
    return ops.dropout(r, x, ctx.dropout(module.dropout))


def flat(x: Tensor, module: MLP, bound: Bound, ctx: Context) -> Tensor:
    """The same on a matrix of all tokens (modeling_opt.py OPTDecoderLayer)."""
    shape = x.shape
    given = [views.reshape(ctx.r, x, x.count // shape[-1], shape[-1])]
    del x
    return views.reshape(ctx.r, plain(given.pop(), module, bound, ctx), *shape)


def bare(x: Tensor, module: MLP, bound: Bound, ctx: Context) -> Tensor:
    """Biases are added by themselves; the dropout is the layer's (modeling_falcon.py FalconMLP)."""
    x = activate(linear(x, bound.linear(module.up), ctx, apart=True), module.activation, ctx)
    return linear(x, bound.linear(module.down), ctx, apart=True)


def falcon(x: Tensor, module: MLP, bound: Bound, ctx: Context) -> Tensor:
    """In a layer of one block after the other, whose variables keep what went in and what
    came out."""
    out = bare(x, module, bound, ctx)
    ctx.held += [x, out]
    return ops.dropout(ctx.r, out, ctx.dropout(module.dropout))


MLPS = {
    "gated": gated,
    "fused": fused,
    "plain": plain,
    "nested": nested,
    "flat": flat,
    "falcon": falcon,
    "qwen": qwen,
}
