"""Results of a module as data, from which results like them are made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


def parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for one in value.values():
            yield from parts(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from parts(one)
    else:
        yield value


def plain(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, *PLAIN))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    return (one for one in parts(value) if isinstance(one, torch.Tensor))


class Like:
    """A tensor to be made again, with the whole storage that a view keeps alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.device = tensor.dtype, tensor.device
        self.values = tensor.untyped_storage().nbytes() // tensor.itemsize
        self.view = tensor.shape, tensor.stride(), tensor.storage_offset()

    def __call__(self) -> torch.Tensor:
        storage = torch.zeros(self.values, dtype=self.dtype, device=self.device)
        return storage.as_strided(*self.view)


def template(value: Any) -> Any:
    return replaced(value, lambda one: Like(one) if isinstance(one, torch.Tensor) else one)


def made(value: Any) -> Any:
    return replaced(value, lambda one: one() if isinstance(one, Like) else one)


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure around other leaves; transformers' outputs are dicts of a class."""
    if isinstance(value, dict):
        found = {key: replaced(one, change) for key, one in value.items()}
        return found if type(value) is dict else type(value)(**found)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(one, change) for one in value))
    if isinstance(value, (list, tuple)):
        return type(value)(replaced(one, change) for one in value)
    return change(value)


__all__ = ["PLAIN", "made", "parts", "plain", "template", "tensors_in"]
