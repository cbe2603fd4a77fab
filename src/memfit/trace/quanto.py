"""What transformers' quantized cache takes from optimum-quanto, whose kernels need a GPU: the same
tensors made and kept, in its order."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from memfit.trace import cuda


@dataclass(frozen=True)
class Type:
    """`qint2`, `qint4`."""

    bits: int


@dataclass(frozen=True, eq=False)
class Packed:
    """Bits, scales and shifts (optimum-quanto 0.2.7 tensor/weights/qbits.py, tensor/packed.py)."""

    data: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor
    shape: torch.Size
    bits: int

    def dequantize(self) -> torch.Tensor:
        """Bytes, then their product with the scales, less the shifts in place (tensor/qbits.py
        QBitsDequantizer)."""
        whole = torch.empty(self.shape, dtype=torch.uint8, device=self.data.device)
        return torch.empty(whole.shape, dtype=self.scale.dtype, device=self.data.device)

    def of(self, tokens: int) -> Packed:
        """As many tokens, without the way there."""
        shape = torch.Size((*self.shape[:-2], tokens, self.shape[-1]))
        groups = (shape.numel() * self.scale.numel() // self.shape.numel(), 1)
        scale, shift = (
            torch.empty(groups, dtype=self.scale.dtype, device=self.scale.device) for _ in range(2)
        )
        data = torch.empty(
            packed_size(shape.numel(), self.bits), dtype=torch.uint8, device=self.data.device
        )
        return Packed(data, scale, shift, shape, self.bits)


class MaxOptimizer:
    """Scales and shifts of groups (tensor/optimizers/max_optimizer.py)."""

    def __call__(
        self, base: torch.Tensor, qtype: Type, axis: int, group: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grouped = base.reshape(-1, group)
        low, high = torch.amin(grouped, 1, keepdim=True), torch.amax(grouped, 1, keepdim=True)
        return (high - low) / (2**qtype.bits - 1), -low


def packed_size(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def quantize_weight(
    base: torch.Tensor, qtype: Type, axis: int, scale: torch.Tensor, shift: torch.Tensor, group: int
) -> Packed:
    """`quantize_affine` makes bytes of the values, `pack_weights` packs them (library/quantize.py,
    tensor/packed.py)."""
    whole = affine(base.reshape(-1, group), qtype.bits, scale, shift)
    small = packed_size(whole.numel(), qtype.bits)
    data = torch.zeros(small, dtype=torch.uint8, device=base.device)
    for _ in range(8 // qtype.bits):
        turned = torch.empty(small, dtype=torch.uint8, device=base.device)
        del turned
    return Packed(data, scale, shift, base.shape, qtype.bits)


def affine(
    grouped: torch.Tensor, bits: int, scale: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    data = torch.round((grouped + shift) / scale)
    return torch.clamp(data, min=0, max=2**bits - 1).to(torch.uint8)


@contextlib.contextmanager
def installed(wanted: bool) -> Iterator[None]:
    """`import optimum.quanto` gives the stand-ins, and transformers' cache believes that it is
    there."""
    if not wanted:
        yield
        return
    from transformers import cache_utils

    package, module = types.ModuleType("optimum"), types.ModuleType("optimum.quanto")
    vars(module).update(
        MaxOptimizer=MaxOptimizer, qint2=Type(2), qint4=Type(4), quantize_weight=quantize_weight
    )
    before = {name: sys.modules.get(name) for name in ("optimum", "optimum.quanto")}
    sys.modules.update({"optimum": package, "optimum.quanto": module})
    answers: list[Any] = ["is_optimum_quanto_available", "is_quanto_greater"]
    try:
        with cuda.patched(
            [
                (cache_utils, name, lambda *_, **__: True)
                for name in answers
                if name in vars(cache_utils)
            ]
        ):
            yield
    finally:
        for name, known in before.items():
            if known is None:
                del sys.modules[name]
            else:
                sys.modules[name] = known
