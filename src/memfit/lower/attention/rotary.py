"""Rotary positions on queries and keys, as each family's `apply_rotary_pos_emb` writes them
(transformers 5.23).

All of them are x·cos + turned(x)·sin; they differ in which values make a pair, in dtype, and in how
much of a head turns. Functions hold what theirs hold: a local variable lives until they return.
Lifetimes are explicit (`lifetimes`).
"""

from __future__ import annotations

from collections.abc import Callable

from memfit.formats import FP32
from memfit.lower import ops, views
from memfit.lower.context import Context
from memfit.lower.lifetimes import Scope, Value, scoped
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Shape, Tensor
from memfit.model.model import Model

Pair = tuple[Tensor, Tensor]
Turned = Callable[..., Tensor]


@scoped
def rotary(own: Scope, q: Value, k: Value, ctx: Context) -> tuple[Value, Value]:
    """q·cos + rotate_half(q)·sin, then the same for k; the callers still hold q and k
    (modeling_llama.py)."""
    return own(rotate, q, ctx), own(rotate, k, ctx)


@scoped
def rotate(own: Scope, x: Value, ctx: Context) -> Value:
    cos, sin = own.several(tables, ctx)
    return own(with_tables, ctx.r, x, cos, sin, half_turned)


def tables(ctx: Context) -> Pair:
    """Those that the model made for all its layers; before 4.45 each layer picked its own."""
    if ctx.cos is None or ctx.sin is None:
        return picked(ctx)
    return ctx.cos, ctx.sin


def picked(ctx: Context) -> Pair:
    """Rows of a layer's own tables, by position; the attention's variables hold them."""
    r, rows = ctx.r, ctx.batch if not ctx.training else 1
    grad, r.grad = r.grad, False
    cos, sin = (
        r.tensor((rows, 1, ctx.tokens, turning(ctx.program.model)), ctx.format, "index")
        for _ in range(2)
    )
    r.grad = grad
    ctx.held += [cos, sin]
    return cos, sin


def turning(model: Model) -> int:
    """How much of a head is turned: twice the frequencies, the first buffer that is more than a
    number."""
    return 2 * next(buffer.shape[0] for buffer in model.buffers if buffer.shape)


@scoped
def with_tables(own: Scope, r: Recorder, x: Value, cos: Value, sin: Value, turned: Turned) -> Value:
    straight = own(ops.mul, r, x, cos)
    other = own(turned, r, x)
    across = own(ops.mul, r, other.last, sin)
    return own(ops.add, r, straight, across)


