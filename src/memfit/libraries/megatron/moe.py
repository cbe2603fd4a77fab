"""Megatron's mixture of experts: router, dispatcher, TE's grouped products, shared experts
(megatron-core 0.16.1 transformer/moe/moe_layer.py, experts.py TEGroupedMLP, shared_experts.py; TE
2.11 pytorch/module/grouped_linear.py).

What `custom_forward` calls by a name stays until it returns, so that the rows that were sent and
those that came are there as long as the experts run. Left out: what the dispatcher of a layer keeps
of one micro-batch until the next (its maps), streams beside the main one.
"""

from __future__ import annotations

from typing import Any

from memfit.libraries.megatron import dispatch
from memfit.libraries.megatron.ranks import Ranks, of
from memfit.libraries.megatron.recompute import again, asked, made_again
from memfit.libraries.megatron.router import routed, settings
from memfit.libraries.megatron.te import dummy, entering, gradients, product, rms_norm, swiglu
from memfit.lower import ops
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.modules import Block, MoE


def mixture(x: Tensor, block: Block, bound: Bound, ctx: Context) -> Tensor:
    """(S, B, D); the norm stands before all parts (transformer_layer.py pre_mlp_layernorm)."""
    mixer = block.mixer
    assert isinstance(mixer, MoE)
    assert block.norm is not None
    norm = block.norm

    def parts(normed: Tensor) -> Tensor:
        beside = (
            again(ctx.r, beside_all, normed)
            if mixer.shared is not None and asked(ctx, "shared_experts")
            else beside_all(normed)
        )
        way = by_gathering if settings(ctx).dispatcher == "allgather" else by_exchange
        out = way(
            normed.view(normed.count // normed.shape[-1], normed.shape[-1]), mixer, bound, ctx
        ).view(*normed.shape)
        ctx.r.where = bound.path(mixer.name)
        return out if beside is None else ops.add(ctx.r, out, beside)

    def beside_all(normed: Tensor) -> Any:
        return shared(normed, mixer, bound, ctx)

    def run(normed: Tensor) -> Tensor:
        return again(ctx.r, parts, normed) if asked(ctx, "moe") else parts(normed)

    if asked(ctx, "layernorm"):
        return made_again(ctx.r, lambda x: rms_norm(x, norm, bound, ctx), x, run)
    return run(rms_norm(x, norm, bound, ctx))


def shared(x: Tensor, mixer: MoE, bound: Bound, ctx: Context) -> Tensor | None:
    """A feed-forward for all tokens, without a norm of its own; behind a gate for some (Qwen 2)."""
    mlp, r = mixer.shared, ctx.r
    if mlp is None:
        return None
    assert mlp.gate is not None
    inner = swiglu(entering(x, (mlp.gate, mlp.up), bound, ctx, of(ctx)), bound.path(mlp.name), r)
    out = product(inner, mlp.down, bound, ctx)
    del inner
    if mixer.shared_gate is None:
        return out
    gate = ops.linear(r, x, bound.linear(mixer.shared_gate).weight, None, 1)
    return ops.mul(r, out, ops.activation(r, gate, "sigmoid"))


def by_exchange(x: Tensor, mixer: MoE, bound: Bound, ctx: Context) -> Tensor:
    """MoEAlltoAllTokenDispatcher."""
    r, ep, (across, each) = ctx.r, settings(ctx), dispatch.groups(ctx)
    weights, map = routed(x, mixer, bound, ctx)
    rows = dispatch.rows_of(x.shape[0], mixer, ep, each.size)
    r.where = bound.path(mixer.name)
    outgoing, places = dispatch.permuted(r, x, map, rows.sent, ep.fused)
    picked = dispatch.weights_of(r, weights, map, rows.sent, ep.fused)
    arrived = dispatch.exchanged(r, outgoing, rows.own // each.size, across)
    picked = dispatch.exchanged(r, picked, rows.own // each.size, across)
    inside = dispatch.sorted_rows(r, dispatch.gathered(r, arrived, each), mixer, ep)
    picked = dispatch.sorted_rows(r, dispatch.gathered(r, picked, each), mixer, ep)
    result = experts(inside, picked, mixer, bound, ctx)
    del inside
    r.where = bound.path(mixer.name)
    back = dispatch.summed(r, dispatch.sorted_rows(r, result, mixer, ep), each)
    del result
    returned = dispatch.exchanged(r, back, rows.sent, across)
    out = dispatch.unpermuted(r, returned, places, x.shape[0])
    del outgoing, arrived, back
    return out


def by_gathering(x: Tensor, mixer: MoE, bound: Bound, ctx: Context) -> Tensor:
    """MoEAllGatherTokenDispatcher: all tokens of the ranks that share out the experts, of which
    each takes those that its experts want. What is gathered lies in a buffer for good."""
    r, ep, (across, each) = ctx.r, settings(ctx), dispatch.groups(ctx)
    weights, map = routed(x, mixer, bound, ctx)
    ranks = Ranks(size=across.size * each.size, name="ep")
    rows = dispatch.rows_of(x.shape[0], mixer, ep, each.size)
    r.where = bound.path(mixer.name)
    map, weights, tokens = (dispatch.gathered(r, one, ranks) for one in (map, weights, x))
    own = dispatch.held_experts(r, map, mixer.held)
    picked = dispatch.held_experts(r, weights, mixer.held)
    inside, places = dispatch.permuted(r, tokens, own, rows.own, ep.fused)
    picked = dispatch.weights_of(r, picked, own, rows.own, False)
    result = experts(inside, picked, mixer, bound, ctx)
    del inside
    r.where = bound.path(mixer.name)
    out = dispatch.summed(r, dispatch.unpermuted(r, result, places, tokens.shape[0]), ranks)
    del tokens, map, weights
    return out


# ------------------------------------------------------------------------------------- the experts
def experts(x: Tensor, weights: Tensor, mixer: MoE, bound: Bound, ctx: Context) -> Tensor:
    """Two grouped products around SwiGLU, which the weights enter."""
    path = f"{mixer.name}.{mixer.experts_name}"
    ctx.r.where = bound.path(path)
    inner = grouped(ctx.r, x, bound[f"{path}.gate_up_proj"], 2 * mixer.width)

    def last(rows: Tensor) -> Tensor:
        return grouped(ctx.r, rows, bound[f"{path}.down_proj"], mixer.inputs)

    if asked(ctx, "moe_act"):
        return made_again(ctx.r, lambda rows: weighted(ctx.r, rows, weights), inner, last)
    return last(weighted(ctx.r, inner, weights))


def grouped(r: Recorder, x: Tensor, weight: Tensor, outputs: int) -> Tensor:
    """GroupedLinear, a product for each expert (cpp_extensions/gemm.py general_grouped_gemm): keeps
    its input; gradients of the matrices are added up elsewhere."""
    out = r.tensor((x.shape[0], outputs), x.format, "grouped_linear")
    flops = 2 * x.count * outputs
    matrices = weight.shape[0]
    r.compute(
        "te_linear",
        flops,
        (x.count + weight.count + out.count) * x.format.block_bytes,
        x.format.math,
        kernels=matrices,
    )
    return r.node(
        "grouped_linear", out, (x, weight), back_grouped, (x, weight), (x.shape, flops, matrices)
    )


def back_grouped(r: Recorder, node: Node, g: Tensor) -> Grads:
    shape, flops, matrices = node.extra
    out = r.tensor(shape, g.format, node.op)
    gradients(r, "te_linear", g, shape[-1], flops, matrices)
    dummy(r, g, shape[-1])
    return [out, None]


def weighted(r: Recorder, x: Tensor, weights: Tensor) -> Tensor:
    """silu(x₁)·x₂·w, compiled: keeps its inputs (fusions/fused_bias_swiglu.py
    WeightedSwiGLUFunction)."""
    out = r.tensor((x.shape[0], x.shape[1] // 2), x.format, "swiglu")
    return r.node(
        "swiglu",
        out,
        (x, weights),
        back_weighted,
        (x, weights),
        (x.shape, weights.shape, weights.format),
    )


def back_weighted(r: Recorder, node: Node, g: Tensor) -> Grads:
    shape, rows, format = node.extra
    return r.tensor(shape, g.format, node.op), r.tensor(rows, format, node.op)
