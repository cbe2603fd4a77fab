"""The flash-attn package, versions 2 and 3, as transformers calls it: tokens before heads, padding
taken out and put back.

transformers 5.23 integrations/flash_attention.py, modeling_flash_attention_utils.py; flash-attn
v2.8.3 flash_attn/flash_attn_interface.py and bert_padding.py, hopper/flash_attn_interface.py.
"""

from __future__ import annotations

from memfit import kernels
from memfit.formats import FORMATS, FP32, INT32, INT64
from memfit.lower import ops, views
from memfit.lower.attention.sdpa import padded
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.techniques.attention import handed

HOPPER = (9, 0)


def flash_attn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ctx: Context) -> Tensor:
    """(B, N, S, H) in and out. `mask`: which tokens are real, where not all are; all but none are
    taken to be. Values narrower than queries, as of latent attention, are padded to these, and the
    output is cropped (integrations/flash_attention.py; before, the models' own code)."""
    head, value = q.shape[-1], v.shape[-1]
    if value == head:
        return alike(q, k, v, mask, ctx)
    wide = views.transpose(ctx.r, padded(ctx.r, views.transpose(ctx.r, v, 1, 2), head), 1, 2)
    return views.narrow(ctx.r, alike(q, k, wide, mask, ctx), 3, value)


def alike(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ctx: Context) -> Tensor:
    """With values as wide as queries."""
    r = ctx.r
    q, k, v = (views.transpose(r, one, 1, 2) for one in (q, k, v))
    if q.format is FP32:
        q, k, v = (ops.cast(r, one, FORMATS[handed(ctx.program)]) for one in (q, k, v))
    if mask is None:
        return views.transpose(r, attention(q, k, v, 0, ctx), 1, 2)
    batch, tokens, heads, head = q.shape
    indices = lengths(r, mask)
    k, v = chosen(r, k, indices), chosen(r, v, indices)
    q = chosen(r, q, indices)
    out = attention(q, k, v, batch, ctx)
    out = put_back(r, out, indices, batch * tokens)
    return views.transpose(r, views.reshape(r, out, batch, tokens, heads, head), 1, 2)


def lengths(r: Recorder, mask: Tensor) -> Tensor:
    """Where the real tokens are, and cumulative lengths (_get_unpad_data)."""
    counts = r.tensor((mask.shape[0],), INT32, "sum")
    indices = r.tensor((mask.count,), INT64, "nonzero")
    del counts
    return indices


def chosen(r: Recorder, x: Tensor, indices: Tensor) -> Tensor:
    """`x.flatten(0, 1)[indices]`; the gradient is put into zeros, sorted by index
    (_index_first_axis)."""
    out = r.tensor((indices.count, *x.shape[2:]), x.format, "index")
    return r.node("index", out, (x,), back_chosen, (indices,), x.shape)


def back_chosen(r: Recorder, node: Node, g: Tensor) -> Grads:
    out = r.tensor(node.extra, g.format, "zeros")
    held = r.scratch(kernels.index_put_accumulate(node.saved[0].count), "index_put")
    del held
    return (out,)


def put_back(r: Recorder, x: Tensor, indices: Tensor, rows: int) -> Tensor:
    """Into zeros of every token, padding too (bert_padding.py IndexPutFirstAxis)."""
    out = r.tensor((rows, *x.shape[1:]), x.format, "zeros")
    return r.node("index_put", out, (x,), back_put, (indices,), x.shape)


def back_put(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.tensor(node.extra, g.format, "index"),)


def attention(q: Tensor, k: Tensor, v: Tensor, sequences: int, ctx: Context) -> Tensor:
    """One call of the package on (B, S, N, H), or, of `sequences` unpadded ones, on (T, N, H)."""
    third = ctx.job.attention == "flash-attn-3"
    return (attention_3 if third else attention_2)(q, k, v, sequences, ctx)


def sizes_of(q: Tensor, k: Tensor, sequences: int) -> tuple[int, int, int, int, int, int]:
    """Sequences, query and key heads, queries, keys, head size; unpadded lengths are those of an
    even batch."""
    if sequences:
        return (
            sequences,
            q.shape[1],
            k.shape[1],
            q.shape[0] // sequences,
            k.shape[0] // sequences,
            q.shape[2],
        )
    return q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3]


