"""Megatron's self-attention over Transformer Engine's kernels."""

from __future__ import annotations

from memfit.libraries.megatron.context import around
from memfit.libraries.megatron.recompute import again, asked
from memfit.libraries.megatron.te import entered, product, rms_norm, turned
from memfit.lower import ops, views
from memfit.lower.attention import sdpa
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.tensors import Tensor
from memfit.model.modules import Attention, Block

HOPPER = (
    9,
    0,
    # from here on TE prefers cuDNN to FlashAttention (dot_product_attention/utils.py
    # get_attention_backend)
)


def attention(x: Tensor, block: Block, bound: Bound, ctx: Context) -> Tensor:
    """linear_qkv with its norm, a group's queries beside its key and value; rotary positions;
    linear_proj (attention.py SelfAttention).

    The variable `value` is a view of all three, so that they stay until attention returns."""
    mixer, r = block.mixer, ctx.r
    assert isinstance(mixer, Attention)
    n, groups, size = mixer.heads, mixer.kv_heads, mixer.head
    qkv = entered(x, block, bound, ctx)
    r.where = bound.path(mixer.name)
    qkv = views.reshape(r, qkv, *qkv.shape[:2], groups, (n // groups + 2) * size)
    q, k, v = views.split(r, qkv, 3, n // groups * size, size, size)
    del qkv
    q = views.reshape(r, q, *q.shape[:2], n, size)
    if mixer.q_norm is not None and mixer.k_norm is not None:
        q, k = rms_norm(q, mixer.q_norm, bound, ctx), rms_norm(k, mixer.k_norm, bound, ctx)
    q, k = turned(q, r), turned(k, r)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return around(lambda q, k, v: core(q, k, v, ctx), ctx, q, k, v)

    out = again(r, run, q, k, v) if asked(ctx, "core_attn") else run(q, k, v)
    return product(views.reshape(r, out, *out.shape[:2], n * size), mixer.out, bound, ctx)


def core(q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
    """TE's DotProductAttention of (S, B, heads, H): a value that lies otherwise than the key is
    copied (utils.py get_qkv_layout); FlashAttention wants sequences first (backends.py)."""
    r, chosen = ctx.r, ctx.job.attention
    first = chosen == "flash-attn-2" or (chosen == "sdpa" and ctx.capability < HOPPER)
    q, k, v = (ops.packed(r, one) for one in (q, k, v))
    if first:
        q, k, v = (ops.packed(r, views.transpose(r, one, 0, 1)) for one in (q, k, v))
    order = (0, 2, 1, 3) if first else (1, 2, 0, 3)
    q, k, v = (views.permute(r, one, *order) for one in (q, k, v))
    call = sdpa.Call(q=q, k=k, v=v, mask=None, causal=True)
    out = sdpa.flash(call, ctx) if first else sdpa.cudnn(call, ctx)
    return ops.packed(r, views.permute(r, out, 2, 0, 1, 3))
