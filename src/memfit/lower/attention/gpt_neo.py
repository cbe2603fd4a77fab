"""Attention with scores in fp32 and no fused kernel but flash-attn's: GPT-Neo, GPT-J, CodeGen."""

from __future__ import annotations

from dataclasses import replace

from memfit.formats import FP32, INT64
from memfit.lower import ops, views
from memfit.lower.attention import tables
from memfit.lower.attention.kernels import attend, mask_of, remembered
from memfit.lower.attention.rotary import cut, joined, pairs_turned, with_tables
from memfit.lower.attention.written import masked, scores, softmax, weighed, where
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.linears import linear
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Tensor
from memfit.model.modules import Attention

PARTS = 4  # transformers 5.23 modeling_codegen.py CodeGenAttention.forward mp_num


def gpt_neo(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """The window is a mask over full scores, a view of the layer's buffer (transformers 5.23
    modeling_gpt_neo.py)."""
    r, module = ctx.r, replace(module, window=0)
    q, k, v = (linear(x, bound.linear(one), ctx) for one in module.project)
    r.where = bound.path(module.name)
    q, k, v = (views.heads(r, one, module.heads) for one in (q, k, v))
    k, v = remembered(k, v, module, bound, ctx)

    def windowed(q: Tensor, k: Tensor, v: Tensor, module: Attention, ctx: Context) -> Tensor:
        """Not scaled; the layer's own triangle first, then the mask (GPTNeoSelfAttention._attn)."""
        q, k = ops.cast(r, q, FP32), ops.cast(r, k, FP32)
        lowest = r.tensor((1,), FP32, "full")
        triangle, mask = bound[f"{module.name}.bias"], mask_of(module, ctx)
        out = weighed(
            ops.cast(
                r, softmax(masked(where(r, scores(q, k, ctx), triangle), mask, ctx), ctx), v.format
            ),
            v,
            module,
            ctx,
            returned=True,
        )
        del lowest
        return out

    out = projected(attend(q, k, v, module, ctx, windowed), module, bound, ctx)
    ctx.held.append(out)  # the layer's `attn_output`
    return out


def gptj(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """Sines and cosines are gathered anew in every layer; its variables hold the whole table's
    copy, and what of queries and keys is not turned (transformers 5.23 modeling_gptj.py
    GPTJAttention)."""
    r = ctx.r
    q, k, v = (linear(x, bound.linear(one), ctx) for one in module.project)
    r.where = bound.path(module.name)
    q, k = (views.reshape(r, one, *one.shape[:2], module.heads, module.head) for one in (q, k))
    v = views.heads(r, v, module.heads)
    rows, kept = tables.rows(ctx), bound[f"{module.name}.embed_positions"]
    table = r.tensor((rows, *kept.shape), kept.format, "repeat")
    places = r.tensor((rows, ctx.tokens, module.rotary), INT64, "repeat")
    sines = ops.cast(
        r, r.tensor((rows, ctx.tokens, module.rotary), table.format, "gather"), k.format
    )
    rest: list[Tensor] = []
    q, k = turned(q, k, sines, module, ctx, rest)
    k, v = remembered(k, v, module, bound, ctx)
    out = projected(attend(q, k, v, module, ctx, divided), module, bound, ctx)
    del table, places, rest
    return out


def codegen(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """One projection laid out for four devices; heads come apart by copies, and fp32 sines make q
    and k fp32 (transformers 5.23 modeling_codegen.py CodeGenAttention)."""
    r, b, s = ctx.r, ctx.batch, ctx.tokens
    fused = linear(x, bound.linear(module.project[0]), ctx)
    r.where = bound.path(module.name)
    local = module.heads * module.head // PARTS
    q, v, k = views.split(
        r, views.reshape(r, fused, b, s, PARTS, 3 * local), 3, local, local, local
    )
    q, k, v = (gathered(r, one, module) for one in (q, k, v))
    v = views.transpose(r, v, 1, 2)
    sines = r.tensor((tables.rows(ctx), s, module.rotary), FP32, "index")
    rest: list[Tensor] = []
    q, k = turned(q, k, sines, module, ctx, rest)
    k, v = remembered(k if ctx.cache is None else ops.cast(r, k, x.format), v, module, bound, ctx)
    out = projected(attend(q, k, v, module, ctx, divided_later), module, bound, ctx)
    del rest
    return out


def gathered(r: Recorder, x: Tensor, module: Attention) -> Tensor:
    """(B, S, 4, N·H/4) as (B, S, N, H)."""
    b, s = x.shape[:2]
    return views.reshape(
        r,
        views.reshape(r, x, b, s, PARTS, module.heads // PARTS, module.head),
        b,
        s,
        module.heads,
        module.head,
    )


def turned(
    q: Tensor, k: Tensor, sines: Tensor, module: Attention, ctx: Context, rest: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The first values of each head in pairs, then heads before tokens; `rest` is what variables
    keep of both parts."""
    r = ctx.r
    k_turned, k_rest = cut(r, k, module.rotary)
    q_turned, q_rest = cut(r, q, module.rotary)
    rest += [k_rest, q_rest]
    k_turned = in_pairs(r, k_turned, sines)
    q_turned = in_pairs(r, q_turned, sines)
    rest += [k_turned, q_turned]
    k = joined(r, k_turned, k_rest)
    q = joined(r, q_turned, q_rest)
    return views.transpose(r, q, 1, 2), views.transpose(r, k, 1, 2)


def in_pairs(r: Recorder, x: Tensor, sines: Tensor) -> Tensor:
    """With tables in which both values of a pair find their number (modeling_gptj.py
    apply_rotary_pos_emb)."""
    sin, cos = (
        r.tensor((sines.shape[0], x.shape[1], 1, x.shape[3]), sines.format, "repeat_interleave")
        for _ in range(2)
    )
    return with_tables(r, x, cos, sin, pairs_turned)


def projected(out: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    out = views.merged(ctx.r, out)
    out = linear(out, bound.linear(module.out), ctx)
    ctx.r.where = bound.path(module.name)
    return ops.dropout(ctx.r, out, ctx.dropout(module.out_dropout))


def divided(q: Tensor, k: Tensor, v: Tensor, module: Attention, ctx: Context) -> Tensor:
    """Scores in fp32, divided, then masked (GPTJAttention._attn)."""
    r = ctx.r
    q, k = ops.cast(r, q, FP32), ops.cast(r, k, FP32)
    return weighed(
        ops.cast(
            r,
            softmax(masked(ops.scale(r, scores(q, k, ctx)), mask_of(module, ctx), ctx), ctx),
            v.format,
        ),
        v,
        module,
        ctx,
        returned=True,
    )


def divided_later(q: Tensor, k: Tensor, v: Tensor, module: Attention, ctx: Context) -> Tensor:
    """The same, masked before (CodeGenAttention._attn)."""
    r = ctx.r
    q, k = ops.cast(r, q, FP32), ops.cast(r, k, FP32)
    return weighed(
        ops.cast(
            r,
            softmax(ops.scale(r, masked(scores(q, k, ctx), mask_of(module, ctx), ctx)), ctx),
            v.format,
        ),
        v,
        module,
        ctx,
        returned=True,
    )