def attention_2(q: Tensor, k: Tensor, v: Tensor, sequences: int, ctx: Context) -> Tensor:
    """Keeps q, k, v, the output, one fp32 number a row, two integers of random state and, unpadded,
    the lengths."""
    r = ctx.r
    head = q.shape[-1]
    q, k, v = (padded(r, one) for one in (q, k, v))
    batch, heads, groups, queries, keys, wide = sizes = sizes_of(q, k, sequences)
    out = r.like(q, "flash_attention")
    lse = r.tensor((batch, heads, queries), FP32, "flash_attention")
    state = r.tensor((2,), INT64, "flash_attention")
    lasting = r.tensor((sequences + 1,), INT32, "cu_seqlens") if sequences else None
    if not sequences:
        folded = (groups, heads // groups) if queries == 1 and heads != groups else (heads, queries)
        held = [
            r.scratch(size, "flash_attention")
            for size in kernels.flash_split_buffers(
                batch, *folded, keys, wide, ctx.program.processors
            )
        ]
        del held
    flops = 4 * q.count * keys // (2 if queries > 1 else 1)
    r.compute(
        "flash_attention",
        flops,
        (q.count * 2 + k.count + v.count) * q.format.block_bytes,
        q.format.math,
    )
    saved = (q, k, v, out.detach(), lse, state, lasting)
    out = r.node(
        "flash_attention",
        out,
        (q, k, v),
        back_2,
        saved,
        (sizes, flops, q.shape[0] if sequences else 0, head),
    )
    return views.narrow(r, out, -1, head)


def back_2(r: Recorder, node: Node, g: Tensor) -> Grads:
    q, k, v, *_ = node.saved
    sizes, flops, real, head = node.extra
    grads = [r.like(one, "flash_attention") for one in (q, k, v)]
    wide = r.tensor(q.shape, g.format, "pad") if head != q.shape[-1] else None
    batch, heads, groups, queries, keys, width = sizes
    held = kernels.flash_attn_2_backward(
        batch, heads, groups, queries, keys, width, q.format.block_bytes, real
    )
    scratch = [
        r.scratch(size, "flash_attention")
        for size in (held.softmax_d, held.dq_accum, held.dk_expanded, held.dv_expanded)
    ]
    r.compute(
        "flash_attention_backward",
        flops * 5 // 2,
        2 * (q.count * 2 + k.count + v.count) * q.format.block_bytes,
        q.format.math,
    )
    del scratch, wide
    return grads


def attention_3(q: Tensor, k: Tensor, v: Tensor, sequences: int, ctx: Context) -> Tensor:
    """Keeps q, k, v, the output, one fp32 number a row; the kernel handles any head size itself."""
    r = ctx.r
    batch, heads, _, queries, keys, _ = sizes = sizes_of(q, k, sequences)
    out = r.like(q, "flash_attention")
    lse = r.tensor((batch, heads, queries), FP32, "flash_attention")
    lasting = r.tensor((sequences + 1,), INT32, "cu_seqlens") if sequences else None
    counter = r.scratch(4 * (1 + 4 * kernels.up(batch, 4) * bool(sequences)), "flash_attention")
    flops = 4 * q.count * keys // (2 if queries > 1 else 1)
    r.compute(
        "flash_attention",
        flops,
        (q.count * 2 + k.count + v.count) * q.format.block_bytes,
        q.format.math,
    )
    del counter
    saved = (q, k, v, out.detach(), lse, lasting)
    extra = (sizes, flops, q.shape[0] if sequences else 0, ctx.capability >= HOPPER)
    return r.node("flash_attention", out, (q, k, v), back_3, saved, extra)


def back_3(r: Recorder, node: Node, g: Tensor) -> Grads:
    q, k, v, *_ = node.saved
    sizes, flops, real, hopper = node.extra
    grads = [r.like(one, "flash_attention") for one in (q, k, v)]
    scratch = [
        r.scratch(size, "flash_attention")
        for size in kernels.flash_attn_3_backward(*sizes, real=real, hopper=hopper)
    ]
    r.compute(
        "flash_attention_backward",
        flops * 5 // 2,
        2 * (q.count * 2 + k.count + v.count) * q.format.block_bytes,
        q.format.math,
    )
    del scratch
    return grads
