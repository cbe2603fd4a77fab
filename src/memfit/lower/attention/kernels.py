"""The kernels underneath attention: SDPA's own, and the scores written out as most families write them."""

from __future__ import annotations

from memfit import kernels
from memfit.formats import BOOL, FP32
from memfit.lower import ops
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.recorder import Grads, Node, Recorder, Tensor
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
        query=ctx.tokens, key=ctx.keys, grouped=not masked and module.heads != module.kv_heads, training=ctx.training, capability=ctx.capability,
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
    out = r.like(q, "efficient_attention")
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
    grads = [r.like(one, "efficient_attention") for one in (q, k, v)]
    held = r.scratch(kernels.efficient_backward(*sizes, element=q.format.block_bytes, capability=capability), "efficient_attention")
    r.compute("efficient_attention", flops * 5 // 2, 2 * (q.count * 2 + k.count + v.count) * q.format.block_bytes, q.format.math)
    del held
    return grads


def math(q: Tensor, k: Tensor, v: Tensor, module: Attention, ctx: Context) -> Tensor:
    """The decomposition of last resort: 16-bit inputs become fp32, q and k are scaled, scores and probabilities exist whole
    (aten/src/ATen/native/transformers/attention.cpp _scaled_dot_product_attention_math)."""
    r = ctx.r
    if ctx.autocast is not None:
        q, k, v = (ops.cast(r, one, ctx.autocast) for one in (q, k, v))
    result, several = q.format, ctx.batch > 1
    q, k, v = (ops.cast(r, one, FP32) for one in (q, k, v))
    q = ops.scale(r, q)
    square = (ctx.tokens, k.shape[-2])
    mask = mask_of(module, ctx)
    if mask is None:
        ones = r.tensor(square, BOOL, "causal")
        lower = r.tensor(square, BOOL, "causal")
        del ones
        mask = r.tensor(square, FP32, "causal")
        del lower
    elif mask.format is BOOL:
        mask = r.tensor(mask.shape, FP32, "mask")
    k, v = repeated(r, k, module), repeated(r, v, module)
    k = ops.scale(r, k)
    scores = ops.matmul(r, q, k, (ctx.batch, module.heads, *square), (several, False))
    scores = ops.add(r, scores, mask)
    blank = r.tensor(scores.shape, BOOL, "isneginf")
    probabilities = ops.softmax(r, scores, FP32)
    del scores, blank
    out = ops.matmul(r, probabilities, v, (ctx.batch, module.heads, ctx.tokens, module.head))
    returned = ops.cast(r, out, result), ops.cast(r, probabilities.detach(), result)
    del out, probabilities, q, k, v, mask
    return ops.clone(r, returned[0], "contiguous")


def repeated(r: Recorder, x: Tensor, module: Attention) -> Tensor:
    """repeat_kv: the heads of a group become copies; nothing where there are no groups."""
    if x.shape[1] == module.heads:
        return x
    out = r.tensor((x.shape[0], module.heads, *x.shape[2:]), x.format, "repeat_kv")
    return r.node("repeat_kv", out, (x,), back_repeated, extra=x.shape)


def back_repeated(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.tensor(node.extra, g.format, "repeat_kv"),)


def eager(q: Tensor, k: Tensor, v: Tensor, module: Attention, ctx: Context) -> Tensor:
    """Scores of every pair, scaled, masked, softmax in fp32, cast back (transformers 5.23 modeling_llama.py
    eager_attention_forward). Rotated queries lie as (B, S, N, H): with several sequences matmul copies them."""
    r = ctx.r
    result = q.format
    keys, values = repeated(r, k, module), repeated(r, v, module)
    copied = ctx.batch > 1
    pairs = (ctx.batch, module.heads, ctx.tokens, k.shape[-2])
    left = ops.cast(r, q, ctx.autocast) if ctx.autocast else q
    weights = ops.matmul(r, left, ops.cast(r, keys, left.format), pairs, (copied, copied and keys is k))
    del left
    weights = ops.scale(r, weights)
    mask = mask_of(module, ctx)
    if mask is not None:
        weights = ops.add(r, weights, mask)
    weights = ops.cast(r, ops.softmax(r, weights, FP32), result)
    weights = ops.dropout(r, weights, ctx.dropout(module.dropout))
    probabilities = ops.cast(r, weights, ctx.autocast) if ctx.autocast else weights
    out = ops.matmul(
        r,
        probabilities,
        ops.cast(r, values, probabilities.format),
        (ctx.batch, module.heads, ctx.tokens, module.head),
        (False, copied and values is v),
    )
    del probabilities
    return ops.clone(r, out, "contiguous")


KERNELS = {"flash": flash, "efficient": efficient, "math": math, "eager": eager}
