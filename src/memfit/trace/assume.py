"""Values that a program of unknown kind may ask for, and the assumption that lets it go on: the
first choice is the largest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from memfit.trace import masks
from memfit.trace.recorder import Recorder
from memfit.trace.rules import RULES

aten = torch.ops.aten
NO = (False, None)


def argmax(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Predictions are real numbers, all 0: they are compared with labels and counted."""
    shape = func(*args, **kwargs).shape if args[0].is_meta else None
    if shape is None or shape.numel() > recorder.real_limit:
        return NO
    return True, torch.zeros(shape, dtype=torch.int64)


def largest(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """The same for the indices beside the values."""
    if not args[0].is_meta:
        return NO
    values, indices = func(*args, **kwargs)
    if indices.numel() > recorder.real_limit:
        return True, (values, indices)
    return True, (values, torch.zeros(indices.shape, dtype=torch.int64))


EVERYTHING = "a mask whose values only a GPU could compute is taken to select everything"


def places(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """`nonzero`, `torch.where(mask)`: every place there is."""
    if not args[0].is_meta:
        return NO
    recorder.assume("mask", EVERYTHING)
    shape = (args[0].numel(), args[0].dim())
    return True, torch.empty(shape, dtype=torch.int64, device="meta")


def taken(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """`masked_select`: every value there is."""
    if not any(one.is_meta for one in args[:2]):
        return NO
    recorder.assume("mask", EVERYTHING)
    count = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    return True, torch.empty(count, dtype=args[0].dtype, device="meta")


def counted(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """How many a mask selects, where a list of such numbers is asked for: everything, as above."""
    if not args[0].is_meta or args[0].dtype is not torch.bool:
        return NO
    result = func(*args, **kwargs)
    if result.numel():
        result.selected = args[0].numel() // result.numel()
    return True, result


def ctc(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Losses, and the forward variables of every target with blanks between its symbols (torch
    2.13 aten/src/ATen/native/cuda/LossCTC.cu `ctc_loss_gpu_template`)."""
    probabilities, targets, _, lengths = args[:4]
    if not probabilities.is_meta:
        return NO
    time, batch = probabilities.shape[0], (*probabilities.shape[1:-1], 1)[0]
    known = not isinstance(lengths, torch.Tensor) or not lengths.is_meta
    longest = max(map(int, lengths)) if known else targets.shape[-1] if targets.dim() > 1 else time
    losses = torch.empty(batch, dtype=probabilities.dtype, device="meta")
    shape = (batch, time, 2 * longest + 1)
    return True, (losses, torch.empty(shape, dtype=probabilities.dtype, device="meta"))


def ctc_backward(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    if not args[1].is_meta:
        return NO
    return True, torch.empty(args[1].shape, dtype=args[1].dtype, device="meta")


ASSUMED: dict[Any, Callable[[Any, Any, Any, Any], tuple[bool, Any]]] = {
    aten.argmax.default: argmax,
    aten.argmin.default: argmax,
    aten.multinomial.default: argmax,
    aten.max.dim: largest,
    aten.min.dim: largest,
    aten.mode.default: largest,
    aten.nonzero.default: places,
    aten.sum.dim_IntList: counted,
    aten.sum.default: counted,
    aten.masked_select.default: taken,
    aten._ctc_loss.default: ctc,
    aten._ctc_loss.Tensor: ctc,
    aten._ctc_loss_backward.default: ctc_backward,
    aten._ctc_loss_backward.Tensor: ctc_backward,
}


def install() -> None:
    """Beside the rules that every trace follows."""
    masks.install()
    for op, rule in ASSUMED.items():
        before = RULES.get(op)
        RULES[op] = rule if before is None else masks.both(before, rule)


__all__ = ["install"]
