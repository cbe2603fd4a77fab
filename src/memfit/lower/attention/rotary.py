"""Rotary positions on queries and keys, as each family's `apply_rotary_pos_emb` writes them
(transformers 5.23).

All of them are x·cos + turned(x)·sin; they differ in which values make a pair, in dtype, and in how
much of a head turns. Functions hold what theirs hold: a local variable lives until they return.
"""

from __future__ import annotations

from collections.abc import Callable

from memfit.formats import FP32
from memfit.lower import ops, views
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.modules import Model

Pair = tuple[Tensor, Tensor]
Turned = Callable[[Recorder, Tensor], Tensor]


def rotary(q: Tensor, k: Tensor, ctx: Context) -> Pair:
    """q·cos + rotate_half(q)·sin, then the same for k; the callers still hold q and k
    (modeling_llama.py)."""
    return rotate(q, ctx), rotate(k, ctx)


def rotate(x: Tensor, ctx: Context) -> Tensor:
    return with_tables(ctx.r, x, *tables(ctx), half_turned)


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


def with_tables(r: Recorder, x: Tensor, cos: Tensor, sin: Tensor, turned: Turned) -> Tensor:
    straight = ops.mul(r, x, cos)
    across = ops.mul(r, turned(r, x), sin)
    return ops.add(r, straight, across)


