"""Attention of Llama and of what grew out of its code: projections, heads, norms, rotation, kernel,
output.

Families differ in how queries, keys and values come to the kernel; each way is a function that
returns the three, and `run` does the rest. transformers 5.23; the class is named where it is not
the style's own.
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
from memfit.lower.linears import linear
from memfit.lower.norms import norm
from memfit.lower.programs import Rotary
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Tensor
from memfit.model.modules import Attention

Three = tuple[Tensor, Tensor, Tensor]
Prepare = Callable[
    [Tensor, Attention, Bound, Context], tuple[Tensor, ...]
]  # and what else the class's variables hold


def run(
    x: Tensor,
    module: Attention,
    bound: Bound,
    ctx: Context,
    *,
    prepare: Prepare,
    eager: Kernel | None = None,
) -> Tensor:
    """LlamaAttention.forward."""
    q, k, v, *variables = prepare(x, module, bound, ctx)
    ctx.r.where = bound.path(module.name)
    k, v = remembered(k, v, module, bound, ctx)
    out = views.merged(ctx.r, attend(q, k, v, module, ctx, eager))
    out = linear(out, bound.linear(module.out), ctx)
    del variables
    return ops.dropout(ctx.r, out, ctx.dropout(module.out_dropout))


def counts(module: Attention) -> tuple[int, int, int]:
    return module.heads, module.kv_heads, module.kv_heads


def projected(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> list[Tensor]:
    """Queries, keys and values, (B, S, N·H)."""
    return [linear(x, bound.linear(one), ctx) for one in module.project]


def in_heads(r: Recorder, flat: list[Tensor], module: Attention) -> list[Tensor]:
    """The same as (B, N, S, H)."""
    return [views.heads(r, one, count) for one, count in zip(flat, counts(module), strict=True)]


def turned(
    q: Tensor, k: Tensor, module: Attention, bound: Bound, ctx: Context, turn: Rotary | None = None
) -> tuple[Tensor, Tensor]:
    """Rotated, where the layer rotates."""
    ctx.r.where = bound.path(module.name)
    if not module.rotary:
        return q, k
    tables.choose(ctx, module.window)
    return (ctx.programs.rotary or turn or rotary.rotary)(q, k, ctx)


def straight(
    x: Tensor, module: Attention, bound: Bound, ctx: Context, *, turn: Rotary | None = None
) -> Three:
    """Three projections, and a rotation of q and k."""
    q, k, v = (
        views.heads(ctx.r, linear(x, bound.linear(one), ctx), count)
        for one, count in zip(module.project, counts(module), strict=True)
    )
    q, k = turned(q, k, module, bound, ctx, turn)
    return q, k, v


def scaled(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Three:
    """Queries times a factor that grows with their position (Ministral3Attention,
    get_llama_4_attn_scale)."""
    r = ctx.r
    q, k, v = straight(x, module, bound, ctx)
    factor = r.tensor((tables.rows(ctx), ctx.tokens), FP32, "scale")
    for _ in ("floor", "add", "log", "mul", "add"):
        factor = ops.scale(r, factor.detach())
    q = ops.mul(r, q, ops.cast(r, factor.view(factor.shape[0], 1, ctx.tokens, 1), q.format))
    return q, k, v


def normed_tokens(
    x: Tensor, module: Attention, bound: Bound, ctx: Context, *, turn: Rotary | None = None
) -> Three:
    """q and k normed head by head as soon as they are projected, before heads and tokens change
    places (Qwen3Attention)."""
    q, k, v = (
        views.transpose(
            ctx.r,
            normed(by_tokens(linear(x, bound.linear(one), ctx), count, ctx), which, bound, ctx),
            1,
            2,
        )
        for one, count, which in zip(
            module.project, counts(module), (module.q_norm, module.k_norm, None), strict=True
        )
    )
    q, k = turned(q, k, module, bound, ctx, turn)
    return q, k, v


def normed_later(
    x: Tensor, module: Attention, bound: Bound, ctx: Context, *, turn: Rotary | None = None
) -> Three:
    """The same after all three are projected; the norms may be missing (Glm4MoeAttention,
    CohereAttention)."""
    r = ctx.r
    q, k, v = (
        by_tokens(one, count, ctx)
        for one, count in zip(projected(x, module, bound, ctx), counts(module), strict=True)
    )
    q = normed(q, module.q_norm, bound, ctx)
    k = normed(k, module.k_norm, bound, ctx)
    q, k, v = views.transpose(r, q, 1, 2), views.transpose(r, k, 1, 2), views.transpose(r, v, 1, 2)
    q, k = turned(q, k, module, bound, ctx, turn)
    return q, k, v


def normed_heads(
    x: Tensor, module: Attention, bound: Bound, ctx: Context, *, turn: Rotary | None = None
) -> Three:
    """Heads first, then the norms, then the rotation (Gemma3Attention)."""
    q, k, v = in_heads(ctx.r, projected(x, module, bound, ctx), module)
    q = normed(q, module.q_norm, bound, ctx)
    k = normed(k, module.k_norm, bound, ctx)
    q, k = turned(q, k, module, bound, ctx, turn)
    return q, k, v


def normed_in_line(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> tuple[Tensor, ...]:
    """The same with a rotation of a part in the class's own code (PhiAttention,
    StableLmAttention)."""
    q, k, v = in_heads(ctx.r, projected(x, module, bound, ctx), module)
    q = normed(q, module.q_norm, bound, ctx)
    k = normed(k, module.k_norm, bound, ctx)
    ctx.r.where = bound.path(module.name)
    q, k, *variables = rotary.in_line(q, k, ctx)
    return q, k, v, *variables


def normed_last(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Three:
    """The rotation, then the norms (HunYuanDenseV1Attention)."""
    q, k, v = straight(x, module, bound, ctx)
    q = normed(q, module.q_norm, bound, ctx)
    k = normed(k, module.k_norm, bound, ctx)
    return q, k, v


def normed_flat(
    x: Tensor, module: Attention, bound: Bound, ctx: Context, *, turn: Rotary | None = None
) -> Three:
    """Norms over the whole projection, then heads (Olmo2Attention, OlmoeAttention with its
    clamp)."""
    norms = (module.q_norm, module.k_norm, None)
    flat = [
        normed(linear(x, bound.linear(one), ctx), which, bound, ctx)
        for one, which in zip(module.project, norms, strict=True)
    ]
    return clipped(flat, module, bound, ctx, turn)


def clipped(
    flat: list[Tensor], module: Attention, bound: Bound, ctx: Context, turn: Rotary | None
) -> Three:
    """All three clamped in place where the config says so, then heads and rotation."""
    ctx.r.where = bound.path(module.name)
    if module.clipped:
        flat = [clamp_in_place(ctx.r, one) for one in flat]
    q, k, v = in_heads(ctx.r, flat, module)
    q, k = turned(q, k, module, bound, ctx, turn)
    return q, k, v


def olmo(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Three:
    return clipped(projected(x, module, bound, ctx), module, bound, ctx, rotary.cast_back)


def clamp_in_place(r: Recorder, x: Tensor) -> Tensor:
    """`clamp_`: what it was is copied for the gradient."""
    before = r.like(x, "clone") if r.grad and x.needs else None
    return r.node("clamp", x.detach(), (x,), back_clamp, (before,), 2)


def fused(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> tuple[Tensor, ...]:
    """One projection, cut in three; its variable stays (Phi3Attention)."""
    r = ctx.r
    whole = linear(x, bound.linear(module.project[0]), ctx)
    r.where = bound.path(module.name)
    q, k, v = in_heads(
        r, [views.narrow(r, whole, 2, count * module.head) for count in counts(module)], module
    )
    q, k = turned(q, k, module, bound, ctx, rotary.phi3)
    return q, k, v, whole


def by_tokens(x: Tensor, count: int, ctx: Context) -> Tensor:
    """(B, S, N, H)."""
    b, s, width = x.shape
    return views.reshape(ctx.r, x, b, s, count, width // count)


def normed(x: Tensor, module: object, bound: Bound, ctx: Context) -> Tensor:
    return x if module is None else norm(x, module, bound, ctx)


def stablelm(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """The layer's variables keep what goes in, and the result beside the sum
    (StableLmDecoderLayer)."""
    out = run(x, module, bound, ctx, prepare=normed_in_line)
    ctx.held += [x, out]
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
