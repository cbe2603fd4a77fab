"""Values that a program of unknown kind may ask for, and the assumption that lets it go on: the first choice is the largest,
and a mask of known values selects what it selects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from memfit.trace.recorder import Recorder, collect
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


def selected(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """`x[mask]` on the GPU, whose mask is known: the indices of what is true are made first, as the kernel makes them
    (ATen/native/TensorAdvancedIndexing.cpp `expandTensors`, torch 2.13)."""
    found: list[torch.Tensor] = []
    collect(args, found)
    known = any(one is not None and one.dtype in (torch.bool, torch.uint8) and not one.is_meta for one in args[1])
    if not known or not any(one.is_meta for one in found):
        return NO
    places: list[torch.Tensor | None] = []
    held = []
    for one in args[1]:
        if one is not None and one.dtype in (torch.bool, torch.uint8):
            truth = recorder.seen(aten.nonzero.default, (one,), {}, torch.nonzero(one), True)
            held.append(truth)
            places += [part.to("meta") for part in truth.unbind(1)]
        else:
            places.append(one if one is None or one.is_meta else one.to("meta"))
    source = args[0] if args[0].is_meta else args[0].to("meta")
    rest = tuple(one.to("meta") if isinstance(one, torch.Tensor) and not one.is_meta else one for one in args[2:])
    result = func(source, places, *rest, **kwargs)
    return True, args[0] if result is source else result


def masked_select(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    source, mask = args[:2]
    if not source.is_meta or mask.is_meta:
        return NO
    count = int(mask.expand(torch.broadcast_shapes(source.shape, mask.shape)).sum())
    return True, torch.empty((count,), dtype=source.dtype, device="meta")


def equal(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """`torch.equal` of single numbers that the program said itself; others are taken to differ."""
    if not any(one.is_meta for one in args[:2]):
        return NO
    values = [single(recorder, one) for one in args[:2]]
    return True, args[0] is args[1] or (None not in values and values[0] == values[1])


def single(recorder: Recorder, tensor: torch.Tensor) -> float | None:
    if tensor.numel() != 1:
        return None
    block = recorder.owned(tensor)
    if tensor.is_meta:
        return None if block is None else block.value
    return float(tensor)


ASSUMED: dict[Any, Callable[[Any, Any, Any, Any], tuple[bool, Any]]] = {
    aten.argmax.default: argmax, aten.argmin.default: argmax, aten.max.dim: largest, aten.min.dim: largest, aten.mode.default: largest,
    aten.index.Tensor: selected, aten.index_put.default: selected, aten.index_put_.default: selected, aten.masked_select.default: masked_select,
    aten.equal.default: equal,
}  # fmt: skip


def install() -> None:
    """Beside the rules that every trace follows."""
    for op, rule in ASSUMED.items():
        before = RULES.get(op)
        RULES[op] = rule if before is None else both(before, rule)


def both(first: Any, second: Any) -> Callable[[Any, Any, Any, Any], tuple[bool, Any]]:
    def rule(*given: Any) -> tuple[bool, Any]:
        done, result = first(*given)
        found: tuple[bool, Any] = (done, result) if done else second(*given)
        return found

    return rule


__all__ = ["install"]
