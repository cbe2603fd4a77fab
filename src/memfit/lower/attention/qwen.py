"""Attention of Qwen's first models, tokens before heads all along (Qwen/Qwen-7B modeling_qwen.py
QWenAttention, December 2023).

With `use_flash_attn` both the kernel and the rotation are flash-attn's (flash-attn 2.3.4
flash_attn/layers/rotary.py); without, SDPA is always given a mask, and each layer makes it. Sines
and cosines of twice the longest text so far stay for good (RotaryEmbedding).
"""

from __future__ import annotations

from memfit.formats import BOOL, FORMATS, FP32
from memfit.lower import ops, views
from memfit.lower.attention import flash_attn, sdpa
from memfit.lower.attention.kernels import remembered
from memfit.lower.attention.rotary import half_turned, with_tables
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.linears import linear
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.model import Model
from memfit.model.modules import Attention, Weight
from memfit.program import Program


def qwen(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """The layer's variable `attn_output` keeps what comes out of it."""
    r, packaged = ctx.r, ctx.job.attention.startswith("flash-attn")
    mixed = linear(x, bound.linear(module.project[0]), ctx)
    r.where = bound.path(module.name)
    width = module.heads * module.head
    q, k, v = (
        views.reshape(r, one, *one.shape[:2], module.heads, module.head)
        for one in views.split(r, mixed, 2, width, width, width)
    )
    turn = by_package if packaged else by_hand
    q = turn(q, ctx)
    k = turn(k, ctx)
    k, v = in_cache(k, v, module, bound, ctx)
    out = (through_package if packaged else through_sdpa)(q, k, v, ctx)
    out = views.reshape(r, ops.packed(r, out), *x.shape[:2], width)
    result = linear(out, bound.linear(module.out), ctx)
    del mixed
    ctx.held.append(result)
    return result


def in_cache(
    k: Tensor, v: Tensor, module: Attention, bound: Bound, ctx: Context
) -> tuple[Tensor, Tensor]:
    """Caches keep tokens before heads, too: as many bytes."""
    if ctx.cache is None:
        return k, v
    k, v = remembered(
        views.transpose(ctx.r, k, 1, 2), views.transpose(ctx.r, v, 1, 2), module, bound, ctx
    )
    return views.transpose(ctx.r, k, 1, 2), views.transpose(ctx.r, v, 1, 2)


# --------------------------------------------------------------------------------------- positions
def by_package(x: Tensor, ctx: Context) -> Tensor:
    """fp32 in, turned by a kernel of its own, cast back (apply_rotary_pos_emb)."""
    r = ctx.r
    wide = ops.cast(r, x, FP32)
    out = r.node("rotary", rotated(r, wide), (wide,), back_rotary)
    return ops.cast(r, out, x.format)


def rotated(r: Recorder, x: Tensor) -> Tensor:
    """The kernel wants both tables in order (flash_attn/ops/triton/rotary.py apply_rotary)."""
    out = r.like(x, "rotary")
    tables = [r.tensor((x.shape[1], x.shape[-1] // 2), FP32, "contiguous") for _ in range(2)]
    del tables
    return out


def back_rotary(r: Recorder, node: Node, g: Tensor) -> Grads:
    """On a copy of the gradient (ApplyRotaryEmb.backward)."""
    copy = r.like(g, "clone")
    return (rotated(r, copy),)


def by_hand(x: Tensor, ctx: Context) -> Tensor:
    """x·cos + turned(x)·sin in fp32, joined with the part of a head that is not turned, of which
    there is none."""
    r = ctx.r
    cos, sin = (Tensor((1, ctx.tokens, 1, x.shape[-1]), FP32, None) for _ in range(2))
    turned = with_tables(r, ops.cast(r, x, FP32), cos, sin, half_turned)
    return ops.cast(r, ops.cat(r, (turned,), turned.shape), x.format)


def kept(program: Program) -> tuple[Weight, ...]:
    """The tables that stay: of twice the first text, and of twice what is too long for them."""
    job, model = program.job, program.model
    rows = max(2 * job.seq, 16)
    while not job.training and rows < job.reach:
        rows = 2 * (rows + 1)
    shape = (1, rows, 1, 2 * model.buffers[-1].shape[0])
    return tuple(
        Weight(name=f"transformer.rotary_emb.{one}", shape=shape, role="buffer", format="float32")
        for one in ("cos", "sin")
    )


# ----------------------------------------------------------------------------------------- kernels
def make_mask(module: Attention, model: Model, ctx: Context) -> None:
    """0 and the least number, a row for each sequence; none where nothing is padded, and none to
    generate from one prompt."""
    if ctx.job.packing or (ctx.cache is not None and int(ctx.batch) == 1):
        ctx.masks = {0: None}
        return
    ctx.masks = {0: ctx.r.tensor((ctx.batch, 1, 1, ctx.keys), FORMATS[ctx.program.weights], "mask")}


def through_package(q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
    """One sequence as it is; several in a row, and without their padding where there is a mask
    (FlashSelfAttention.forward)."""
    r, mask = ctx.r, ctx.masks.get(0)
    batch, tokens, heads, head = q.shape
    if int(batch) == 1:
        return flash_attn.attention(q, k, v, 0, ctx)
    q, k, v = (views.reshape(r, one, batch * one.shape[1], heads, head) for one in (q, k, v))
    if mask is None:
        return views.reshape(
            r, flash_attn.attention(q, k, v, batch, ctx), batch, tokens, heads, head
        )
    indices = flash_attn.lengths(r, mask)
    k = picked(r, k, indices)
    alone = q.count != v.count
    q = q if alone else picked(r, q, indices)
    v = picked(r, v, indices)
    out = flash_attn.attention(q, k, v, batch, ctx)
    out = out if alone else flash_attn.put_back(r, out, indices, batch * tokens)
    return views.reshape(r, out, batch, tokens, heads, head)


def picked(r: Recorder, x: Tensor, indices: Tensor) -> Tensor:
    out = r.tensor(x.shape, x.format, "index")
    return r.node("index", out, (x,), flash_attn.back_chosen, (indices,), x.shape)


def through_sdpa(q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
    """A triangle of truth values, or what the mask and the triangle leave, in the weights' dtype;
    the code's variables keep both."""
    r, mask = ctx.r, ctx.masks.get(0)
    batch, tokens, keys = q.shape[0], q.shape[1], k.shape[1]
    causal = triangle(r, tokens) if tokens == keys else None
    if mask is not None:
        inverted = None if causal is None else r.tensor((1, 1, tokens, tokens), BOOL, "not")
        mask = (
            mask
            if causal is None
            else r.tensor((batch, 1, tokens, keys), mask.format, "masked_fill")
        )
        del inverted
    q, k, v = (views.transpose(r, one, 1, 2) for one in (q, k, v))
    out = sdpa.sdpa(
        sdpa.Call(q=q, k=k, v=v, mask=causal if mask is None else mask, causal=False, dropout=0.0),
        ctx,
    )
    return views.transpose(r, out, 1, 2)


def triangle(r: Recorder, tokens: int) -> Tensor:
    ones = r.tensor((1, 1, tokens, tokens), BOOL, "ones")
    found = r.like(ones, "tril")
    del ones
    return found
