"""LitGPT's one model class for all families (0.5.13 model.py, lora.py, finetune/lora.py): one
projection for queries, keys and values, rotary positions with fp32 tables, copies of keys and
values for every query head, a head in chunks of 128 tokens.

Fabric turns a model's output into fp32 (lightning 2.6 fabric/plugins/precision/half.py).
"""

from __future__ import annotations

from functools import partial

from memfit.formats import BOOL, FP32
from memfit.libraries.litgpt.generate import generates
from memfit.libraries.litgpt.lora import joined
from memfit.lower import head, norms, ops, views
from memfit.lower.attention import sdpa
from memfit.lower.attention.rotary import half_turned
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.layers import mix
from memfit.lower.linears import linear
from memfit.lower.norms import norm
from memfit.lower.programs import Programs, Run
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.model import Model
from memfit.model.modules import MLP, Attention, Embedding, Layer, Norm, Weight
from memfit.program import Program

COSINES, SINES = "rope.cos", "rope.sin"
CHUNK = 128  # finetune/lora.py lm_head_chunk_size
CAPPED = (0, 5)  # 0.5.5: before it, a head in pieces forgot Gemma 2's cap (model.py GPT.forward)


def buffers(program: Program) -> tuple[Weight, ...]:
    """Tables as long as the longest sequence, made anew in fp32 when its length is set (model.py
    GPT.max_seq_length)."""
    mixer = next(
        block.mixer
        for block in program.model.layers[0].blocks
        if isinstance(block.mixer, Attention)
    )
    job = program.job
    shape = (job.reach if job.training else job.seq + job.new_tokens, mixer.rotary)
    return tuple(
        Weight(name=name, shape=shape, role="buffer", format="float32") for name in (COSINES, SINES)
    )


