"""Attention of GPT-2 and GPT-BigCode: one projection for queries, keys and values, a dropout behind
the output."""

from __future__ import annotations

from memfit.formats import FP32
from memfit.lower import ops, views
from memfit.lower.attention.kernels import Kernel, attend, mask_of, remembered
from memfit.lower.attention.written import masked, scaled, scores, softmax, weighed
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.linears import linear
from memfit.lower.tensors import Tensor
from memfit.model.modules import Attention


def gpt2(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """transformers 5.23 modeling_gpt2.py GPT2Attention."""
    q, k, v = thirds(x, module, bound, ctx)
    return projected(attend(q, k, v, module, ctx, unwidened), module, bound, ctx)


def gpt2_upcast(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """`reorder_and_upcast_attn` changes what eager attention does."""
    q, k, v = thirds(x, module, bound, ctx)
    return projected(attend(q, k, v, module, ctx, upcast), module, bound, ctx)


def gpt_bigcode(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """With one key/value head the parts lie behind each other, else head by head (transformers 5.23
    modeling_gpt_bigcode.py)."""
    r, head = ctx.r, module.head
    fused = linear(x, bound.linear(module.project[0]), ctx)
    r.where = bound.path(module.name)
    b, s, _ = fused.shape
    if module.kv_heads == 1:
        q, k, v = views.split(
            r, views.reshape(r, fused, b, 1, s, fused.shape[-1]), 3, module.heads * head, head, head
        )
        q = views.transpose(r, views.reshape(r, q, b, s, module.heads, head), 1, 2)
    else:
        q, k, v = views.split(
            r,
            views.transpose(r, views.reshape(r, fused, b, s, module.heads, 3 * head), 1, 2),
            3,
            head,
            head,
            head,
        )
    k, v = remembered(k, v, module, bound, ctx)
    return projected(attend(q, k, v, module, ctx, scripted_softmax(ctx)), module, bound, ctx)


# Which torch fuses a scripted function whole, reductions included: nvFuser was TorchScript's
# default on CUDA from 1.12 (pytorch#77579) until NNC took over in 2.1 (pytorch#105185).
NVFUSER = ((1, 12), (2, 1))
SCRIPTED_UNTIL = (4, 54)  # modeling_gpt_bigcode.py has upcast_masked_softmax until then


def scripted_softmax(ctx: Context) -> Kernel | None:
    """Eager attention whose scale, mask, softmax and casts nvFuser makes one kernel of, where the
    versions are such; None for all others. The first call of a process runs unfused, to be
    profiled; a process that generates has had it with its first, short prompt."""
    torch = ctx.job.version("torch")
    if ctx.training or ctx.job.version("transformers") >= SCRIPTED_UNTIL:
        return None
    return fused if NVFUSER[0] <= torch < NVFUSER[1] else None


def fused(q: Tensor, k: Tensor, v: Tensor, module: Attention, ctx: Context) -> Tensor:
    """Scores by `baddbmm`, which scales, and the softmax in their own dtype: what is in fp32 stays
    in the kernel (transformers 4.33 modeling_gpt_bigcode.py GPTBigCodeAttention._attn)."""
    return weighed(ops.softmax(ctx.r, scores(q, k, ctx), q.format), v, module, ctx)


def thirds(
    x: Tensor, module: Attention, bound: Bound, ctx: Context
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values side by side in one projection, each head by head."""
    fused = linear(x, bound.linear(module.project[0]), ctx)
    ctx.r.where = bound.path(module.name)
    width = fused.shape[-1] // 3
    q, k, v = (
        views.heads(ctx.r, one, module.heads)
        for one in views.split(ctx.r, fused, 2, width, width, width)
    )
    return q, *remembered(k, v, module, bound, ctx)


def projected(out: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """The output and its dropout; the layer's variable `attn_output` keeps what comes out of it."""
    out = views.merged(ctx.r, out)
    out = linear(out, bound.linear(module.out), ctx)
    ctx.r.where = bound.path(module.name)
    out = ops.dropout(ctx.r, out, ctx.dropout(module.out_dropout))
    ctx.held.append(out)
    return out


def unwidened(q: Tensor, k: Tensor, v: Tensor, module: Attention, ctx: Context) -> Tensor:
    """The softmax in the scores' own dtype (modeling_gpt2.py eager_attention_forward)."""
    return weighed(
        ops.cast(
            ctx.r, softmax(masked(scaled(q, k, ctx), mask_of(module, ctx), ctx), ctx), v.format
        ),
        v,
        module,
        ctx,
    )


def upcast(q: Tensor, k: Tensor, v: Tensor, module: Attention, ctx: Context) -> Tensor:
    """Scores in fp32 by `baddbmm`, autocast or not (modeling_gpt2.py
    _upcast_and_reordered_attn)."""
    r = ctx.r
    b, n, s, h = q.shape
    keys = k.shape[2]
    start = [r.tensor((b * n, s, keys), FP32, "empty")]
    flat_q = views.reshape(r, q, b * n, s, h)
    flat_k = views.reshape(r, views.transpose(r, k, 2, 3), b * n, h, keys)
    found = [views.baddbmm(r, ops.cast(r, flat_q, FP32), ops.cast(r, flat_k, FP32))]
    start.clear()
    mask = mask_of(module, ctx)
    return weighed(
        ops.cast(
            r,
            softmax(masked(views.reshape(r, found.pop(), b, n, s, keys), mask, ctx), ctx),
            v.format,
        ),
        v,
        module,
        ctx,
    )
