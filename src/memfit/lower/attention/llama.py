"""Attention of Llama and of what grew out of its code: projections, heads, norms, rotation, kernel,
output.

Families differ in how queries, keys and values come to the kernel; each way is a function that
returns the three, and `run` does the rest. transformers 5.23; the class is named where it is not
the style's own. Lifetimes are explicit (`lifetimes`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memfit.formats import FP32
from memfit.lower import ops, views
from memfit.lower.activations import back_clamp
from memfit.lower.attention import rotary, tables
from memfit.lower.attention.kernels import Kernel, attend, remembered
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.lifetimes import Scope, Value, scoped
from memfit.lower.linears import linear
from memfit.lower.norms import norm
from memfit.lower.programs import Rotary
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Tensor
from memfit.model.modules import Attention

Values = tuple[Value, Value, Value]
Prepare = Callable[
    [Tensor, Attention, Bound, Context], tuple[Tensor, ...]
]  # and what else the class's variables hold


@scoped
def run(
    own: Scope,
    x: Value,
    module: Attention,
    bound: Bound,
    ctx: Context,
    *,
    prepare: Prepare,
    eager: Kernel | None = None,
) -> Value:
    """LlamaAttention.forward."""
    q, k, v, *variables = own.several(prepare, x, module, bound, ctx)
    ctx.r.where = bound.path(module.name)
    keys, values = own.several(remembered, k, v, module, bound, ctx)
    own.move(k, keys)
    own.move(v, values)
    attended = own(attend, q, k, v, module, ctx, eager)
    out = own(views.merged, ctx.r, attended.last)
    own.assign(out, linear, out, bound.linear(module.out), ctx)
    own.drop(*reversed(variables))
    return own(ops.dropout, ctx.r, out, ctx.dropout(module.out_dropout))


def counts(module: Attention) -> tuple[int, int, int]:
    return module.heads, module.kv_heads, module.kv_heads


def projected(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> list[Tensor]:
    """Queries, keys and values, (B, S, N·H)."""
    return [linear(x, bound.linear(one), ctx) for one in module.project]


@scoped
def turned(
    own: Scope,
    q: Value,
    k: Value,
    module: Attention,
    bound: Bound,
    ctx: Context,
    turn: Rotary | None = None,
) -> tuple[Value, Value]:
    """Rotated, where the layer rotates."""
    ctx.r.where = bound.path(module.name)
    if not module.rotary:
        return q, k
    tables.choose(ctx, module.window)
    first, second = own.several(ctx.programs.rotary or turn or rotary.rotary, q, k, ctx)
    return first, second


def turn_both(
    own: Scope,
    q: Value,
    k: Value,
    module: Attention,
    bound: Bound,
    ctx: Context,
    turn: Rotary | None = None,
) -> None:
    """The names of queries and keys stand for the rotated ones."""
    first, second = own.several(turned, q, k, module, bound, ctx, turn)
    own.move(q, first)
    own.move(k, second)


@scoped
def straight(
    own: Scope,
    x: Value,
    module: Attention,
    bound: Bound,
    ctx: Context,
    *,
    turn: Rotary | None = None,
) -> Values:
    """Three projections, and a rotation of q and k."""
    q, k, v = (
        own(views.heads, ctx.r, own(linear, x, bound.linear(one), ctx).last, count)
        for one, count in zip(module.project, counts(module), strict=True)
    )
    turn_both(own, q, k, module, bound, ctx, turn)
    return q, k, v


@scoped
def scaled(own: Scope, x: Value, module: Attention, bound: Bound, ctx: Context) -> Values:
    """Queries times a factor that grows with their position (Ministral3Attention,
    get_llama_4_attn_scale)."""
    r = ctx.r
    q, k, v = own.several(straight, x, module, bound, ctx)
    factor = own(r.tensor, (tables.rows(ctx), ctx.tokens), FP32, "scale")
    for _ in ("floor", "add", "log", "mul", "add"):
        own.assign(factor, scaled_alone, r, factor)
    seen = own(Tensor.view, factor, factor.shape[0], 1, ctx.tokens, 1)
    narrow = own(ops.cast, r, seen.last, q.format)
    own.assign(q, ops.mul, r, q, narrow.last)
    return q, k, v


def scaled_alone(r: Recorder, x: Tensor) -> Tensor:
    """Outside of the graph."""
    return ops.scale(r, x.detach())


@scoped
def normed_tokens(
    own: Scope,
    x: Value,
    module: Attention,
    bound: Bound,
    ctx: Context,
    *,
    turn: Rotary | None = None,
) -> Values:
    """q and k normed head by head as soon as they are projected, before heads and tokens change
    places (Qwen3Attention)."""
    found: list[Value] = []
    for one, count, which in zip(
        module.project, counts(module), (module.q_norm, module.k_norm, None), strict=True
    ):
        flat = own(linear, x, bound.linear(one), ctx)
        apart = own(by_tokens, flat.last, count, ctx)
        even = own(normed, apart.last, which, bound, ctx)
        found.append(own(views.transpose, ctx.r, even.last, 1, 2))
    q, k, v = found
    turn_both(own, q, k, module, bound, ctx, turn)
    return q, k, v


@scoped
def normed_later(
    own: Scope,
    x: Value,
    module: Attention,
    bound: Bound,
    ctx: Context,
    *,
    turn: Rotary | None = None,
) -> Values:
    """The same after all three are projected; the norms may be missing (Glm4MoeAttention,
    CohereAttention)."""
    r = ctx.r
    flat = own.several(projected, x, module, bound, ctx)
    q, k, v = (
        own(by_tokens, one, count, ctx) for one, count in zip(flat, counts(module), strict=True)
    )
    own.drop(*reversed(flat))
    own.assign(q, normed, q, module.q_norm, bound, ctx)
    own.assign(k, normed, k, module.k_norm, bound, ctx)
    for name, other in zip(
        (q, k, v), [own(views.transpose, r, one, 1, 2) for one in (q, k, v)], strict=True
    ):
        own.move(name, other)
    turn_both(own, q, k, module, bound, ctx, turn)
    return q, k, v


@scoped
def heads_of(
    own: Scope, x: Value, module: Attention, bound: Bound, ctx: Context
) -> tuple[Value, ...]:
    """Projected, then (B, N, S, H)."""
    flat = own.several(projected, x, module, bound, ctx)
    found = [
        own(views.heads, ctx.r, one, count) for one, count in zip(flat, counts(module), strict=True)
    ]
    own.drop(*reversed(flat))
    return tuple(found)


@scoped
def normed_heads(
    own: Scope,
    x: Value,
    module: Attention,
    bound: Bound,
    ctx: Context,
    *,
    turn: Rotary | None = None,
) -> Values:
    """Heads first, then the norms, then the rotation (Gemma3Attention)."""
    q, k, v = own.several(heads_of, x, module, bound, ctx)
    own.assign(q, normed, q, module.q_norm, bound, ctx)
    own.assign(k, normed, k, module.k_norm, bound, ctx)
    turn_both(own, q, k, module, bound, ctx, turn)
    return q, k, v


@scoped
def normed_in_line(
    own: Scope, x: Value, module: Attention, bound: Bound, ctx: Context
) -> tuple[Value, ...]:
    """The same with a rotation of a part in the class's own code (PhiAttention,
    StableLmAttention)."""
    q, k, v = own.several(heads_of, x, module, bound, ctx)
    own.assign(q, normed, q, module.q_norm, bound, ctx)
    own.assign(k, normed, k, module.k_norm, bound, ctx)
    ctx.r.where = bound.path(module.name)
    first, second, *variables = own.several(rotary.in_line, q, k, ctx)
    own.move(q, first)
    own.move(k, second)
    return q, k, v, *variables


@scoped
def normed_last(own: Scope, x: Value, module: Attention, bound: Bound, ctx: Context) -> Values:
    """The rotation, then the norms (HunYuanDenseV1Attention)."""
    q, k, v = own.several(straight, x, module, bound, ctx)
    own.assign(q, normed, q, module.q_norm, bound, ctx)
    own.assign(k, normed, k, module.k_norm, bound, ctx)
    return q, k, v


@scoped
def normed_flat(
    own: Scope,
    x: Value,
    module: Attention,
    bound: Bound,
    ctx: Context,
    *,
    turn: Rotary | None = None,
) -> Values:
    """Norms over the whole projection, then heads (Olmo2Attention, OlmoeAttention with its
    clamp)."""
    norms = (module.q_norm, module.k_norm, None)
    flat = [
        own(normed, own(linear, x, bound.linear(one), ctx).last, which, bound, ctx)
        for one, which in zip(module.project, norms, strict=True)
    ]
    own.last_first(*flat)
    q, k, v = own.several(clipped, *flat, module, bound, ctx, turn)
    return q, k, v


@scoped
def clipped(
    own: Scope,
    a: Value,
    b: Value,
    c: Value,
    module: Attention,
    bound: Bound,
    ctx: Context,
    turn: Rotary | None,
) -> Values:
    """All three clamped in place where the config says so, then heads and rotation."""
    ctx.r.where = bound.path(module.name)
    flat = [a, b, c]
    own.last_first(*flat)
    if module.clipped:
        held = [own(clamp_in_place, ctx.r, one) for one in flat]
        for name, other in zip(reversed(flat), reversed(held), strict=True):
            own.move(name, other)
    q, k, v = (
        own(views.heads, ctx.r, one, count) for one, count in zip(flat, counts(module), strict=True)
    )
    turn_both(own, q, k, module, bound, ctx, turn)
    return q, k, v


@scoped
def olmo(own: Scope, x: Value, module: Attention, bound: Bound, ctx: Context) -> Values:
    a, b, c = own.several(projected, x, module, bound, ctx)
    q, k, v = own.several(clipped, a.last, b.last, c.last, module, bound, ctx, rotary.cast_back)
    return q, k, v


def clamp_in_place(r: Recorder, x: Tensor) -> Tensor:
    """`clamp_`: what it was is copied for the gradient."""
    before = r.like(x, "clone") if r.grad and x.needs else None
    return r.node("clamp", x.detach(), (x,), back_clamp, (before,), 2)


@scoped
def fused(own: Scope, x: Value, module: Attention, bound: Bound, ctx: Context) -> tuple[Value, ...]:
    """One projection, cut in three; its variable stays (Phi3Attention)."""
    r = ctx.r
    whole = own(linear, x, bound.linear(module.project[0]), ctx)
    r.where = bound.path(module.name)
    pieces = [own(views.narrow, r, whole, 2, count * module.head) for count in counts(module)]
    q, k, v = (
        own(views.heads, r, one, count) for one, count in zip(pieces, counts(module), strict=True)
    )
    own.drop(*reversed(pieces))
    turn_both(own, q, k, module, bound, ctx, rotary.phi3)
    return q, k, v, whole


def by_tokens(x: Tensor, count: int, ctx: Context) -> Tensor:
    """(B, S, N, H)."""
    b, s, width = x.shape
    return views.reshape(ctx.r, x, b, s, count, width // count)


def normed(x: Tensor, module: object, bound: Bound, ctx: Context) -> Tensor:
    return x if module is None else norm(x, module, bound, ctx)


@scoped
def stablelm(own: Scope, x: Value, module: Attention, bound: Bound, ctx: Context) -> Value:
    """The layer's variables keep what goes in, and the result beside the sum
    (StableLmDecoderLayer)."""
    out = own(partial(run, prepare=normed_in_line), x, module, bound, ctx)
    own.lend(ctx.held, x, out)
    return out


def styles() -> dict[str, Callable[[Tensor, Attention, Bound, Context], Tensor]]:
    """Every style whose kernel is transformers' common one."""
    ways: dict[str, Prepare] = {
        "llama": straight,
        "ministral3": scaled,
        "helium": partial(straight, turn=rotary.helium),
        "ernie4_5": partial(straight, turn=rotary.ernie4_5),
        "glm": partial(straight, turn=rotary.glm),
        "nemotron": partial(straight, turn=rotary.partly),
        "qwen3": normed_tokens,
        "glm4_moe": partial(normed_later, turn=rotary.partly),
        "cohere": partial(normed_later, turn=rotary.cohere),
        "gemma3": normed_heads,
        "phi": normed_in_line,
        "hunyuan_v1_dense": normed_last,
        "olmo2": partial(normed_flat, turn=rotary.cast_back),
        "olmoe": normed_flat,
        "minimax_m2": partial(normed_flat, turn=rotary.partly),
        "olmo": olmo,
        "phi3": fused,
    }
    return {
        "stablelm": stablelm,
        **{style: partial(run, prepare=prepare) for style, prepare in ways.items()},
    }


STYLES = styles()
