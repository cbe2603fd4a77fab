"""Masks of known values select what they select, as CUDA's kernels find it: by the indices of what
is true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from memfit.trace.ops import aten, collect
from memfit.trace.recorder import Recorder
from memfit.trace.rules import RULES

NO = (False, None)
Rule = Callable[[Any, Any, Any, Any], tuple[bool, Any]]


def selected(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """`x[mask]` on the GPU, whose mask is known: the indices of what is true are made first, as the
    kernel makes them (ATen/native/TensorAdvancedIndexing.cpp `expandTensors`, torch 2.13)."""
    found: list[torch.Tensor] = []
    collect(args, found)
    masks = [one for one in args[1] if one is not None and one.dtype in (torch.bool, torch.uint8)]
    if (
        not masks
        or not all(within(recorder, one) for one in masks)
        or not any(one.is_meta for one in found)
        or filled(func, args)
    ):
        return NO
    places: list[torch.Tensor | None] = []
    held = []
    for one in args[1]:
        if one is not None and one.dtype in (torch.bool, torch.uint8):
            if one.is_meta:
                recorder.assume(
                    "mask",
                    "a mask computed from data is assumed to select everything",
                )
                one = torch.ones(one.shape, dtype=torch.bool)
            truth = recorder.seen(aten.nonzero.default, (one,), {}, places_of(recorder, one), True)
            held.append(truth)
            places += [part if part.is_meta else part.to("meta") for part in truth.unbind(1)]
        else:
            places.append(one if one is None or one.is_meta else one.to("meta"))
    source = args[0] if args[0].is_meta else args[0].to("meta")
    rest = tuple(
        one.to("meta") if isinstance(one, torch.Tensor) and not one.is_meta else one
        for one in args[2:]
    )
    result = func(source, places, *rest, **kwargs)
    return True, args[0] if result is source else result


def judged(rule: Rule) -> Rule:
    """What backward writes into zeros by a mask, it writes to the indices of what is true."""

    def found(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        done, result = rule(recorder, func, args, kwargs)
        masks = (
            [one for one in args[1] if one is not None and one.dtype in (torch.bool, torch.uint8)]
            if done
            else []
        )
        held = [
            recorder.seen(aten.nonzero.default, (one,), {}, places_of(recorder, one), True)
            for one in masks
            if not one.is_meta
        ]
        del held
        return done, result

    return found


def within(recorder: Recorder, mask: torch.Tensor) -> bool:
    """Whether it is real, or small enough to be taken as one; a row that is seen as many
    (`expand_as`) is real at any size."""
    return not mask.is_meta or mask.numel() <= recorder.real_limit


def places_of(recorder: Recorder, mask: torch.Tensor) -> torch.Tensor:
    if mask.numel() <= recorder.real_limit:
        return torch.nonzero(mask)
    return torch.empty((int(mask.sum()), mask.dim()), dtype=torch.int64, device="meta")


def masked_select(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    source, mask = args[:2]
    if not source.is_meta or mask.is_meta:
        return NO
    count = int(mask.expand(torch.broadcast_shapes(source.shape, mask.shape)).sum())
    return True, torch.empty((count,), dtype=source.dtype, device="meta")


def filled(func: Any, args: Any) -> bool:
    """`x[mask] = value` is a masked fill, without indices (TensorAdvancedIndexing.cpp
    `canDispatchToMaskedFill`)."""
    return (
        func is not aten.index.Tensor
        and len(args) > 2
        and args[2].numel() == 1
        and not (len(args) > 3 and args[3])
    )


def both(first: Rule, second: Rule) -> Rule:
    """The second where the first has nothing to say."""

    def rule(*given: Any) -> tuple[bool, Any]:
        done, result = first(*given)
        found: tuple[bool, Any] = (done, result) if done else second(*given)
        return found

    return rule


SELECTING: dict[Any, Rule] = {
    aten.index.Tensor: selected,
    aten.index_put.default: selected,
    aten.index_put_.default: selected,
    aten.masked_select.default: masked_select,
}
INSTALLED: list[Any] = []


def install() -> None:
    """Beside the rules for the same operators, once a process."""
    if INSTALLED:
        return
    for op, rule in SELECTING.items():
        before = RULES.get(op)
        RULES[op] = rule if before is None else both(judged(before), rule)
        INSTALLED.append(op)


__all__ = ["both", "install"]
