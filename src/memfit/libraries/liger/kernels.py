"""Liger-Kernel's Triton kernels in place of a family's own code: norms, rotary positions, gated
feed-forwards, cross-entropy.

Read from liger-kernel 0.8.5, `src/liger_kernel/ops/*.py`; gradients are written into what backward
no longer needs.
"""

from __future__ import annotations

from collections.abc import Mapping

from memfit.formats import BOOL, FP32, INT64
from memfit.libraries.liger import fused_loss
from memfit.libraries.liger.check import PATCHES, Patch
from memfit.libraries.liger.fused_loss import back_handed
from memfit.lower import head, ops, views
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.linears import linear
from memfit.lower.programs import Programs, Run
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.model import Model
from memfit.model.modules import MLP, Norm
from memfit.program import Program


# ------------------------------------------------------------------------------------------- norms
def rms_norm(
    r: Recorder, x: Tensor, weight: Tensor, processors: int, in_place: bool = True
) -> Tensor:
    """Keeps its input and one fp32 number a row (ops/rms_norm.py rms_norm_forward)."""
    x = ops.packed(r, x)
    out = r.tensor(x.shape, x.format, "liger_rms_norm")
    rows = r.tensor((x.count // x.shape[-1],), FP32, "liger_rms_norm")
    return r.node(
        "liger_rms_norm", out, (x, weight), back_rms_norm, (x, weight, rows), (processors, in_place)
    )


def back_rms_norm(r: Recorder, node: Node, g: Tensor) -> Grads:
    """The input's gradient overwrites the output's, or is new (`in_place` off); the weight's is
    summed up by each processor in fp32 first (rms_norm_backward)."""
    processors, in_place = node.extra
    g = contiguous(r, g)
    weight = node.saved[1]
    partial = (
        r.tensor((processors, g.shape[-1]), FP32, "liger_rms_norm")
        if node.inputs[1] is not None
        else None
    )
    to_x = g if in_place else r.tensor(g.shape, g.format, "liger_rms_norm")
    return to_x, summed(r, node, 1, partial, weight)


def summed(
    r: Recorder, node: Node, index: int, partial: Tensor | None, weight: Tensor
) -> Tensor | None:
    """`partial.sum(dim=0).to(weight.dtype)`."""
    if partial is None:
        return None
    wide = r.tensor(weight.shape, FP32, "sum", ops.grad_part(node, index))
    return (
        wide
        if weight.format is FP32
        else r.tensor(weight.shape, weight.format, "to", ops.grad_part(node, index))
    )


def contiguous(r: Recorder, g: Tensor) -> Tensor:
    """ops/utils.py ensure_contiguous."""
    return g if g.strides is None else r.tensor(g.shape, g.format, "contiguous")


def layer_norm(r: Recorder, x: Tensor, weight: Tensor, bias: Tensor, processors: int) -> Tensor:
    """Keeps its input and two fp32 numbers a row (ops/layer_norm.py layer_norm_forward)."""
    x = ops.packed(r, x)
    out = r.tensor(x.shape, x.format, "liger_layer_norm")
    rows = [r.tensor((x.count // x.shape[-1],), FP32, "liger_layer_norm") for _ in range(2)]
    return r.node(
        "liger_layer_norm",
        out,
        (x, weight, bias),
        back_layer_norm,
        (x, weight, bias, *rows),
        processors,
    )


def back_layer_norm(r: Recorder, node: Node, g: Tensor) -> Grads:
    g = contiguous(r, g)
    weight, bias = node.saved[1:3]
    partial = [
        r.tensor((node.extra, g.shape[-1]), FP32, "liger_layer_norm")
        if node.inputs[index] is not None
        else None
        for index in (1, 2)
    ]
    to_x = r.tensor(g.shape, g.format, "liger_layer_norm")
    return to_x, summed(r, node, 1, partial[0], weight), summed(r, node, 2, partial[1], bias)


# ------------------------------------------------------------------------------------------ rotary
def rope(r: Recorder, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turns queries and keys where they lie, forward and backward; only what does not lie as (B, S,
    N, H) is copied (ops/rope.py rope_forward, rope_backward)."""
    turned = [views.permuted(by_tokens(r, one), (0, 2, 1, 3)) for one in (q, k)]
    if r.grad and (q.needs or k.needs):
        r.node("liger_rope", turned[0], (q, k), back_rope, (cos, sin))
        node = turned[0].node
        assert node is not None
        node.outputs = 2
        for slot, one in enumerate(turned):
            one.node, one.needs, one.slot = node, True, slot
    return turned[0], turned[1]


def by_tokens(r: Recorder, x: Tensor) -> Tensor:
    """`x.transpose(1, 2).contiguous()`."""
    seen = views.permuted(x.detach(), (0, 2, 1, 3))
    return seen if seen.strides is None else r.tensor(seen.shape, seen.format, "contiguous")


def back_rope(r: Recorder, node: Node, given: dict[int, Tensor]) -> Grads:
    return [
        views.permuted(by_tokens(r, given[slot]), (0, 2, 1, 3)) if slot in given else None
        for slot in (0, 1)
    ]


# ------------------------------------------------------------------------------------ feed-forward
def product(r: Recorder, gate: Tensor, up: Tensor) -> Tensor:
    """act(gate) · up in one kernel that keeps both; their gradients overwrite them (ops/swiglu.py,
    ops/geglu.py). Halves of a fused projection are copied first."""
    gate, up = ops.packed(r, gate), ops.packed(r, up)
    out = r.like(gate, "liger_glu")
    return r.node("liger_glu", out, (gate, up), back_product, (gate, up))


def back_product(r: Recorder, node: Node, g: Tensor) -> Grads:
    gate, up = node.saved
    return gate.detach(), up.detach()


def gated(x: Tensor, module: MLP, bound: Bound, ctx: Context) -> Tensor:
    """LigerSwiGLUMLP, LigerGEGLUMLP (transformers/swiglu.py, geglu.py)."""
    assert module.gate is not None
    inner = product(
        ctx.r, linear(x, bound.linear(module.gate), ctx), linear(x, bound.linear(module.up), ctx)
    )
    return linear(inner, bound.linear(module.down), ctx)


def fused(x: Tensor, module: MLP, bound: Bound, ctx: Context) -> Tensor:
    """LigerPhi3SwiGLUMLP: one projection, cut in two."""
    both = linear(x, bound.linear(module.up), ctx)
    gate, up = views.split(ctx.r, both, -1, module.width, module.width)
    return linear(product(ctx.r, gate, up), bound.linear(module.down), ctx)


# -------------------------------------------------------------------------------------------- loss
def cross_entropy(r: Recorder, scores: Tensor) -> Tensor:
    """The gradient is made in the forward, in the place of the logits (ops/cross_entropy.py
    cross_entropy_forward)."""
    losses = r.tensor((scores.shape[0],), scores.format, "liger_loss")
    real = r.tensor((scores.shape[0],), BOOL, "ne")
    checked = r.tensor(
        (scores.shape[0],), INT64, "mul"
    )  # labels times mask, for their largest and smallest
    del checked
    out = r.tensor((1,), scores.format, "sum")
    del losses, real
    return r.node("liger_loss", out, (scores,), back_handed, (scores.detach(),))


def in_place(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """ForCausalLMLoss of transformers with Liger's cross-entropy inside: the logits are made fp32
    all the same."""
    scores = head.logits(hidden, model, bound, ctx)
    ctx.returned.append(scores)
    if PATCHES[model.family].plain_loss:
        return head.loss(scores, labels, model, ctx)
    r = ctx.r
    part, r.part = r.part, "logits"
    wide = ops.cast(r, scores, FP32)
    padded, shifted = head.targets(labels, ctx)
    out = cross_entropy(r, wide.view(ctx.batch * ctx.tokens, wide.shape[-1]))
    del padded, shifted, scores
    r.part = part
    return out


# --------------------------------------------------------------------------- what is patched where
def overlay(programs: Programs, program: Program) -> Programs:
    """The programs with Liger's in the places that it patches for the family."""
    if program.job.loss.startswith("liger"):
        losses = {**programs.losses, "liger": fused_loss.liger, "liger-ce": in_place}
        programs = programs.replace(losses=losses)
    if not program.job.liger:
        return programs
    patch = PATCHES[program.model.family]
    norms = (
        {**programs.norms, **{style: normed(patch, programs.norms[style]) for style in RMS}}
        if patch.norms
        else programs.norms
    )
    mlps: Mapping[str, Run] = {**programs.mlps, **MLPS} if patch.mlp else programs.mlps
    return programs.replace(
        norms=norms, mlps=mlps, rotary=turned if patch.rope else programs.rotary
    )


def normed(patch: Patch, own: Run) -> Run:
    def run(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
        if module.name.startswith("self_attn.") and not patch.inner:
            return own(x, module, bound, ctx)
        return rms_norm(
            ctx.r, x, bound[f"{module.name}.weight"], ctx.program.processors, patch.in_place
        )

    return run


def turned(q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
    assert ctx.cos is not None
    assert ctx.sin is not None
    return rope(ctx.r, q, k, ctx.cos, ctx.sin)


RMS = ("llama", "gemma", "olmo2")
MLPS: dict[str, Run] = {"gated": gated, "fused": fused}
