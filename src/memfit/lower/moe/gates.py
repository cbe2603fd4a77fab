"""Gates of experts that are more than act(gate) · up."""

from __future__ import annotations

from memfit.lower import ops as plain
from memfit.lower import views
from memfit.lower.activations import clamp
from memfit.lower.context import Context
from memfit.lower.moe.experts import Gate
from memfit.lower.tensors import Tensor
from memfit.model.modules import MoE


def gpt_oss(gate_up: Tensor, module: MoE, ctx: Context) -> Tensor:
    """Gate and up interleaved and clamped; (up + 1) · gate · σ(α·gate) (modeling_gpt_oss.py
    GptOssExperts._apply_gate)."""
    r, half = ctx.r, gate_up.shape[-1] // 2
    gate, up = (views.narrow(r, gate_up, -1, half, step=2) for _ in range(2))
    gate = clamp(r, gate, 1)
    up = clamp(r, up)
    glu = plain.mul(r, gate, plain.activation(r, plain.scale(r, gate), "sigmoid"))
    return plain.mul(r, plain.add_scalar(r, up), glu)


GATES: dict[str, Gate] = {"gpt_oss": gpt_oss}
