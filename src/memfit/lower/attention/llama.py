"""Attention of Llama and what writes it the same way."""

from __future__ import annotations

from memfit.lower import views
from memfit.lower.attention.kernels import attend, remembered
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.linears import linear
from memfit.lower.recorder import Tensor
from memfit.model.modules import Attention


def llama(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """Three projections, rotary, kernel, output (transformers 5.23 modeling_llama.py LlamaAttention)."""
    r = ctx.r
    q, k, v = (views.heads(r, linear(x, bound.linear(one), ctx), heads) for one, heads in zip(module.project, sizes(module), strict=True))
    r.where = bound.path(module.name)
    q, k = ctx.programs.rotary(q, k, ctx)
    k, v = remembered(k, v, module, bound, ctx)
    out = views.merged(r, attend(q, k, v, module, ctx))
    return linear(out, bound.linear(module.out), ctx)


def sizes(module: Attention) -> tuple[int, int, int]:
    return module.heads, module.kv_heads, module.kv_heads