@scoped
def half_turned(own: Scope, r: Recorder, x: Value) -> Value:
    """cat(−x₂, x₁): the cut views are gone before the product."""
    first, second = (own(views.narrow, r, x, 3, x.shape[3] // 2) for _ in range(2))
    negated = own(ops.scale, r, second, "neg")
    return own(beside, r, negated.last, first, x.shape)


def beside(r: Recorder, a: Tensor, b: Tensor, shape: Shape) -> Tensor:
    return ops.cat(r, (a, b), shape)


@scoped
def pairs_turned(own: Scope, r: Recorder, x: Value) -> Value:
    """Neighbours make a pair: stack(−x₂, x₁) (modeling_cohere.py, modeling_glm.py rotate_half)."""
    first, second = (own(every_second, r, x) for _ in range(2))
    negated = own(ops.scale, r, second, "neg")
    pairs = own(stacked, r, negated.last, first)
    return own(reshaped, r, pairs.last, x.shape)


def every_second(r: Recorder, x: Tensor) -> Tensor:
    return views.narrow(r, x, 3, x.shape[3] // 2, step=2)


def reshaped(r: Recorder, x: Tensor, shape: Shape) -> Tensor:
    return views.reshape(r, x, *shape)


def stacked(r: Recorder, a: Tensor, b: Tensor) -> Tensor:
    """`stack` in a new last dimension."""
    return r.node("stack", r.tensor((*a.shape, 2), a.format, "stack"), (a, b), back_stacked)


def back_stacked(r: Recorder, node: Node, g: Tensor) -> Grads:
    shape, strides = g.shape[:-1], views.lying(g)[:-1]
    return [views.seen(g, shape, strides) if target is not None else None for target in node.inputs]


# ------------------------------------------------------------------------------------------ dtypes
@scoped
def cast_back(own: Scope, q: Value, k: Value, ctx: Context) -> tuple[Value, Value]:
    """Tables in fp32, so the sums are too; cast back together (modeling_olmo2.py)."""
    first, second = own.several(rotary, q, k, ctx)
    own.last_first(first, second)
    return own(ops.cast, ctx.r, first, q.format), own(ops.cast, ctx.r, second, k.format)


@scoped
def cohere(own: Scope, q: Value, k: Value, ctx: Context) -> tuple[Value, Value]:
    """Cast up, turned in pairs, cast back (modeling_cohere.py)."""
    r, format = ctx.r, q.format
    wide = own(ops.cast, r, q, FP32), own(ops.cast, r, k, FP32)
    own.move(q, wide[0])
    own.move(k, wide[1])
    second, first = own.empty(), own.empty()
    for turned, one in ((first, q), (second, k)):
        cos, sin = own.several(tables, ctx)
        own.assign(turned, with_tables, r, one, cos.last, sin.last, pairs_turned)
    return own(ops.cast, r, first, format), own(ops.cast, r, second, format)


@scoped
def ernie4_5(own: Scope, q: Value, k: Value, ctx: Context) -> tuple[Value, Value]:
    """Turned in pairs, each factor cast up for itself (modeling_ernie4_5.py)."""
    r, format = ctx.r, q.format
    second, first = own.empty(), own.empty()
    cos, sin = own.several(repeated_tables, ctx)
    own.assign(first, wide_pairs, r, q, cos, sin)
    own.assign(second, wide_pairs, r, k, cos, sin)
    return own(ops.cast, r, first, format), own(ops.cast, r, second, format)


@scoped
def wide_pairs(own: Scope, r: Recorder, x: Value, cos: Value, sin: Value) -> Value:
    wide = own(ops.cast, r, x, FP32)
    straight = own(ops.mul, r, wide.last, cos)
    turned = own(pairs_turned, r, x)
    wide = own(ops.cast, r, turned.last, FP32)
    across = own(ops.mul, r, wide.last, sin)
    return own(ops.add, r, straight, across)


@scoped
def helium(own: Scope, q: Value, k: Value, ctx: Context) -> tuple[Value, Value]:
    """Turned in pairs, with tables made for it at each call (modeling_helium.py)."""
    r = ctx.r
    cos, sin = own.several(repeated_tables, ctx)
    first = own(with_tables, r, q, cos, sin, pairs_turned)
    return first, own(with_tables, r, k, cos, sin, pairs_turned)


@scoped
def repeated_tables(own: Scope, ctx: Context) -> tuple[Value, Value]:
    """`cos[..., : size // 2].repeat_interleave(2)`: a copy of each table."""
    cos, sin = own.several(tables, ctx)
    copied = own(ctx.r.like, cos, "repeat_interleave")
    return copied, own(ctx.r.like, sin, "repeat_interleave")


# ---------------------------------------------------------------------------------- part of a head
def cut(r: Recorder, x: Tensor, size: int) -> Pair:
    """What turns and what passes; the second is cut even where nothing is left."""
    return views.narrow(r, x, 3, size), views.narrow(r, x, 3, x.shape[3] - size)


def joined(r: Recorder, turned: Tensor, rest: Tensor) -> Tensor:
    return ops.cat(r, (turned, rest), (*turned.shape[:-1], turned.shape[-1] + rest.shape[-1]))


@scoped
def partly(own: Scope, q: Value, k: Value, ctx: Context) -> tuple[Value, Value]:
    """Both are cut, both turned, both joined again (modeling_glm4_moe.py, modeling_nemotron.py,
    modeling_phi.py)."""
    cos, sin = own.several(tables, ctx)
    first, second = own.several(both_partly, q, k, cos, sin, half_turned, ctx)
    return first, second


@scoped
def in_line(own: Scope, q: Value, k: Value, ctx: Context) -> tuple[Value, ...]:
    """The same in the layer's own code, whose variables keep the parts (modeling_stablelm.py,
    modeling_phi.py)."""
    r = ctx.r
    cos, sin = own.several(tables, ctx)
    size = cos.shape[-1]
    first, q_rest = own.several(cut, r, q, size)
    second, k_rest = own.several(cut, r, k, size)
    own.move(q, first)
    own.move(k, second)
    turned = [own(with_tables, r, one, cos, sin, half_turned) for one in (q, k)]
    own.move(q, turned[0])
    own.move(k, turned[1])
    joined_q = own(joined, r, q, q_rest)
    return joined_q, own(joined, r, k, k_rest), q, q_rest, k, k_rest


@scoped
def glm(own: Scope, q: Value, k: Value, ctx: Context) -> tuple[Value, Value]:
    """The same in pairs, with tables made at each call (modeling_glm.py)."""
    cos, sin = own.several(repeated_tables, ctx)
    first, second = own.several(both_partly, q, k, cos, sin, pairs_turned, ctx)
    own.drop(sin, cos)
    return first, second


@scoped
def both_partly(
    own: Scope, q: Value, k: Value, cos: Value, sin: Value, turned: Turned, ctx: Context
) -> tuple[Value, Value]:
    r = ctx.r
    size = cos.shape[-1]
    first, q_rest = own.several(cut, r, q, size)
    second, k_rest = own.several(cut, r, k, size)
    own.move(q, first)
    own.move(k, second)
    both = [own(with_tables, r, one, cos, sin, turned) for one in (q, k)]
    own.move(q, both[0])
    own.move(k, both[1])
    own.assign(q, joined, r, q, q_rest)
    own.assign(k, joined, r, k, k_rest)
    return q, k


@scoped
def phi3(own: Scope, q: Value, k: Value, ctx: Context) -> tuple[Value, Value]:
    """One after the other (modeling_phi3.py)."""
    r = ctx.r
    cos, sin = own.several(tables, ctx)
    size = cos.shape[-1]
    a, q_rest = own.several(cut, r, q, size)
    b, k_rest = own.several(cut, r, k, size)
    own.move(q, a)
    own.move(k, b)
    turned = own(with_tables, r, q, cos, sin, half_turned)
    whole = own(joined, r, turned.last, q_rest)
    turned = own(with_tables, r, k, cos, sin, half_turned)
    return whole, own(joined, r, turned.last, k_rest)


@scoped
def gpt_oss(own: Scope, q: Value, k: Value, ctx: Context) -> tuple[Value, Value]:
    """Halves, each with its own two products; the tables are half as wide (modeling_gpt_oss.py
    _apply_rotary_emb)."""
    cos, sin = own.several(tables, ctx)
    first = own(turned_by_halves, ctx.r, q, cos, sin)
    return first, own(turned_by_halves, ctx.r, k, cos, sin)


@scoped
def turned_by_halves(own: Scope, r: Recorder, x: Value, cos: Value, sin: Value) -> Value:
    first, second = own.several(halves, r, x)
    return own(halves_turned, r, first, second, cos, sin)


def halves(r: Recorder, x: Tensor) -> list[Tensor]:
    return views.split(r, x, 3, x.shape[3] // 2, x.shape[3] // 2)


@scoped
def halves_turned(
    own: Scope, r: Recorder, first: Value, second: Value, cos: Value, sin: Value
) -> Value:
    left = own(ops.mul, r, first, cos)
    right = own(ops.mul, r, second, sin)
    lower = own(ops.sub, r, left.last, right.last)
    left = own(ops.mul, r, second, cos)
    right = own(ops.mul, r, first, sin)
    upper = own(ops.add, r, left.last, right.last)
    return own(beside, r, lower, upper, (*first.shape[:-1], 2 * first.shape[-1]))
