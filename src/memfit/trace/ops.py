"""Operators by name, for versions of torch that lack some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

aten = torch.ops.aten
Function = TypeVar("Function", bound=Callable[..., Any])


def op(name: str) -> Any:
    """`add.Tensor`, `mm` (its default overload), or None where this torch has no such operator."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload or "default", None)


def table(into: dict[Any, Any]) -> Callable[..., Callable[[Function], Function]]:
    """A decorator that enters a function under each operator named, as far as it exists."""

    def under(*names: str) -> Callable[[Function], Function]:
        def add(function: Function) -> Function:
            into.update({found: function for found in map(op, names) if found is not None})
            return function

        return add

    return under


def collect(values: Any, into: list[torch.Tensor]) -> None:
    """The tensors among the arguments of an operator, those in lists too."""
    for one in values:
        if isinstance(one, torch.Tensor):
            into.append(one)
        elif isinstance(one, (tuple, list)):
            collect(one, into)
