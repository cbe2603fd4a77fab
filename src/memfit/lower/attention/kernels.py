"""The kernels underneath attention: SDPA's own, and the scores written out as most families write them."""

from __future__ import annotations

from memfit import kernels
from memfit.formats import BOOL, FP32
from memfit.lower import ops, views
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.recorder import Grads, Node, Recorder, Tensor
from memfit.lower.strides import joined, normal
from memfit.model.modules import Attention


def remembered(k: Tensor, v: Tensor, module: Attention, bound: Bound, ctx: Context) -> tuple[Tensor, Tensor]:
    """What there is to attend to: with a cache, the past too."""
    if ctx.cache is None:
        return k, v
    return ctx.cache.update(ctx.r, bound.prefix, k, v, module.window)


def attend(q: Tensor, k: Tensor, v: Tensor, module: Attention, ctx: Context) -> Tensor:
    """The kernel that the job asks for, or the one torch picks."""
    kernel = chosen(q, module, ctx)
    return KERNELS[kernel](q, k, v, module, ctx)


def chosen(q: Tensor, module: Attention, ctx: Context) -> str:
    """SDPA's own choice; without a mask transformers hands groups over unrepeated (integrations/sdpa_attention.py)."""
    asked = ctx.job.attention
    if asked == "eager" or "sdpa" not in module.kernels:
        return "eager"
    if asked.startswith("flash-attn"):
        return "flash"
    masked = mask_of(module, ctx) is not None
    half = q.format.block_bytes == 2 or ctx.autocast is not None
    return kernels.sdpa_backend(
        element=2 if half else q.format.block_bytes, half=half, head=module.head, value_head=module.head, masked=masked, causal=ctx.tokens > 1,
        query=ctx.tokens, key=ctx.keys, grouped=not masked and module.heads != module.kv_heads, training=ctx.training,
        dropout=ctx.dropout(module.dropout), capability=ctx.capability,
        allowed=("flash", "efficient", "math") if asked == "sdpa" else (asked,),
    )  # fmt: skip


def mask_of(module: Attention, ctx: Context) -> Tensor | None:
    return ctx.masks.get(module.window)


def flash(q: Tensor, k: Tensor, v: Tensor, module: Attention, ctx: Context) -> Tensor:
    """Keeps q, k, v, the output and one fp32 number a row (aten/src/ATen/native/transformers/cuda/flash_attn)."""
    r = ctx.r
    if ctx.autocast is not None:
        q, k, v = (ops.cast(r, one, ctx.autocast) for one in (q, k, v))
    out = r.like(q, "flash_attention")
    lse = r.tensor((ctx.batch, module.heads, ctx.tokens), FP32, "flash_attention")
    flops = 4 * q.count * k.shape[-2] // (2 if ctx.tokens > 1 else 1)
    r.compute("flash_attention", flops, (q.count * 2 + k.count + v.count) * q.format.block_bytes, q.format.math)
    sizes = (ctx.batch, module.heads, module.kv_heads, ctx.tokens, k.shape[-2], module.head)
    return r.node("flash_attention", out, (q, k, v), back_flash, (q, k, v, out.detach(), lse), (sizes, flops))


