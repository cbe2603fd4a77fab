"""Multi-head latent attention: keys and values of every head come out of one small latent, which is
what the cache keeps (transformers 5.23 modeling_deepseek_v3.py DeepseekV3Attention,
modeling_deepseek_v2.py)."""

from __future__ import annotations

from memfit.formats import FP32
from memfit.lower import ops, views
from memfit.lower.attention import rotary
from memfit.lower.attention.kernels import attend, remembered
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.linears import linear
from memfit.lower.norms import norm
from memfit.lower.programs import Rotary
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.modules import Latent


def deepseek_v3(x: Tensor, module: Latent, bound: Bound, ctx: Context) -> Tensor:
    return run(x, module, bound, ctx, interleaved if module.interleaved else rotary.rotary)


def deepseek_v2(x: Tensor, module: Latent, bound: Bound, ctx: Context) -> Tensor:
    return run(x, module, bound, ctx, complex_turn)


def run(x: Tensor, module: Latent, bound: Bound, ctx: Context, turn: Rotary) -> Tensor:
    """The part of queries and keys without positions passes the rotation by; the rotated key is one
    for all heads."""
    r, b, s = ctx.r, ctx.batch, ctx.tokens
    q = views.heads(r, queries(x, module, bound, ctx), module.heads)
    q_pass, q_rot = views.split(r, q, 3, module.nope, module.rope)
    compressed = ctx.matrices.shared_key(linear(x, bound.linear(module.kv_a), ctx), module, ctx)
    latent, k_rot = views.split(r, compressed, 2, module.latent, module.rope)
    latent = views.reshape(r, norm(latent, module.kv_norm, bound, ctx), b, 1, s, module.latent)
    k_rot = views.reshape(r, k_rot, b, 1, s, module.rope)
    r.where = bound.path(module.name)
    q_rot, k_rot = turn(q_rot, k_rot, ctx)
    latent, k_rot = remembered(latent, k_rot, module, bound, ctx)
    q_states = ops.cat(r, (q_pass, q_rot), q.shape)
    k, v = expanded(latent, k_rot, module, bound, ctx)
    out = views.merged(r, attend(q_states, k, v, module, ctx))
    return linear(out, bound.linear(module.out), ctx)


def queries(x: Tensor, module: Latent, bound: Bound, ctx: Context) -> Tensor:
    """Straight from the input, or by way of a latent of their own."""
    if module.q_proj is not None:
        return linear(x, bound.linear(module.q_proj), ctx)
    assert module.q_a is not None
    assert module.q_b is not None
    assert module.q_norm is not None
    return linear(
        norm(linear(x, bound.linear(module.q_a), ctx), module.q_norm, bound, ctx),
        bound.linear(module.q_b),
        ctx,
    )


def expanded(
    latent: Tensor, k_rot: Tensor, module: Latent, bound: Bound, ctx: Context
) -> tuple[Tensor, Tensor]:
    """`expand_kv`: keys are written into a new tensor in two pieces, values are a view."""
    r = ctx.r
    b, _, tokens, _ = latent.shape
    both = views.heads(
        r,
        views.reshape(
            r, linear(latent, bound.linear(module.kv_b), ctx), b, tokens, module.kv_b.outputs
        ),
        module.heads,
    )
    r.where = bound.path(module.name)
    k_pass, v = views.split(r, both, 3, module.nope, module.value)
    k_rot = views.expand(r, k_rot, b, module.heads, tokens, module.rope)
    keys = r.tensor((b, module.heads, tokens, module.nope + module.rope), both.format, "new_empty")
    return written(r, written(r, keys, k_pass), k_rot), v


def written(r: Recorder, whole: Tensor, piece: Tensor) -> Tensor:
    """`whole[...].copy_(piece)` (torch/csrc/autograd/functions/tensor.cpp CopySlices)."""
    return r.node("copy", whole.detach(), (whole, piece), back_written, extra=piece.shape)


def back_written(r: Recorder, node: Node, g: Tensor) -> Grads:
    """A copy of the gradient, zero where the piece is, and a copy of the piece's."""
    rest = r.like(g, "copy_slices")
    part = r.tensor(node.extra, g.format, "clone")
    if node.inputs[0] is None:
        return [None, part]
    zeros = r.like(part, "zeros_like")
    del zeros
    return [rest, part]


def interleaved(q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
    """Neighbours make a pair, and come out as halves (apply_rotary_pos_emb_interleave)."""
    r = ctx.r
    cos, sin = (views.narrow(r, one, 3, one.shape[3] // 2) for one in rotary.tables(ctx))
    (q1, q2), (k1, k2) = (
        tuple(views.narrow(r, one, 3, one.shape[3] // 2, step=2) for _ in range(2))
        for one in (q, k)
    )
    first = rotary.halves_turned(r, q1, q2, cos, sin)
    return first, rotary.halves_turned(r, k1, k2, cos, sin)


def complex_turn(q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
    """Neighbours as complex numbers of two fp32 (modeling_deepseek_v2.py apply_rotary_emb)."""
    r = ctx.r
    assert ctx.cos is not None
    wide = [ops.cast(r, one, FP32) for one in (q, k)]
    first = ops.cast(r, complex_product(r, wide[0], ctx.cos), q.format)
    return first, ops.cast(r, complex_product(r, wide[1], ctx.cos), k.format)


def complex_product(r: Recorder, x: Tensor, table: Tensor) -> Tensor:
    """x seen as complex numbers, times the table: as many bytes as x."""
    return r.node("mul", r.like(x, "mul"), (x,), back_complex, (table,))


def back_complex(r: Recorder, node: Node, g: Tensor) -> Grads:
    """The table's conjugate is made first."""
    conjugate = r.like(node.saved[0], "conj")
    out = r.like(g, "mul")
    del conjugate
    return (out,)
