"""Unsloth's kernels put into transformers' code, as IBM's fms-acceleration does: norms, rotary
positions, cross-entropy, fused adapters.

Read from foundation-model-stack/fms-acceleration @876e2ed, plugins/fused-ops-and-kernels
(fms_acceleration_foak). Gradients overwrite what the forward kept.
"""

from __future__ import annotations

from memfit.formats import FP32
from memfit.libraries.liger import kernels as liger
from memfit.lower import head, ops
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.programs import Programs
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.lower.versions import NARROW
from memfit.model.model import Model
from memfit.model.modules import Norm
from memfit.program import Program

WIDE_MODEL = (
    4,
    46,
    # before, the model's own code made the logits fp32 (fms_acceleration_foak models/mistral.py
    # get_mp_rules)
)


def overlay(programs: Programs, program: Program) -> Programs:
    """The programs with Unsloth's in the places that the job names."""
    names = frozenset(name.strip() for name in program.job.unsloth.split(","))
    if "norms" in names:
        programs = programs.replace(norms={**programs.norms, "llama": rms_norm})
    if "rotary" in names:
        programs = programs.replace(
            rotary=liger.turned
        )  # in place, copies only of what lies otherwise: as Liger's
    if "loss" in names:
        programs = programs.replace(losses={**programs.losses, "plain": in_place})
    return programs


def rms_norm(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    """Keeps its input and one fp32 number a row; the weight gets no gradient
    (kernels/unsloth/rms_layernorm.py Fast_RMS_Layernorm)."""
    r = ctx.r
    r.where = bound.path(module.name)
    weight = bound[f"{module.name}.weight"]
    out = r.like(x, "unsloth_rms_norm")
    rows = r.tensor((x.count // x.shape[-1],), FP32, "unsloth_rms_norm")
    return r.node("unsloth_rms_norm", out, (x,), back_rms_norm, (x, weight, rows))


def back_rms_norm(r: Recorder, node: Node, g: Tensor) -> Grads:
    """The output's gradient is overwritten."""
    return (liger.contiguous(r, g),)


def in_place(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """fp32 logits (of most families), made by the model or by the loss, and a copy of all but each
    sequence's last, which becomes its own gradient (kernels/unsloth/cross_entropy_loss.py
    FastCrossEntropyLoss, FastForCausalLMLoss)."""
    r = ctx.r
    scores = head.logits(hidden, model, bound, ctx)
    part, r.part = r.part, "logits"
    wide = scores if model.family in NARROW else ops.cast(r, scores, FP32)
    if ctx.job.version("transformers") < WIDE_MODEL:
        scores = wide
    ctx.returned.append(scores)
    vocabulary = wide.shape[-1]
    rows = head.all_but_last(wide, ctx)
    targets = (
        ops.integers(r, (ctx.batch, ctx.tokens - 1), "contiguous") if ctx.batch > 1 else labels
    )
    loss = cross_entropy(r, rows.view(ctx.batch * (ctx.tokens - 1), vocabulary))
    r.part = part
    del scores, wide, targets
    return loss


LARGEST = 65536  # columns that one program takes; more are cut in pieces with a sum each


def cross_entropy(r: Recorder, scores: Tensor) -> Tensor:
    """Keeps the logits and a sum for each row."""
    rows, vocabulary = scores.shape[0], scores.shape[-1]
    losses = r.tensor((rows,), FP32, "unsloth_loss")
    sums = r.tensor((rows, -(-vocabulary // LARGEST)), FP32, "unsloth_loss")
    if vocabulary > LARGEST:
        sums = r.tensor((rows,), FP32, "logsumexp")
    out = r.tensor((1,), FP32, "sum")
    del losses
    return r.node("unsloth_loss", out, (scores,), back_cross_entropy, (scores.detach(), sums))


def back_cross_entropy(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (node.saved[0],)
