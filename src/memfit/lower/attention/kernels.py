"""How transformers reaches a kernel: through SDPA, the flash-attn package, or with the scores
written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memfit.formats import FP32
from memfit.lower import ops, views
from memfit.lower.attention import sdpa
from memfit.lower.attention.flash_attn import flash_attn
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Tensor
from memfit.model.modules import Attention, Latent

Kernel = Callable[[Tensor, Tensor, Tensor, Attention, Context], Tensor]
GROUPS_SINCE = (
    4,
    54,
)  # transformers hands groups to SDPA as they are; until then they are always repeated
COPIES_UNTIL = (4, 56)  # until then q, k and v are made contiguous for SDPA
PACKS_SINCE = (5, 23)  # a single masked query is looked at as one query a group
LARGEST_GROUPED = 256  # head size


def remembered(
    k: Tensor, v: Tensor, module: Any, bound: Bound, ctx: Context
) -> tuple[Tensor, Tensor]:
    """What there is to attend to: with a cache, the past too."""
    if ctx.cache is None:
        return k, v
    return ctx.cache.update(ctx.r, bound.prefix, k, v, module.window)


def attend(
    q: Tensor, k: Tensor, v: Tensor, module: Any, ctx: Context, eager: Kernel | None = None
) -> Tensor:
    """The interface that the job asks for, among those that the family's code offers. `eager`: a
    family's own scores."""
    name = interface(module, ctx)
    run = eager if eager is not None and name == "eager" else KERNELS[name]
    return ctx.programs.sequences.attend(run, q, k, v, module, ctx)


def interface(module: Attention, ctx: Context) -> str:
    asked = ctx.job.attention
    if asked == "eager" or "sdpa" not in module.kernels:
        return "eager"
    return "flash-attn" if asked.startswith("flash-attn") else "sdpa"


def mask_of(module: Attention | Latent, ctx: Context) -> Tensor | None:
    return ctx.masks.get(module.window)


def through_sdpa(q: Tensor, k: Tensor, v: Tensor, module: Attention, ctx: Context) -> Tensor:
    """Groups as they are without a mask, else repeated or, of one query, packed
    (integrations/sdpa_attention.py sdpa_attention_forward of 4.52, 4.54, 4.56 and 5.23)."""
    r, mask, version = ctx.r, mask_of(module, ctx), ctx.program.job.version("transformers")
    batch, heads, queries, _ = q.shape
    if k.shape[1] != heads and not (
        version >= GROUPS_SINCE and mask is None and k.shape[-1] == v.shape[-1] <= LARGEST_GROUPED
    ):
        if queries == 1 and version >= PACKS_SINCE:
            q = views.reshape(r, q, batch, k.shape[1], heads // k.shape[1], q.shape[-1])
        else:
            k, v = repeated(r, k, module), repeated(r, v, module)
    if version < COPIES_UNTIL:
        q, k, v = (ops.packed(r, one) for one in (q, k, v))
    causal = queries > 1 and mask is None
    if causal and k.shape[2] > queries:  # the rest of an empty static cache
        k, v = views.narrow(r, k, 2, queries), views.narrow(r, v, 2, queries)
    out = sdpa.sdpa(
        sdpa.Call(q=q, k=k, v=v, mask=mask, causal=causal, dropout=ctx.dropout(module.dropout)), ctx
    )
    return (
        out
        if out.shape[1] == heads
        else views.reshape(r, out, batch, heads, queries, out.shape[-1])
    )


def through_flash_attn(
    q: Tensor, k: Tensor, v: Tensor, module: Attention | Latent, ctx: Context
) -> Tensor:
    """Groups as they are; some families' classes for flash-attn repeated them all the same
    (transformers 4.47 modeling_qwen2.py Qwen2FlashAttention2, Mistral's, Mixtral's, Phi-3's and
    Starcoder 2's; 4.57 modeling_qwen2_moe.py, modeling_phimoe.py)."""
    if isinstance(module, Attention) and (
        ctx.program.job.version("transformers") < module.repeated_until
    ):
        k, v = repeated(ctx.r, k, module), repeated(ctx.r, v, module)
    return flash_attn(q, k, v, mask_of(module, ctx), ctx)


def repeated(r: Recorder, x: Tensor, module: Attention) -> Tensor:
    """repeat_kv: the heads of a group become copies; nothing where there are no groups, and a view
    where there is but one."""
    b, groups, s, h = x.shape
    if groups == module.heads:
        return x
    wide = views.expand(
        r, views.reshape(r, x, b, groups, 1, s, h), b, groups, module.heads // groups, s, h
    )
    return views.reshape(r, wide, b, module.heads, s, h)


def eager(q: Tensor, k: Tensor, v: Tensor, module: Attention, ctx: Context) -> Tensor:
    """Scores of every pair, scaled, masked, softmax in fp32, cast back (transformers 5.23
    modeling_llama.py eager_attention_forward). The layer's `_` holds the probabilities until it
    returns."""
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
    return by_tokens(r, product(r, weights, values, ctx))


def by_tokens(r: Recorder, out: Tensor) -> Tensor:
    """`out.transpose(1, 2).contiguous()`, made while the scores' function still has its variables;
    seen as (B, N, S, H) again."""
    return views.transpose(r, ops.packed(r, views.transpose(r, out, 1, 2)), 1, 2)


def product(r: Recorder, a: Tensor, b: Tensor, ctx: Context) -> Tensor:
    """a @ b, in 16 bits under autocast."""
    if ctx.autocast is not None:
        b = ops.cast(r, b, ctx.autocast)  # the last argument first
        a = ops.cast(r, a, ctx.autocast)
    return views.matmul(r, a, b)


KERNELS: dict[str, Kernel] = {
    "sdpa": through_sdpa,
    "flash-attn": through_flash_attn,
    "eager": eager,
}
