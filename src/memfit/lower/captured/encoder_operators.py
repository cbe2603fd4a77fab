"""Operations of encoders and decoders in the small torch: norms, dropout and losses, as autocast
has them, too."""

from __future__ import annotations

from memfit.formats import BOOL, FP32
from memfit.lower import functional, norms, ops, views
from memfit.lower.captured.operators import linear as plain_linear
from memfit.lower.captured.operators import operator, other, tensors
from memfit.lower.captured.run import Frame, Step
from memfit.lower.context import Context
from memfit.lower.linears import cast_weight
from memfit.lower.tensors import Tensor


@operator("native_layer_norm")
def layer_norm(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    """Autocast runs it in fp32, casting what is not (ATen/autocast_mode.h fp32)."""
    x, *weights = args[0], *args[1:]
    assert x is not None
    r, ctx = frame.ctx.r, frame.ctx
    if ctx.autocast is not None:
        x = ops.cast(r, x, FP32)
        weights = [None if one is None else ops.cast(r, one, FP32) for one in weights]
    weight, bias = (*weights, None, None)[:2]
    out = norms.on_device(x, weight, bias, ctx)
    return (out, *(Tensor(spec.shape, FP32, None) for spec in step.outs[1:]))


@operator("_fused_rms_norm")
def rms_norm(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    x, *weights = args
    assert x is not None
    out = functional.rms_norm(x, next(iter(weights), None), frame.ctx)
    return (out, *(Tensor(spec.shape, FP32, None) for spec in step.outs[1:]))


@operator("native_dropout")
def dropout(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    x = tensors(args)[0]
    out = ops.dropout(frame.ctx.r, x, frame.rate(step.op.attrs["p"]))
    return out, Tensor(x.shape, BOOL, None)


@operator("_log_softmax")
def log_softmax(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    return (ops.log_softmax(frame.ctx.r, tensors(args)[0]),)


@operator("nll_loss_forward")
def nll_loss(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    """Autocast casts the log-probabilities for it, and not for what made them."""
    logs, labels = tensors(args)[:2]
    read = FP32 if frame.ctx.autocast is not None else None
    return ops.nll_loss(frame.ctx.r, logs, labels, read), Tensor((), FP32, None)


@operator("zeros")
def zeros(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    """`narrow`: its dtype is that of what autocast made. `leaf`: the model's code asks for its
    gradient where the model has checkpoints, so that attention makes one of its bias
    (transformers 5.23 modeling_t5.py T5Attention.forward)."""
    ctx, attrs = frame.ctx, step.op.attrs
    if attrs.get("narrow") and ctx.autocast is not None:
        out = ctx.r.tensor(step.outs[0].shape, ctx.autocast, "zeros")
    else:
        (out,) = other(step, args, frame)
    out.needs = out.needs or (
        bool(attrs.get("leaf")) and ctx.job.training and ctx.job.checkpointing != "none"
    )
    return (out,)


def in_16_bits(args: list[Tensor | None], frame: Frame) -> list[Tensor]:
    """The operands of a product as autocast has them: the last one is cast first."""
    given = tensors(args)
    narrow = frame.ctx.autocast
    args.clear()
    if narrow is None:
        return given
    for place in range(len(given) - 1, -1, -1):
        given[place] = ops.cast(frame.ctx.r, given[place], narrow)
    return given


@operator("bmm")
def bmm(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    a, b = in_16_bits(args, frame)
    return (views.bmm(frame.ctx.r, a, b),)


@operator("mm")
def mm(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    a, b = in_16_bits(args, frame)
    return (ops.matmul(frame.ctx.r, a, b, (a.shape[0], b.shape[1])),)


@operator("_softmax")
def softmax(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    """Autocast runs it in fp32 (ATen/autocast_mode.h fp32_set_opt_dtype)."""
    r, x = frame.ctx.r, tensors(args)[0]
    if frame.ctx.autocast is not None:
        x = ops.cast(r, x, FP32)
    out = r.like(x, "softmax")
    return (r.node("softmax", out, (x,), ops.back_softmax, (out.detach(),), x.format),)


@operator("pow.Tensor_Scalar")
def power(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    """Autocast runs it in fp32 (ATen/autocast_mode.h fp32)."""
    r, x = frame.ctx.r, tensors(args)[0]
    if frame.ctx.autocast is not None:
        x = ops.cast(r, x, FP32)
    return (r.node("pow", r.like(x, "pow"), (x,), ops.back_power, (x,)),)


@operator("convolution")
def convolution(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    """Autocast casts its operands as those of linear layers, the last one first
    (ATen/autocast_mode.h lower_precision_fp)."""
    for place in range(len(args) - 1, -1, -1) if frame.casts is None else ():
        args[place] = cast_operand(step, place, args[place], frame.ctx)
    return other(step, args, frame)


def cast_operand(step: Step, place: int, given: Tensor | None, ctx: Context) -> Tensor | None:
    """What autocast hands to an operation in 16 bits; the casts of weights stay."""
    if given is None or ctx.autocast is None:
        return given
    if isinstance(step.op.inputs[place], str):
        return cast_weight(given, ctx)
    return ops.cast(ctx.r, given, ctx.autocast)


@operator("linear")
def linear(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    """Some code casts what goes into a linear layer to the dtype of its weight, which shows where
    autocast made the former narrower (transformers 5.23 modeling_t5.py T5DenseActDense)."""
    x, weight = args[:2]
    if x is not None and weight is not None and x.format is not weight.format:
        name = str(step.op.inputs[1])[1:].removesuffix(".weight")
        if name.endswith(frame.ctx.program.model.casting or ("\0",)):
            args[0] = ops.cast(frame.ctx.r, x, weight.format)
            del x
    return plain_linear(step, args, frame)


__all__ = ["dropout", "layer_norm"]