def half_turned(r: Recorder, x: Tensor) -> Tensor:
    """cat(−x₂, x₁): the cut views are gone before the product."""
    first, second = (views.narrow(r, x, 3, x.shape[3] // 2) for _ in range(2))
    return ops.cat(r, (ops.scale(r, second, "neg"), first), x.shape)


def pairs_turned(r: Recorder, x: Tensor) -> Tensor:
    """Neighbours make a pair: stack(−x₂, x₁) (modeling_cohere.py, modeling_glm.py rotate_half)."""
    first, second = (views.narrow(r, x, 3, x.shape[3] // 2, step=2) for _ in range(2))
    return views.reshape(r, stacked(r, ops.scale(r, second, "neg"), first), *x.shape)


def stacked(r: Recorder, a: Tensor, b: Tensor) -> Tensor:
    """`stack` in a new last dimension."""
    return r.node("stack", r.tensor((*a.shape, 2), a.format, "stack"), (a, b), back_stacked)


def back_stacked(r: Recorder, node: Node, g: Tensor) -> Grads:
    shape, strides = g.shape[:-1], views.lying(g)[:-1]
    return [views.seen(g, shape, strides) if target is not None else None for target in node.inputs]


# ------------------------------------------------------------------------------------------ dtypes
def cast_back(q: Tensor, k: Tensor, ctx: Context) -> Pair:
    """Tables in fp32, so the sums are too; cast back together (modeling_olmo2.py)."""
    formats = q.format, k.format
    turned = rotary(q, k, ctx)
    return ops.cast(ctx.r, turned[0], formats[0]), ops.cast(ctx.r, turned[1], formats[1])


def cohere(q: Tensor, k: Tensor, ctx: Context) -> Pair:
    """Cast up, turned in pairs, cast back (modeling_cohere.py)."""
    r, format = ctx.r, q.format
    q, k = ops.cast(r, q, FP32), ops.cast(r, k, FP32)
    turned = tuple(with_tables(r, one, *tables(ctx), pairs_turned) for one in (q, k))
    return ops.cast(r, turned[0], format), ops.cast(r, turned[1], format)


def ernie4_5(q: Tensor, k: Tensor, ctx: Context) -> Pair:
    """Turned in pairs, each factor cast up for itself (modeling_ernie4_5.py)."""
    r, format = ctx.r, q.format
    cos, sin = repeated_tables(ctx)

    def one(x: Tensor) -> Tensor:
        straight = ops.mul(r, ops.cast(r, x, FP32), cos)
        across = ops.mul(r, ops.cast(r, pairs_turned(r, x), FP32), sin)
        return ops.add(r, straight, across)

    turned = one(q), one(k)
    return ops.cast(r, turned[0], format), ops.cast(r, turned[1], format)


def helium(q: Tensor, k: Tensor, ctx: Context) -> Pair:
    """Turned in pairs, with tables made for it at each call (modeling_helium.py)."""
    cos, sin = repeated_tables(ctx)
    return with_tables(ctx.r, q, cos, sin, pairs_turned), with_tables(
        ctx.r, k, cos, sin, pairs_turned
    )


def repeated_tables(ctx: Context) -> Pair:
    """`cos[..., : size // 2].repeat_interleave(2)`: a copy of each table."""
    cos, sin = tables(ctx)
    return ctx.r.like(cos, "repeat_interleave"), ctx.r.like(sin, "repeat_interleave")


# ---------------------------------------------------------------------------------- part of a head
def cut(r: Recorder, x: Tensor, size: int) -> Pair:
    """What turns and what passes; the second is cut even where nothing is left."""
    return views.narrow(r, x, 3, size), views.narrow(r, x, 3, x.shape[3] - size)


def joined(r: Recorder, turned: Tensor, rest: Tensor) -> Tensor:
    return ops.cat(r, (turned, rest), (*turned.shape[:-1], turned.shape[-1] + rest.shape[-1]))


def partly(q: Tensor, k: Tensor, ctx: Context) -> Pair:
    """Both are cut, both turned, both joined again (modeling_glm4_moe.py, modeling_nemotron.py,
    modeling_phi.py)."""
    return both_partly(q, k, *tables(ctx), half_turned, ctx)


def in_line(q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, ...]:
    """The same in the layer's own code, whose variables keep the parts (modeling_stablelm.py,
    modeling_phi.py)."""
    r = ctx.r
    cos, sin = tables(ctx)
    (q, q_rest), (k, k_rest) = (cut(r, one, cos.shape[-1]) for one in (q, k))
    q, k = with_tables(r, q, cos, sin, half_turned), with_tables(r, k, cos, sin, half_turned)
    return joined(r, q, q_rest), joined(r, k, k_rest), q, q_rest, k, k_rest


def glm(q: Tensor, k: Tensor, ctx: Context) -> Pair:
    """The same in pairs, with tables made at each call (modeling_glm.py)."""
    return both_partly(q, k, *repeated_tables(ctx), pairs_turned, ctx)


def both_partly(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, turned: Turned, ctx: Context
) -> Pair:
    r = ctx.r
    (q, q_rest), (k, k_rest) = (cut(r, one, cos.shape[-1]) for one in (q, k))
    q, k = with_tables(r, q, cos, sin, turned), with_tables(r, k, cos, sin, turned)
    q = joined(r, q, q_rest)
    k = joined(r, k, k_rest)
    return q, k


def phi3(q: Tensor, k: Tensor, ctx: Context) -> Pair:
    """One after the other (modeling_phi3.py)."""
    r = ctx.r
    cos, sin = tables(ctx)
    (q, q_rest), (k, k_rest) = (cut(r, one, cos.shape[-1]) for one in (q, k))
    first = joined(r, with_tables(r, q, cos, sin, half_turned), q_rest)
    return first, joined(r, with_tables(r, k, cos, sin, half_turned), k_rest)


def gpt_oss(q: Tensor, k: Tensor, ctx: Context) -> Pair:
    """Halves, each with its own two products; the tables are half as wide (modeling_gpt_oss.py
    _apply_rotary_emb)."""
    r = ctx.r
    cos, sin = tables(ctx)

    def one(x: Tensor) -> Tensor:
        first, second = views.split(r, x, 3, x.shape[3] // 2, x.shape[3] // 2)
        return halves_turned(r, first, second, cos, sin)

    return one(q), one(k)


def halves_turned(r: Recorder, first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    lower = ops.sub(r, ops.mul(r, first, cos), ops.mul(r, second, sin))
    upper = ops.add(r, ops.mul(r, second, cos), ops.mul(r, first, sin))
    return ops.cat(r, (lower, upper), (*first.shape[:-1], 2 * first.shape[-1]))
