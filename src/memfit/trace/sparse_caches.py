"""Caches of sparse attention other than keys and values: the indexer's keys, and entries that cover
several tokens each."""

from __future__ import annotations

from typing import Any

import torch

# Attributes that hold one entry for each token, and the axis of the tokens (transformers 5.23
# cache_utils.py DynamicIndexedLayer, models/minimax_m3_vl MiniMaxM3VLSparseCacheLayer).
PER_TOKEN = {"indexer_keys": 1, "idx_keys": -2}


def grown(layer: Any, length: int) -> bool:
    """Make the tensors of a layer as long as `length` tokens make them; whether any changed."""
    changed = False
    for name, axis in PER_TOKEN.items():
        now = getattr(layer, name, None)
        if now is not None and 0 < now.shape[axis] < length:
            shape, kind, device = resized(now, axis, length), now.dtype, now.device
            del now
            setattr(layer, name, None)  # first: no step holds both
            setattr(layer, name, torch.empty(shape, dtype=kind, device=device))
            changed = True
    return compressed(layer, length) or changed


def resized(tensor: torch.Tensor, axis: int, size: int) -> list[int]:
    shape = list(tensor.shape)
    shape[axis] = size
    return shape


def compressed(layer: Any, length: int) -> bool:
    """DeepSeek-V4's: an entry for every `compress_rate` tokens, and the tokens that wait for theirs
    (transformers 5.23 models/deepseek_v4 DeepseekV4HCACache)."""
    entries = getattr(layer, "compressed_kv", None)
    if not isinstance(entries, dict):
        return False
    done, waiting = divmod(length, layer.compress_rate)
    changed = False
    for held, size in (
        (entries, done),
        (layer.buffer_kv, waiting),
        (layer.buffer_gate, waiting),
    ):
        for name in list(held):
            if held[name] is None or held[name].shape[1] == size:
                continue
            shape, kind = resized(held[name], 1, size), held[name].dtype
            device = held[name].device
            held[name] = None
            held[name] = torch.empty(shape, dtype=kind, device=device)
            changed = True
    for name in layer.entry_count:
        layer.entry_count[name] = done
    return changed


__all__ = ["grown"]
