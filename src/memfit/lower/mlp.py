"""Feed-forward layers. Lifetimes are explicit (`lifetimes`), and those of the variables of each
class's own code."""

from __future__ import annotations

from memfit.lower import ops, views
from memfit.lower.activations import activate
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.lifetimes import Scope, Value, scoped
from memfit.lower.linears import linear, linear_apart
from memfit.lower.tensors import Shape, Tensor
from memfit.model.modules import MLP


@scoped
def gated(own: Scope, x: Value, module: MLP, bound: Bound, ctx: Context) -> Value:
    """down(act(gate(x)) · up(x)) (transformers 5.23 modeling_llama.py LlamaMLP)."""
    assert module.gate is not None
    gate = own(linear, x, bound.linear(module.gate), ctx)
    opened = own(activate, gate.last, module.activation, ctx)
    up = own(linear, x, bound.linear(module.up), ctx)
    inner = own(ops.mul, ctx.r, opened, up.last)
    own.drop(opened)
    out = own(linear, inner, bound.linear(module.down), ctx)
    return own(ops.dropout, ctx.r, out.last, ctx.dropout(module.dropout))


@scoped
def fused(own: Scope, x: Value, module: MLP, bound: Bound, ctx: Context) -> Value:
    """Gate and up from one product, cut in two: down(up · act(gate)) (transformers 5.23
    modeling_phi3.py Phi3MLP)."""
    both = own(linear, x, bound.linear(module.up), ctx)
    gate, up = own.several(halves, both.last, module.width, ctx)
    opened = own(activate, gate, module.activation, ctx)
    inner = own(ops.mul, ctx.r, up, opened.last)
    out = own(linear, inner, bound.linear(module.down), ctx)
    return own(ops.dropout, ctx.r, out.last, ctx.dropout(module.dropout))


def halves(x: Tensor, width: int, ctx: Context) -> list[Tensor]:
    return views.split(ctx.r, x, -1, width, width)


@scoped
def qwen(own: Scope, x: Value, module: MLP, bound: Bound, ctx: Context) -> Value:
    """down(up(x) · act(gate(x))), `up` first; the variables stay (Qwen/Qwen-7B modeling_qwen.py
    QWenMLP)."""
    assert module.gate is not None
    up = own(linear, x, bound.linear(module.up), ctx)
    gate = own(linear, x, bound.linear(module.gate), ctx)
    opened = own(activate, gate, module.activation, ctx)
    inner = own(ops.mul, ctx.r, up, opened.last)
    out = own(linear, inner, bound.linear(module.down), ctx)
    own.drop(up, gate, inner)
    return out


@scoped
def plain(own: Scope, x: Value, module: MLP, bound: Bound, ctx: Context) -> Value:
    """down(act(up(x))); the variable is one all along (transformers 5.23 modeling_gpt2.py
    GPT2MLP)."""
    up = own(linear, x.last, bound.linear(module.up), ctx)
    opened = own(activate, up.last, module.activation, ctx)
    return own(lowered, opened.last, module, bound, ctx)


@scoped
def nested(own: Scope, x: Value, module: MLP, bound: Bound, ctx: Context) -> Value:
    """act(up(x)) in one statement, so that x stays until it is done (modeling_xglm.py
    XGLMDecoderLayer)."""
    up = own(linear, x, bound.linear(module.up), ctx)
    opened = own(activate, up.last, module.activation, ctx)
    own.drop(x)
    return own(lowered, opened.last, module, bound, ctx)


@scoped
def lowered(own: Scope, opened: Value, module: MLP, bound: Bound, ctx: Context) -> Value:
    """The rest of a feed-forward behind its activation."""
    inner = own(ops.dropout, ctx.r, opened.last, ctx.dropout(module.inner_dropout))
    out = own(linear, inner.last, bound.linear(module.down), ctx)
    return own(ops.dropout, ctx.r, out, ctx.dropout(module.dropout))


@scoped
def flat(own: Scope, x: Value, module: MLP, bound: Bound, ctx: Context) -> Value:
    """The same on a matrix of all tokens (modeling_opt.py OPTDecoderLayer)."""
    shape = x.shape
    rows = own(matrix, x.last, ctx)
    out = own(plain, rows.last, module, bound, ctx)
    return own(reshaped, out.last, shape, ctx)


def matrix(x: Tensor, ctx: Context) -> Tensor:
    return views.reshape(ctx.r, x, x.count // x.shape[-1], x.shape[-1])


def reshaped(x: Tensor, shape: Shape, ctx: Context) -> Tensor:
    return views.reshape(ctx.r, x, *shape)


@scoped
def bare(own: Scope, x: Value, module: MLP, bound: Bound, ctx: Context) -> Value:
    """Biases are added by themselves; the dropout is the layer's (modeling_falcon.py FalconMLP)."""
    up = own(linear_apart, x, bound.linear(module.up), ctx)
    opened = own(activate, up.last, module.activation, ctx)
    own.drop(x)
    return own(linear_apart, opened, bound.linear(module.down), ctx)


@scoped
def falcon(own: Scope, x: Value, module: MLP, bound: Bound, ctx: Context) -> Value:
    """In a layer of one block after the other, whose variables keep what went in and what
    came out."""
    out = own(bare, x, module, bound, ctx)
    own.lend(ctx.held, x, out)
    return own(ops.dropout, ctx.r, out, ctx.dropout(module.dropout))


MLPS = {
    "gated": gated,
    "fused": fused,
    "plain": plain,
    "nested": nested,
    "flat": flat,
    "falcon": falcon,
    "qwen": qwen,
}