def start(ids: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    token = model.embed[0]
    assert isinstance(token, Embedding)
    r = ctx.r
    r.where = token.name
    if ctx.cache is None:
        ctx.cos, ctx.sin = (
            views.seen(bound[name], (1, 1, *bound[name].shape), None) for name in (COSINES, SINES)
        )
    x = ops.embedding(r, ids, bound[f"{token.name}.weight"])
    return ops.scale(r, x) if token.scaled else x


# ------------------------------------------------------------------------------------------- layer
def rms_norm(
    x: Tensor, module: Norm, bound: Bound, ctx: Context, *, offset: bool = False
) -> Tensor:
    """All in fp32, then cast; `offset`: the weight is a difference from 1 (model.py RMSNorm)."""
    r, weight = ctx.r, bound[f"{module.name}.weight"]
    wide = ops.cast(r, x, FP32)
    mean = ops.mean(r, ops.mul(r, wide, wide))
    normed = ops.mul(r, wide, ops.rsqrt(r, ops.add_scalar(r, mean)))
    if offset:
        weight = ops.add_scalar(r, weight)
    return ops.cast(r, ops.mul(r, normed, ops.cast(r, weight, FP32)), x.format)


NORMS: dict[str, Run] = {"llama": rms_norm, "gemma": partial(rms_norm, offset=True)}


def layer(x: Tensor, layer: Layer, bound: Bound, ctx: Context) -> Tensor:
    """One after the other or side by side; what attention gave and what was normed last are
    variables (model.py Block)."""
    r, (first, second) = ctx.r, layer.blocks
    assert first.norm is not None
    assert second.norm is not None
    normed = norm(x, first.norm, bound, ctx)
    out = mix(normed, first, bound, ctx)
    if first.post_norm is not None:
        out = norm(out, first.post_norm, bound, ctx)
    if layer.parallel:
        if second.norm != first.norm:
            normed = norm(x, second.norm, bound, ctx)
        x = ops.add(r, out, x)
    else:
        x = ops.add(r, out, x)
        normed = norm(x, second.norm, bound, ctx)
    hidden = mix(normed, second, bound, ctx)
    if second.post_norm is not None:
        hidden = norm(hidden, second.post_norm, bound, ctx)
    r.where = bound.prefix
    return ops.add(r, hidden, x)


def gated(x: Tensor, module: MLP, bound: Bound, ctx: Context) -> Tensor:
    """proj(act(fc_1(x)) · fc_2(x)), both products variables (model.py LLaMAMLP, GemmaMLP)."""
    assert module.gate is not None
    first, second = (
        linear(x, bound.linear(module.gate), ctx),
        linear(x, bound.linear(module.up), ctx),
    )
    return linear(
        ops.mul(ctx.r, activate(first, module, ctx), second), bound.linear(module.down), ctx
    )


def plain(x: Tensor, module: MLP, bound: Bound, ctx: Context) -> Tensor:
    x = linear(x, bound.linear(module.up), ctx)
    x = activate(x, module, ctx)
    return linear(x, bound.linear(module.down), ctx)


def activate(x: Tensor, module: MLP, ctx: Context) -> Tensor:
    """torch's own kernels, whatever the family's code in transformers does."""
    return ops.activation(ctx.r, x, "silu" if module.activation == "silu" else "gelu")


MLPS = {"gated": gated, "plain": plain, "falcon": plain}


# --------------------------------------------------------------------------------------- attention
def attention(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """Every step is a variable (model.py CausalSelfAttention)."""
    r, (n, k_heads, size) = ctx.r, (module.heads, module.kv_heads, module.head)
    qkv = joined(x, module, bound, ctx)
    r.where = bound.path(module.name)
    q, k, v = views.split(r, qkv, -1, n * size, k_heads * size, k_heads * size)
    q, k, v = views.heads(r, q, n), views.heads(r, k, k_heads), views.heads(r, v, k_heads)
    if module.q_norm is not None and module.k_norm is not None:
        q, k = norm(q, module.q_norm, bound, ctx), norm(k, module.k_norm, bound, ctx)
    r.where = bound.path(module.name)
    q_turned, k_turned = (turned(views.narrow(r, one, 3, module.rotary), ctx) for one in (q, k))
    q = ops.cat(r, (q_turned, views.narrow(r, q, 3, size - module.rotary)), q.shape)
    k = ops.cat(r, (k_turned, views.narrow(r, k, 3, size - module.rotary)), k.shape)
    if ctx.cache is None:
        k, v = sdpa.repeated(r, k, n), sdpa.repeated(r, v, n)
        mask = sliding(r, q) if module.softcap and module.window else None
    else:
        k, v, mask = remembered(module, bound, ctx)
    call = sdpa.Call(q=q, k=k, v=v, mask=mask, causal=mask is None, groups=False)
    y = capped(q, k, v, mask, ctx) if module.softcap else sdpa.sdpa(call, ctx)
    y = views.merged(r, y)
    return linear(y, bound.linear(module.out), ctx)


def remembered(module: Attention, bound: Bound, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
    """The cache is written in place: a single group is broadcast, others are copied, all of the
    cache or, since 0.5.4, what is filled of it (model.py CausalSelfAttention, KVCache)."""
    r, mask = ctx.r, ctx.masks[0]
    assert ctx.cache is not None
    assert mask is not None
    k, v = ctx.cache.layers[bound.prefix]
    if mask.shape[-1] < k.shape[2]:
        k, v = views.narrow(r, k, 2, mask.shape[-1]), views.narrow(r, v, 2, mask.shape[-1])
    if module.kv_heads > 1:
        k, v = sdpa.repeated(r, k, module.heads), sdpa.repeated(r, v, module.heads)
    return k, v, mask


def turned(x: Tensor, ctx: Context) -> Tensor:
    """fp32 tables make fp32 products, cast back (model.py apply_rope)."""
    assert ctx.cos is not None
    assert ctx.sin is not None
    r = ctx.r
    rotated = half_turned(r, x)
    roped = ops.add(r, ops.mul(r, x, ctx.cos), ops.mul(r, rotated, ctx.sin))
    return ops.cast(r, roped, x.format)


def capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ctx: Context) -> Tensor:
    """Scores written out: scaled, capped, masked, their softmax in fp32 (model.py
    scaled_dot_product_attention)."""
    r = ctx.r
    scores = ops.scale(r, views.matmul(r, q, views.transpose(r, k, 2, 3)))
    scores = ops.scale(r, ops.activation(r, ops.scale(r, scores), "tanh"))
    mask = triangle(r, q) if mask is None else mask
    scores = ops.add(r, scores, mask)
    scores = ops.cast(r, ops.softmax(r, scores, FP32), q.format)
    return views.matmul(r, scores, v)


def triangle(r: Recorder, q: Tensor) -> Tensor:
    """ones → triu, filled where they are."""
    square = q.shape[2], q.shape[2]
    ones = r.tensor(square, q.format, "ones")
    mask = r.tensor(square, q.format, "triu")
    del ones
    chosen = r.tensor(square, BOOL, "bool")
    del chosen
    return mask


def sliding(r: Recorder, q: Tensor) -> Tensor:
    """The causal mask, and in its place one with a window."""
    mask = triangle(r, q)
    return r.tensor(mask.shape, q.format, "full")


# -------------------------------------------------------------------------------------------- loss
def loss(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """Fabric makes all logits fp32 before any loss, and the loop's variable holds them until the
    next ones are made.

    With adapters the head runs over 128 tokens of each sequence at a time, and so does the loss
    (finetune/lora.py fit). Without, logits are one tensor; those of all but the last tokens are,
    for several sequences, a copy, whose cross-entropy is taken 128 rows at a time. An evaluation
    takes it whole (finetune/full.py fit, validate; utils.py chunked_cross_entropy)."""
    r, pieces = ctx.r, ctx.training and ctx.program.adapter is not None
    part, r.part = r.part, "logits"
    parts = views.split(r, hidden, 1, *lengths(ctx.tokens)) if pieces else [hidden]
    del hidden
    capped = not pieces or ctx.job.version("litgpt") >= CAPPED
    narrow = [head.logits(one, model, bound, ctx, capped=capped) for one in parts]
    del parts
    wide = [ops.cast(r, one, FP32) for one in narrow]
    del narrow
    if ctx.training:
        ctx.outputs[:] = wide
        r.let_go(r.former)
        r.mark(r.phase, "", r.at)
    wide[-1] = head.whole(views.narrow(r, wide[-1], 1, max(wide[-1].shape[1] - 1, 1)), ctx)
    rows = [views.reshape(r, one, one.shape[0] * one.shape[1], one.shape[2]) for one in wide]
    del wide
    if ctx.training and not pieces:
        rows = views.split(r, rows[0], 0, *lengths(rows[0].shape[0]))
    losses = [ops.cross_entropy(r, one, labels) for one in rows]
    del rows
    total = r.node("sum", r.tensor((1,), FP32, "sum"), tuple(losses), back_sum)
    r.part = part
    return total


def lengths(total: int) -> list[int]:
    return [min(CHUNK, total - first) for first in range(0, total, CHUNK)]


def back_sum(r: Recorder, node: Node, g: Tensor) -> Grads:
    return [g.view(1) for _ in node.inputs]


PROGRAMS = Programs(
    norms={**NORMS, "layer": norms.NORMS["layer"]},
    attention=dict.fromkeys(("llama", "qwen3", "gemma2", "falcon", "phi", "gpt_neox"), attention),
    mlps=MLPS,
    moes={},
    orders={},
    losses={"plain": loss},
    layer=layer,
    start=start,
    buffers=buffers,
    keeps_outputs=True,
    validates=True,
    generates=generates,
    plain_adapters=True,
)
