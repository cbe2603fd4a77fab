"""Tensors made or converted by the example of another. torch's C++ code reads the example's device,
which is the CPU for small integers whose values are kept."""

from __future__ import annotations

from typing import Any

import torch
from memfit.trace.imports import Patch


def patches() -> list[Patch]:
    true_new, true_pad = torch.Tensor.new, torch._C._nn.pad_sequence

    def new(self: torch.Tensor, *args: Any, **given: Any) -> torch.Tensor:
        return true_new(self, *args, **given).to(self.device)

    def new_tensor(self: torch.Tensor, data: Any, **given: Any) -> torch.Tensor:
        where = {"device": self.device, "dtype": self.dtype}
        chosen = {key: one for key, one in given.items() if one is not None}
        return torch.tensor(data, **{**where, **chosen})

    def type_as(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.to(other.device, other.dtype)

    def pad_sequence(sequences: Any, *args: Any, **given: Any) -> torch.Tensor:
        return true_pad(sequences, *args, **given).to(sequences[0].device)

    return [
        (torch.Tensor, "new", new),
        (torch.Tensor, "new_tensor", new_tensor),
        (torch.Tensor, "type_as", type_as),
        (torch._C._nn, "pad_sequence", pad_sequence),
    ]


__all__ = ["patches"]
