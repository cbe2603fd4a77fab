"""What a program saved by `torch.save`, for when it loads it again: tensors of the GPU by their
shapes, all else as it is."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

MOST = 1 << 30  # bytes of CPU tensors that are kept of one file
# Of an object that no file can hold, or of one with tensors of the GPU inside.
UNWRITABLE = (pickle.PicklingError, AttributeError, NotImplementedError, RuntimeError, TypeError)
kept: dict[int, bytes] = {}  # by the inodes of the empty files in their places


class Blank(NamedTuple):
    """A tensor without its values; those of one storage have one key."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    key: int


torch.serialization.add_safe_globals([Blank])


def written(value: Any, save: Callable[..., None]) -> bytes | None:
    """The value as `torch.save` writes it, or nothing where that cannot be done."""
    buffer = io.BytesIO()
    try:
        held = described(value, count := [0])
        if count[0] > MOST:
            return None
        save(held, buffer)
    except UNWRITABLE:
        return None
    return buffer.getvalue()


def described(value: Any, count: list[int]) -> Any:
    if isinstance(value, torch.nn.Module):
        raise TypeError("a whole module")
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu":
            count[0] += value.nbytes
            return value.detach()
        key = value.untyped_storage()._cdata
        return Blank(tuple(value.shape), value.dtype, str(value.device), key)
    if isinstance(value, dict):
        return {key: described(one, count) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(described(one, count) for one in value)
    return value


def restored(value: Any, place: Any, made: dict[Any, torch.Tensor]) -> Any:
    """With a new tensor for each that was on the GPU: where `map_location` says, or there."""
    if isinstance(value, Blank):
        if value not in made:
            device = place.get(value.device, value.device) if isinstance(place, dict) else place
            where = device if isinstance(device, (str, torch.device)) else value.device
            made[value] = torch.empty(value.shape, dtype=value.dtype, device=where)
        return made[value]
    if isinstance(value, dict):
        return {key: restored(one, place, made) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(restored(one, place, made) for one in value)
    return value


def keep(target: Any, value: Any, save: Callable[..., None]) -> None:
    """Of a file that is there and empty, or of a stream."""
    data = written(value, save)
    if isinstance(target, (str, os.PathLike)):
        place = os.stat(target).st_ino
        kept.pop(place, None)  # of what was there before
        if data is not None:
            kept[place] = data
    elif data is not None and hasattr(target, "write"):
        target.write(data)


def loaded(path: Any, place: Any, load: Callable[..., Any]) -> Any:
    """What was saved in the place of an empty file; raises KeyError where nothing was kept."""
    data = kept[os.stat(path).st_ino]
    return restored(load(io.BytesIO(data), "cpu", weights_only=False), place, {})


__all__ = ["keep", "loaded", "restored"]
