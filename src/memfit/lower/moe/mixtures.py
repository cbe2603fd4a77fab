"""The mixtures: a router, the experts that it chooses, and those that run for every token."""

from __future__ import annotations

from memfit.lower import ops as plain
from memfit.lower import views
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.linears import linear
from memfit.lower.moe import experts, gates, ops, routers, separate
from memfit.lower.moe.phimoe import phimoe
from memfit.lower.programs import Experts
from memfit.lower.tensors import Tensor
from memfit.model.modules import MLP, MoE


def flat(ctx: Context, x: Tensor) -> Tensor:
    """(B, S, D) as (T, D)."""
    return views.reshape(ctx.r, x, x.count // x.shape[-1], x.shape[-1])


def run(module: MoE, ctx: Context) -> Experts:
    """The code of the experts, by where they are and how they lie."""
    if module.each:
        return separate.LOOPS.get(module.style, separate.one_by_one)
    return ctx.programs.experts or experts.run


def always(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> Tensor:
    """The shared experts, one feed-forward for all."""
    assert isinstance(module.shared, MLP)
    return ctx.programs.mlps[module.shared.style](x, module.shared, bound, ctx)


def routed(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> Tensor:
    """Router and experts, nothing else (modeling_mixtral.py MixtralSparseMoeBlock)."""
    shape = x.shape
    hidden = flat(ctx, ops.jittered(ctx.r, x, module.jitter and ctx.training))
    _logits, weights, places = ROUTERS[module.style](hidden, module, bound, ctx)
    gate = gates.GATES.get(module.style, experts.gate)
    hidden = run(module, ctx)(hidden, weights, places, module, bound, ctx, gate)
    return views.reshape(ctx.r, hidden, *shape)


def qwen2_moe(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> Tensor:
    """The shared expert runs first; its gate comes last (modeling_qwen2_moe.py
    Qwen2MoeSparseMoeBlock)."""
    r, shape = ctx.r, x.shape
    hidden = flat(ctx, x)
    shared = always(hidden, module, bound, ctx)
    _logits, weights, places = routers.qwen2_moe(hidden, module, bound, ctx)
    output = run(module, ctx)(hidden, weights, places, module, bound, ctx, experts.gate)
    assert module.shared_gate is not None
    opened = linear(hidden, bound.linear(module.shared_gate), ctx)
    r.where = bound.path(module.name)
    shared = plain.mul(r, plain.activation(r, opened, "sigmoid"), shared)
    del opened
    output = plain.add(r, output, shared)
    return views.reshape(r, output, *shape)


def deepseek(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> Tensor:
    """The shared experts run last, on the layer's own input (modeling_deepseek_v3.py
    DeepseekV3MoE)."""
    _logits, weights, places = ROUTERS[module.style](flat(ctx, x), module, bound, ctx)
    hidden = flat(ctx, x)
    hidden = views.reshape(
        ctx.r, run(module, ctx)(hidden, weights, places, module, bound, ctx, experts.gate), *x.shape
    )
    shared = always(x, module, bound, ctx)
    ctx.r.where = bound.path(module.name)
    return plain.add(ctx.r, hidden, shared)


def ernie4_5_moe(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> Tensor:
    """The shared experts run first, where there are any (modeling_ernie4_5_moe.py
    Ernie4_5_MoeSparseMoeBlock)."""
    shape = x.shape
    hidden = flat(ctx, x)
    shared = always(hidden, module, bound, ctx) if module.shared is not None else None
    _logits, weights, places = routers.ernie4_5_moe(hidden, module, bound, ctx)
    final = run(module, ctx)(hidden, weights, places, module, bound, ctx, experts.gate)
    if shared is not None:
        ctx.r.where = bound.path(module.name)
        final = plain.add(ctx.r, final, shared)
    return views.reshape(ctx.r, final, *shape)


ROUTERS = {
    "mixtral": routers.mixtral,
    "qwen3_moe": routers.qwen2_moe,
    "granitemoe": routers.granitemoe,
    "gpt_oss": routers.gpt_oss,
    "minimax_m2": routers.minimax_m2,
    "deepseek_v2": routers.deepseek_v2,
    "deepseek_v3": routers.deepseek_v3,
    "phimoe": phimoe,
}
