"""`x.data = x.data.to("cpu")` and back: torch refuses another kind of tensor there, and the CPU's
small tensors are real while those of the pretended GPU are on `meta`."""

from __future__ import annotations

from typing import Any

import torch
from memfit.trace.imports import Patch
from memfit.trace.sides import Sides

FIELD: Any = torch._C.TensorBase.data


def patches(recorder: Sides) -> list[Patch]:
    from torch.utils._python_dispatch import _disable_current_modes

    def without_values(tensor: torch.Tensor) -> torch.Tensor:
        """The same on the CPU, as large tensors are there."""
        with _disable_current_modes():
            made = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
            )
        return recorder.apart(made)

    def put(self: torch.Tensor, value: torch.Tensor) -> None:
        if self.is_meta == value.is_meta:
            FIELD.__set__(self, value)
        elif self.is_meta:
            FIELD.__set__(self, without_values(value))
        else:
            made = value.detach().requires_grad_(self.requires_grad)
            torch._C._swap_tensor_impl(self, made)

    return [(torch.Tensor, "data", property(FIELD.__get__, put))]


__all__ = ["patches"]