def back_flash(r: Recorder, node: Node, g: Tensor) -> Grads:
    """dq, dk, dv beside softmax_d, an fp32 dq and, for grouped heads, dk and dv of every query head."""
    q, k, v, _, _ = node.saved
    sizes, flops = node.extra
    held = kernels.flash_backward(*sizes, element=q.format.block_bytes)
    grads = [r.like(one, "flash_attention") for one in (q, k, v)]
    scratch = [r.scratch(size, "flash_attention") for size in (held.softmax_d, held.dq_accum, held.dk_expanded, held.dv_expanded)]
    r.compute("flash_attention", flops * 5 // 2, 2 * (q.count * 2 + k.count + v.count) * q.format.block_bytes, q.format.math)
    del scratch
    return grads


def efficient(q: Tensor, k: Tensor, v: Tensor, module: Attention, ctx: Context) -> Tensor:
    """CUTLASS memory-efficient attention: heads are repeated first, since it takes none in groups; keeps q, k, v, the mask,
    the output and a row sum rounded to 32 (aten/src/ATen/native/transformers/cuda/attention.cu)."""
    r = ctx.r
    if ctx.autocast is not None:
        q, k, v = (ops.cast(r, one, ctx.autocast) for one in (q, k, v))
    k, v = repeated(r, k, module), repeated(r, v, module)
    out = by_tokens(r, q, "efficient_attention")
    needs = r.grad and (q.needs or k.needs or v.needs)
    lse = r.scratch(kernels.efficient_lse(ctx.batch, module.heads, ctx.tokens) if needs else 0, "efficient_attention", "activations")
    held = r.scratch(
        kernels.efficient_accumulator(ctx.batch, module.heads, ctx.tokens, module.head, module.head, q.format.block_bytes),
        "efficient_attention",
    )
    del held
    sizes = (ctx.batch, module.heads, ctx.tokens, k.shape[-2], module.head, module.head)
    flops = 4 * q.count * k.shape[-2]
    r.compute("efficient_attention", flops, (q.count * 2 + k.count + v.count) * q.format.block_bytes, q.format.math)
    return r.node("efficient_attention", out, (q, k, v), back_efficient, (q, k, v, out.detach(), lse), (sizes, flops, ctx.capability))


def back_efficient(r: Recorder, node: Node, g: Tensor) -> Grads:
    """dq, dk, dv beside row sums and the tiles' workspace."""
    q, k, v, _, _ = node.saved
    sizes, flops, capability = node.extra
    grads = [by_tokens(r, one, "efficient_attention") for one in (q, k, v)]
    held = r.scratch(kernels.efficient_backward(*sizes, element=q.format.block_bytes, capability=capability), "efficient_attention")
    r.compute("efficient_attention", flops * 5 // 2, 2 * (q.count * 2 + k.count + v.count) * q.format.block_bytes, q.format.math)
    del held
    return grads


def by_tokens(r: Recorder, x: Tensor, op: str) -> Tensor:
    """As x, but always lying as (B, S, N, H)."""
    out = r.tensor(x.shape, x.format, op)
    _, n, s, h = x.shape
    out.strides = normal(x.shape, (n * s * h, h, n * h, 1))
    return out


def math(q: Tensor, k: Tensor, v: Tensor, module: Attention, ctx: Context) -> Tensor:
    """The decomposition of last resort: 16-bit inputs become fp32, q and k are scaled, scores and probabilities exist whole
    (aten/src/ATen/native/transformers/attention.cpp _scaled_dot_product_attention_math)."""
    r = ctx.r
    if ctx.autocast is not None:
        q, k, v = (ops.cast(r, one, ctx.autocast) for one in (q, k, v))
    result = q.format
    q, k, v = (ops.cast(r, one, FP32) for one in (q, k, v))
    q = ops.scale(r, q)
    mask = math_mask(r, ctx, mask_of(module, ctx), k.shape[-2])
    k, v = repeated(r, k, module), repeated(r, v, module)
    scores = views.matmul(r, q, ops.scale(r, views.transpose(r, k, 2, 3)))
    scores = ops.add_in_place(r, scores, mask)
    blank = r.tensor(scores.shape, BOOL, "isneginf")
    probabilities = ops.softmax(r, scores, FP32)
    del scores, blank
    probabilities = ops.dropout(r, probabilities, ctx.dropout(module.dropout))
    out = views.matmul(r, probabilities, v)
    returned = ops.cast(r, out, result), ops.cast(r, probabilities.detach(), result)
    del out, probabilities, q, k, v, mask
    return returned[0]


def math_mask(r: Recorder, ctx: Context, mask: Tensor | None, keys: int) -> Tensor:
    """Without a mask a causal one is made for the occasion; one of truth values becomes numbers."""
    if mask is None:
        square = (ctx.tokens, keys)
        ones = r.tensor(square, BOOL, "causal")
        lower = r.tensor(square, BOOL, "causal")
        del ones
        mask = r.tensor(square, FP32, "causal")
        del lower
    return mask if mask.format is not BOOL else r.tensor(mask.shape, FP32, "mask")


def repeated(r: Recorder, x: Tensor, module: Attention) -> Tensor:
    """repeat_kv: the heads of a group become copies; nothing where there are no groups."""
    if x.shape[1] == module.heads:
        return x
    out = r.tensor((x.shape[0], module.heads, *x.shape[2:]), x.format, "repeat_kv")
    return r.node("repeat_kv", out, (x,), back_repeated, extra=x.shape)


def back_repeated(r: Recorder, node: Node, g: Tensor) -> Grads:
    out = r.tensor(node.extra, g.format, "repeat_kv")
    if g.strides is not None:
        out.strides = joined(out.shape, (out.shape, g.strides))
    return (out,)


def eager(q: Tensor, k: Tensor, v: Tensor, module: Attention, ctx: Context) -> Tensor:
    """Scores of every pair, scaled, masked, softmax in fp32, cast back (transformers 5.23 modeling_llama.py
    eager_attention_forward). The layer's `_` holds the probabilities until it returns."""
    r = ctx.r
    result = q.format
    keys, values = repeated(r, k, module), repeated(r, v, module)
    weights = product(r, q, views.transpose(r, keys, 2, 3), ctx)
    weights = ops.scale(r, weights)
    mask = mask_of(module, ctx)
    if mask is not None:
        weights = ops.add(r, weights, mask)
    weights = ops.cast(r, ops.softmax(r, weights, FP32), result)
    weights = ops.dropout(r, weights, ctx.dropout(module.dropout))
    ctx.held.append(weights)
    return product(r, weights, values, ctx)


def product(r: Recorder, a: Tensor, b: Tensor, ctx: Context) -> Tensor:
    """a @ b, in 16 bits under autocast."""
    if ctx.autocast is not None:
        a, b = ops.cast(r, a, ctx.autocast), ops.cast(r, b, ctx.autocast)
    return views.matmul(r, a, b)


KERNELS = {"flash": flash, "efficient": efficient, "math": math, "eager": eager}
