"""Attention of GPT-NeoX and Persimmon: one projection, laid out head by head, and part of each head
turned."""

from __future__ import annotations

from memfit.lower import views
from memfit.lower.attention.kernels import attend, remembered
from memfit.lower.attention.rotary import in_line, partly
from memfit.lower.attention.written import dropped_later
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.linears import linear
from memfit.lower.norms import norm
from memfit.lower.tensors import Tensor
from memfit.model.modules import Attention


@dropped_later
def gpt_neox(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """transformers 5.23 modeling_gpt_neox.py GPTNeoXAttention."""
    r, head = ctx.r, module.head
    fused = linear(x, bound.linear(module.project[0]), ctx)
    r.where = bound.path(module.name)
    b, s, _ = fused.shape
    fused = views.transpose(r, views.reshape(r, fused, b, s, module.heads, 3 * head), 1, 2)
    q, k, v = views.split(r, fused, 3, head, head, head)
    q, k = partly(q, k, ctx)
    k, v = remembered(k, v, module, bound, ctx)
    return linear(views.merged(r, attend(q, k, v, module, ctx)), bound.linear(module.out), ctx)


def persimmon(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """Norms between the heads and their rotation (transformers 5.23 modeling_persimmon.py
    PersimmonAttention)."""
    r = ctx.r
    fused = linear(x, bound.linear(module.project[0]), ctx)
    r.where = bound.path(module.name)
    b, s, _ = fused.shape
    fused = views.reshape(r, fused, b, s, module.heads, 3, module.head)
    q, k, v = (views.select(r, fused, 3) for _ in range(3))
    if module.q_norm is not None and module.k_norm is not None:
        q, k = norm(q, module.q_norm, bound, ctx), norm(k, module.k_norm, bound, ctx)
        r.where = bound.path(module.name)
    q, v, k = (views.transpose(r, one, 1, 2) for one in (q, v, k))
    q, k, *parts = in_line(q, k, ctx)
    k, v = remembered(k, v, module, bound, ctx)
    out = linear(views.merged(r, attend(q, k, v, module, ctx)), bound.linear(module.out), ctx)
    del parts
    return out
