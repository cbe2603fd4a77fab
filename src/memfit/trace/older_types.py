"""`torch.cuda.FloatTensor` and the other tensor types of old, which scripts call and compare."""

from __future__ import annotations

from typing import Any

import torch

KINDS = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


class Typed(type):
    """A type of tensors on the GPU by their dtype."""

    kind: torch.dtype

    def __call__(cls, *values: Any, **_: Any) -> Any:
        """Sizes, or what a list, an array or a tensor holds."""
        if not values or all(isinstance(one, int) for one in values):
            return torch.empty(values or (0,), dtype=cls.kind, device="cuda")
        if isinstance(values[0], torch.Size):
            return torch.empty(values[0], dtype=cls.kind, device="cuda")
        return torch.as_tensor(values[0], dtype=cls.kind).to("cuda")

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, torch.Tensor) and one.is_cuda and one.dtype == cls.kind


def patches() -> list[tuple[Any, str, Any]]:
    types = {
        name: Typed(name, (), {"kind": kind, "__module__": "torch.cuda", "is_cuda": True})
        for name, kind in KINDS.items()
    }
    ours: list[Typed] = []  # what has made the GPU the default
    true_type, true_default = torch.Tensor.type, torch.set_default_tensor_type

    def named(tensor: torch.Tensor) -> str:
        text = str(true_type(tensor.detach())) if not tensor.is_cuda else ""
        if not text:
            kinds = {kind: f"torch.cuda.{name}" for name, kind in KINDS.items()}
            # As torch says it on the CPU, where every type has a name
            text = kinds.get(tensor.dtype) or str(
                true_type(torch.empty(0, dtype=tensor.dtype, device="cpu"))
            ).replace("torch.", "torch.cuda.", 1)
        return text

    def of_type(self: torch.Tensor, dtype: Any = None, *args: Any, **given: Any) -> Any:
        if dtype is None:
            return named(self)
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            dtype = types[dtype.removeprefix("torch.cuda.")]
        if isinstance(dtype, Typed):
            return self.to("cuda", dtype.kind)
        return true_type(self, dtype, *args, **given)

    def default(kind: Any) -> None:
        """New tensors are on the GPU from then on, until a type of the CPU's."""
        if isinstance(kind, str) and kind.startswith("torch.cuda."):
            kind = types[kind.removeprefix("torch.cuda.")]
        if isinstance(kind, Typed):
            torch.set_default_dtype(kind.kind)
            torch.set_default_device("cuda")
            ours.append(kind)
        else:
            if ours:
                torch.set_default_device(None)
                ours.clear()
            true_default(kind)

    return [
        *((torch.cuda, name, kind) for name, kind in types.items()),
        (torch.Tensor, "type", of_type),
        (torch, "set_default_tensor_type", default),
    ]


__all__ = ["patches"]
