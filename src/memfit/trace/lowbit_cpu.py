"""bitsandbytes' optimizers on a CPU: where CUDA's kernels work in place, its code there is torch's
own (0.50 backends/cpu/ops.py `_optimizer_update_8bit_blockwise_cpu`,
`_optimizer_update_32bit_cpu`). States in 8 bits are unpacked whole, and packed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]
# First state, second one (where there are two), gradient and weight in fp32, and whether the states
# came in 8 bits. What a rule gives back is alive until the step of this parameter is over.
Rule = Callable[[torch.Tensor, Any, torch.Tensor, torch.Tensor, bool], Tensors]


def adam(
    first: torch.Tensor, second: Any, gradient: torch.Tensor, weight: torch.Tensor, narrow: bool
) -> Tensors:
    first.mul_(0.9).add_(gradient)
    second.mul_(0.9).addcmul_(gradient, gradient)
    if narrow:
        root = (second.sqrt() / 0.5).add_(1e-8)
        weight.addcdiv_(first, root)
        return (root,)
    update = first / (second.sqrt() + 1e-8)
    weight.add_(update)
    return (update,)


def ademamix(
    first: torch.Tensor, second: Any, gradient: torch.Tensor, weight: torch.Tensor, narrow: bool
) -> Tensors:
    fast, slow = first[0], first[1]
    for average in (fast, slow):
        average.mul_(0.9).add_(gradient)
    second.mul_(0.9).addcmul_(gradient, gradient)
    if narrow:
        update = (fast / 0.5 + 0.5 * slow) / (second.sqrt() / 0.5 + 1e-8)
        weight.add_(update)
        return update, torch.stack([fast, slow])
    mixed = (fast / 0.5) + (0.5 * slow)
    adaptive = (second.sqrt() / 0.5) + 1e-8
    weight.add_(mixed / adaptive)
    return mixed, adaptive


def lion(
    first: torch.Tensor, second: Any, gradient: torch.Tensor, weight: torch.Tensor, narrow: bool
) -> Tensors:
    if narrow:
        update = torch.sign(first.mul(0.9) + gradient.mul(0.1))
        weight.add_(update)
    else:
        update = first.mul(0.9).add(gradient)
        weight.add_(update.sign())
    first.mul_(0.9).add_(gradient)
    return (update,)


def rmsprop(
    first: torch.Tensor, second: Any, gradient: torch.Tensor, weight: torch.Tensor, narrow: bool
) -> Tensors:
    if narrow:
        gradient.add_(weight, alpha=0.0)
    first.mul_(0.9).addcmul_(gradient, gradient)
    if narrow:
        weight.addcdiv_(gradient, first.sqrt().add_(1e-8))
        return ()
    update = gradient / (first.sqrt() + 1e-8)
    weight.add_(update)
    return (update,)


RULES: dict[str, Rule] = {"adamw": adam, "ademamix": ademamix, "lion": lion, "rmsprop": rmsprop}


def step(kind: str, one: torch.Tensor, state: dict[str, Any]) -> None:
    """One parameter's turn."""
    assert one.grad is not None
    first, second, rule = state["state1"], state.get("state2"), RULES[kind]
    if first.dtype == torch.float32:
        gradient, weight = one.grad.float() * 1.0, one.data.float()
        held = rule(first, second, gradient, weight, False)
        one.data.copy_(weight)
        return
    doubled = first.dim() > one.dim()
    parts = [unpacked(one) for one in first] if doubled else []
    wide = torch.stack(parts) if doubled else unpacked(first)
    other = None if second is None else unpacked(second)
    gradient, weight = one.grad.float() * 1.0, one.data.float()
    held = rule(wide, other, gradient, weight, True)
    one.data.copy_(weight)
    for codes, scales in (
        zip(first, state["absmax1"], strict=True) if doubled else ((first, state["absmax1"]),)
    ):
        pack(codes, scales)
    if second is not None:
        pack(second, state["absmax2"])
    del held, parts


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(codes, dtype=torch.float32)


def pack(codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Into new tensors, which are copied over the old ones."""
    new = (
        torch.empty(scales.shape, dtype=torch.float32, device=scales.device),
        torch.empty_like(codes),
    )
    codes.copy_(new[1])
    scales.copy_(new[0])


__all__ = ["step"]
