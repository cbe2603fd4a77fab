"""Products of 16-bit matrices on the CPU by the kernels for 32 bits. Its own, without oneDNN, are
plain loops and take most of a real step's time."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import library as operators

KINDS = (torch.bfloat16, torch.float16)
aten = torch.ops.aten


class Scratch:
    """Memory for 32-bit copies, which was there before anything was measured: what is counted is
    what torch's own kernels ask for, their result."""

    def __init__(self, count: int) -> None:
        self.whole, self.used = torch.zeros(count), 0

    def of(self, shape: Any) -> torch.Tensor:
        start, self.used = self.used, self.used + math.prod(shape)
        return self.whole[start : self.used].view(shape)

    def copy(self, one: torch.Tensor) -> torch.Tensor:
        """As it lies in memory, so that a transposed one stays transposed."""
        turned = one.dim() > 1 and one.stride(-1) != 1
        return self.of(one.mT.shape).copy_(one.mT).mT if turned else self.of(one.shape).copy_(one)


def install(count: int) -> operators.Library:
    """`mm`, `bmm` and `addmm` of CPUs for as long as what is returned lives; `count`: numbers in
    the operands and the result of the largest."""
    scratch, library = Scratch(count), operators.Library("aten", "IMPL")

    def product(name: str, out: Any) -> None:
        def run(*given: torch.Tensor, **named: Any) -> torch.Tensor:
            *_, left, right = given
            shape = (*left.shape[:-1], right.shape[-1])
            made = torch.empty(shape, dtype=left.dtype)
            scratch.used = 0
            if left.dtype not in KINDS:
                return out(*given, **named, out=made)
            made.copy_(out(*[scratch.copy(one) for one in given], **named, out=scratch.of(shape)))
            return made

        library.impl(name, run, "CPU")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is done on purpose
        for name in ("mm", "bmm", "addmm"):
            product(name, getattr(aten, name).out)
    return library
