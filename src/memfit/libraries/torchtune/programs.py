"""torchtune's own modules (0.6.1): norms and rotary positions in fp32, keys and values expanded to
every query head, logits in fp32 or in chunks.

Packed data brings positions and a block mask, and then FlexAttention runs, compiled; padded data
brings no mask at all.
"""

from __future__ import annotations

from memfit.formats import FP32, INT64
from memfit.lower import functional, head, norms, ops, views
from memfit.lower.attention import sdpa
from memfit.lower.attention.rotary import stacked
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.layers import mix
from memfit.lower.linears import linear
from memfit.lower.mlp import MLPS
from memfit.lower.norms import norm
from memfit.lower.programs import Programs
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.model import Model
from memfit.model.modules import Attention, Block, Embedding, Norm, Weight
from memfit.program import Program

CACHE = "rope.cache"
HALVES = frozenset({"qwen2"})  # families whose halves make the pairs that turn
WHOLE = (0, 5)  # the first to call F.rms_norm (commit 1450d61)
CHUNKS = 8  # modules/loss/ce_chunked_output_loss.py num_output_chunks


def shared(program: Program) -> bool:
    """Does one table serve all layers? Builders of models with adapters make one in each layer, but
    for Llama 3.1's (models/llama3/_component_builders.py lora_llama3_self_attention,
    models/llama3_1/_component_builders.py)."""
    scaling = (
        program.model.config.get("rope_scaling")
        or program.model.config.get("rope_parameters")
        or {}
    )
    return program.adapter is None or scaling.get("rope_type") == "llama3"


