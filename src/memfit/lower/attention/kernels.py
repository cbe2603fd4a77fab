"""How transformers reaches a kernel: through SDPA, the flash-attn package, or with the scores
written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memfit.formats import FP32
from memfit.lower import ops, views
from memfit.lower.attention import sdpa
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.lifetimes import Scope, Value, scoped
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Shape, Tensor
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


@scoped
def attend(
    own: Scope,
    q: Value,
    k: Value,
    v: Value,
    module: Any,
    ctx: Context,
    eager: Kernel | None = None,
) -> Value:
    """The interface that the job asks for, among those that the family's code offers. `eager`: a
    family's own scores."""
    name = interface(module, ctx)
    run = eager if eager is not None and name == "eager" else KERNELS[name]
    return own(ctx.programs.sequences.attend, run, q, k, v, module, ctx)


def interface(module: Attention, ctx: Context) -> str:
    asked = ctx.job.attention
    if asked == "eager" or "sdpa" not in module.kernels:
        return "eager"
    return "flash-attn" if asked.startswith("flash-attn") else "sdpa"


def mask_of(module: Attention | Latent, ctx: Context) -> Tensor | None:
    return ctx.masks.get(module.window)


@scoped
def through_sdpa(
    own: Scope, q: Value, k: Value, v: Value, module: Attention, ctx: Context
) -> Value:
    """Groups as they are without a mask, else repeated or, of one query, packed
    (integrations/sdpa_attention.py sdpa_attention_forward of 4.52, 4.54, 4.56 and 5.23)."""
    r, masked, version = ctx.r, mask_of(module, ctx) is not None, ctx.job.version("transformers")
    batch, heads, queries, _ = q.shape
    if k.shape[1] != heads and not (
        version >= GROUPS_SINCE and not masked and k.shape[-1] == v.shape[-1] <= LARGEST_GROUPED
    ):
        if queries == 1 and version >= PACKS_SINCE:
            shape = batch, k.shape[1], heads // k.shape[1], q.shape[-1]
            own.assign(q, reshaped, r, q, shape)
        else:
            own.anew([k, v], [own(repeated, r, one, module) for one in (k, v)])
    if version < COPIES_UNTIL:
        own.anew([q, k, v], [own(ops.packed, r, one) for one in (q, k, v)])
    causal = queries > 1 and not masked
    if causal and k.shape[2] > queries:  # the rest of an empty static cache
        own.anew([k, v], [own(views.narrow, r, one, 2, queries) for one in (k, v)])
    out = own(by_sdpa, q, k, v, causal, module, ctx)
    if out.shape[1] == heads:
        return out
    return own(reshaped, r, out, (batch, heads, queries, out.shape[-1]))


def by_sdpa(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, module: Attention, ctx: Context
) -> Tensor:
    mask, dropout = mask_of(module, ctx), ctx.dropout(module.dropout)
    return sdpa.sdpa(sdpa.Call(q=q, k=k, v=v, mask=mask, causal=causal, dropout=dropout), ctx)


def reshaped(r: Recorder, x: Tensor, shape: Shape) -> Tensor:
    return views.reshape(r, x, *shape)


@scoped
def through_flash_attn(
    own: Scope, q: Value, k: Value, v: Value, module: Attention | Latent, ctx: Context
) -> Value:
    """Groups as they are; some families' classes for flash-attn repeated them all the same
    (transformers 4.47 modeling_qwen2.py Qwen2FlashAttention2, Mistral's, Mixtral's, Phi-3's and
    Starcoder 2's; 4.57 modeling_qwen2_moe.py, modeling_phimoe.py)."""
    older = isinstance(module, Attention) and module.repeated_until
    if older and ctx.job.version("transformers") < older:
        own.anew([k, v], [own(repeated, ctx.r, one, module) for one in (k, v)])
    return own(by_flash_attn, q, k, v, module, ctx)


def by_flash_attn(
    q: Tensor, k: Tensor, v: Tensor, module: Attention | Latent, ctx: Context
) -> Tensor:
    from memfit.lower.attention.flash_attn import flash_attn

    return flash_attn(q, k, v, mask_of(module, ctx), ctx)


@scoped
def repeated(own: Scope, r: Recorder, x: Value, module: Attention) -> Value:
    """repeat_kv: the heads of a group become copies; nothing where there are no groups, and a view
    where there is but one."""
    b, groups, s, h = x.shape
    if groups == module.heads:
        return x
    each = own(reshaped, r, x, (b, groups, 1, s, h))
    wide = own(expanded, r, each.last, (b, groups, module.heads // groups, s, h))
    return own(reshaped, r, wide, (b, module.heads, s, h))


def expanded(r: Recorder, x: Tensor, shape: Shape) -> Tensor:
    return views.expand(r, x, *shape)


@scoped
def eager(own: Scope, q: Value, k: Value, v: Value, module: Attention, ctx: Context) -> Value:
    """Scores of every pair, scaled, masked, softmax in fp32, cast back (transformers 5.23
    modeling_llama.py eager_attention_forward). The layer's `_` holds the probabilities until it
    returns."""
    r, result = ctx.r, q.format
    keys, values = own(repeated, r, k, module), own(repeated, r, v, module)
    turned = own(views.transpose, r, keys, 2, 3)
    weights = own(product, r, q, turned.last, ctx)
    own.assign(weights, ops.scale, r, weights)
    mask = mask_of(module, ctx)
    if mask is not None:
        own.assign(weights, ops.add, r, weights, mask)
    soft = own(ops.softmax, r, weights, FP32)
    own.assign(weights, ops.cast, r, soft.last, result)
    own.assign(weights, ops.dropout, r, weights, ctx.dropout(module.dropout))
    own.lend(ctx.held, weights)
    out = own(product, r, weights, values, ctx)
    return own(by_tokens, r, out.last)


@scoped
def by_tokens(own: Scope, r: Recorder, out: Value) -> Value:
    """`out.transpose(1, 2).contiguous()`, made while the scores' function still has its variables;
    seen as (B, N, S, H) again."""
    turned = own(views.transpose, r, out, 1, 2)
    straight = own(ops.packed, r, turned.last)
    return own(views.transpose, r, straight.last, 1, 2)


@scoped
def product(own: Scope, r: Recorder, a: Value, b: Value, ctx: Context) -> Value:
    """a @ b, in 16 bits under autocast, which casts the last argument first."""
    if ctx.autocast is not None:
        own.assign(b, ops.cast, r, b, ctx.autocast)
        own.assign(a, ops.cast, r, a, ctx.autocast)
    return own(views.matmul, r, a, b)


KERNELS: dict[str, Kernel] = {
    "sdpa": through_sdpa,
    "flash-attn": through_flash_attn,
    "eager": eager,
}
