"""Stand-ins without values for tensors that stay real, while an operator is asked what it would
make of them."""

from __future__ import annotations

from typing import Any

import torch


def shadowed(value: Any, swapped: dict[int, torch.Tensor]) -> Any:
    """`value` with every real tensor replaced by a meta tensor of the same shape."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return value
        shadow = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        swapped[id(shadow)] = value
        return shadow
    if isinstance(value, (tuple, list)):
        return type(value)(shadowed(one, swapped) for one in value)
    return value


def restored(result: Any, swapped: dict[int, torch.Tensor]) -> Any:
    """An in-place op on a shadow returns the tensor it stood for."""
    if isinstance(result, torch.Tensor):
        return swapped.get(id(result), result)
    if isinstance(result, (tuple, list)):
        return type(result)(restored(one, swapped) for one in result)
    return result


def count_of(args: Any) -> int:
    """Elements that a factory or a cast is asked for."""
    for one in args:
        if isinstance(one, torch.Tensor):
            return one.numel()
        if isinstance(one, (list, tuple, torch.Size)) and all(
            isinstance(item, int) for item in one
        ):
            count = 1
            for item in one:
                count *= item
            return count
    numbers = [one for one in args if isinstance(one, (int, float))]
    return int(max(numbers, default=0))