def table(program: Program) -> Weight:
    """Cosines and sines of every position, in fp32 (modules/position_embeddings.py; those of Qwen2
    stand twice)."""
    model = program.model
    mixer = next(
        block.mixer for block in model.layers[0].blocks if isinstance(block.mixer, Attention)
    )
    twice = 2 if model.family in HALVES else 1
    return Weight(
        name=CACHE,
        shape=(model.positions, twice * mixer.head // 2, 2),
        role="buffer",
        format="float32",
    )


def buffers(program: Program) -> tuple[Weight, ...]:
    return (table(program),) if shared(program) else ()


def layer_buffers(program: Program) -> tuple[Weight, ...]:
    return () if shared(program) else (table(program),)


def start(ids: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """Embeddings alone; the tables are looked at where they lie."""
    token = model.embed[0]
    assert isinstance(token, Embedding)
    ctx.r.where, ctx.cos = token.name, bound.tensors.get(CACHE)
    return ops.embedding(ctx.r, ids, bound[f"{token.name}.weight"])


# ------------------------------------------------------------------------------------------- norms
def rms_norm(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    """`F.rms_norm(x.float(), weight=scale).to(x.dtype)` (modules/rms_norm.py); before 0.5 in single
    steps, cast before it is weighed."""
    if ctx.job.version("torchtune") < WHOLE:
        return stepwise(x, module, bound, ctx)
    wide = ops.cast(ctx.r, x, FP32)
    return ops.cast(ctx.r, functional.rms_norm(wide, bound[f"{module.name}.weight"], ctx), x.format)


def stepwise(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    r, wide = ctx.r, ops.cast(ctx.r, x, FP32)
    normed = ops.cast(r, norms.unit(r, wide, ops.mean(r, ops.square(r, wide))), x.format)
    return ops.mul(r, normed, bound[f"{module.name}.weight"])


# --------------------------------------------------------------------------------------- attention
def attention(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """Query first, turned; then keys and values, turned and expanded (modules/attention.py
    MultiHeadAttention)."""
    r, (to_q, to_k, to_v) = ctx.r, module.project
    b, s, n, k_heads = ctx.batch, ctx.tokens, module.heads, module.kv_heads
    q = views.reshape(r, linear(x, bound.linear(to_q), ctx), b, s, n, module.head)
    q = views.transpose(r, turned(q, bound, ctx), 1, 2)
    k, v = linear(x, bound.linear(to_k), ctx), linear(x, bound.linear(to_v), ctx)
    r.where = bound.path(module.name)
    k = views.transpose(
        r, turned(views.reshape(r, k, b, s, k_heads, module.head), bound, ctx), 1, 2
    )
    v = views.transpose(r, views.reshape(r, v, b, s, k_heads, module.head), 1, 2)
    k, v = sdpa.repeated(r, k, n), sdpa.repeated(r, v, n)
    out = (
        flex(q, k, v, ctx)
        if ctx.job.packing
        else sdpa.sdpa(sdpa.Call(q=q, k=k, v=v, mask=None, causal=True), ctx)
    )
    return linear(views.merged(r, out), bound.linear(module.out), ctx)


def turned(x: Tensor, bound: Bound, ctx: Context) -> Tensor:
    """With this layer's rows of the table: the first ones, looked at, or, packed, those of each
    token, looked up."""
    cache = bound.tensors.get(CACHE) or ctx.cos
    assert cache is not None
    rows = (ctx.batch, ctx.tokens, 1) if ctx.job.packing else (1, ctx.tokens, 1)
    cache = (
        ctx.r.tensor((*rows, *cache.shape[1:]), FP32, "index")
        if ctx.job.packing
        else views.seen(cache, (*rows, *cache.shape[1:]), None)
    )
    return (in_halves if ctx.program.model.family in HALVES else in_pairs)(x, cache, ctx)


def in_pairs(x: Tensor, cache: Tensor, ctx: Context) -> Tensor:
    """Neighbours make a pair, in fp32; each half of the result takes two products
    (RotaryPositionalEmbeddings.forward)."""
    r = ctx.r
    shaped = views.reshape(r, ops.cast(r, x, FP32), *x.shape[:3], x.shape[3] // 2, 2)

    def term() -> Tensor:
        return ops.mul(r, views.select(r, shaped, 4), views.select(r, cache, 4))

    lower = ops.sub(r, term(), term())
    upper = ops.add(r, term(), term())
    out = stacked(r, lower, upper)
    del lower, upper
    return ops.cast(r, views.reshape(r, out, *x.shape), x.format)


def in_halves(x: Tensor, cache: Tensor, ctx: Context) -> Tensor:
    """x·cos + turned(x)·sin in x's own dtype (models/qwen2/_positional_embeddings.py)."""
    r = ctx.r
    flat = views.seen(cache, (*cache.shape[:3], 2 * x.shape[3]), None)
    cos, sin = (ops.cast(r, views.narrow(r, flat, 3, x.shape[3]), x.format) for _ in range(2))
    first, second = (views.narrow(r, x, 3, x.shape[3] // 2) for _ in range(2))
    across = ops.cat(r, (ops.scale(r, second, "neg"), first), x.shape)
    return ops.add(r, ops.mul(r, x, cos), ops.mul(r, across, sin))


def flex(q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
    """FlexAttention, compiled: keeps q, k, v, the output, which lies as the query does, and an fp32
    number a row (torch 2.13 _higher_order_ops/flex_attention.py flex_attention_fake_impl)."""
    r = ctx.r
    out = r.like(q, "flex_attention")
    lse = r.tensor(q.shape[:3], FP32, "flex_attention")
    flops = 2 * q.count * k.shape[2]
    r.compute(
        "flex_attention",
        flops,
        (q.count * 2 + k.count + v.count) * q.format.block_bytes,
        q.format.math,
    )
    return r.node("flex_attention", out, (q, k, v), back_flex, (q, k, v, out.detach(), lse), flops)


def back_flex(r: Recorder, node: Node, g: Tensor) -> Grads:
    """Row sums in fp32, then dq, dk and dv."""
    q, k, v, *_ = node.saved
    delta = r.tensor(q.shape[:3], FP32, "flex_attention")
    grads = [r.like(one, "flex_attention") for one in (q, k, v)]
    r.compute(
        "flex_attention_backward",
        node.extra * 5 // 2,
        2 * (q.count * 2 + k.count + v.count) * q.format.block_bytes,
        q.format.math,
    )
    del delta
    return grads


# ---------------------------------------------------------------------------------- layer and loss
def order(x: Tensor, block: Block, bound: Bound, ctx: Context) -> Tensor:
    """mixer(norm(x)) + x; the variable of what attention gave lives as long as the layer
    (modules/transformer.py)."""
    assert block.norm is not None
    out = mix(norm(x, block.norm, bound, ctx), block, bound, ctx)
    ctx.r.where = bound.prefix
    ctx.held.append(out)
    return ops.add(ctx.r, out, x)


def plain(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """fp32 logits of every token (modules/transformer.py TransformerDecoder.unembed;
    recipes/full_finetune_single_device.py)."""
    r = ctx.r
    scores = ops.cast(r, head.logits(hidden, model, bound, ctx), FP32)
    del hidden
    part, r.part = r.part, "logits"
    shifted = ops.integers(r, (ctx.batch, ctx.tokens), "hstack")
    loss = ops.cross_entropy(r, scores.view(ctx.batch * ctx.tokens, scores.shape[-1]), shifted)
    del scores, shifted
    r.part = part
    return loss


def chunked(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """The head over an eighth of each sequence at a time; all logits stay in their dtype, one piece
    at a time is made fp32 (modules/loss/ce_chunked_output_loss.py)."""
    r = ctx.r
    part, r.part = r.part, "logits"
    size = -(-ctx.tokens // CHUNKS)
    sizes = [min(size, ctx.tokens - first) for first in range(0, ctx.tokens, size)]
    scores = [head.logits(one, model, bound, ctx) for one in views.split(r, hidden, 1, *sizes)]
    del hidden
    shifted = r.tensor((ctx.batch, ctx.tokens), INT64, "hstack", "inputs")
    total: Tensor | None = None
    for one in scores:
        wide = ops.cast(r, one, FP32)
        loss = ops.cross_entropy(
            r, wide.view(wide.count // wide.shape[-1], wide.shape[-1]), shifted
        )
        del wide
        total = loss if total is None else ops.add(r, total, loss)
    del scores, one
    r.part = part
    assert total is not None
    return total


PROGRAMS = Programs(
    norms={"llama": rms_norm},
    attention={"llama": attention},
    mlps={"gated": MLPS["gated"]},
    moes={},
    orders={"pre": order},
    losses={"plain": plain, "chunked": chunked},
    start=start,
    buffers=buffers,
    layer_buffers=layer_buffers,
)
