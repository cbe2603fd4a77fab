"""What older versions lack for tensors without data: up to torch 2.4 the fused attention kernels
have no meta function, and before transformers 5 caches of a fixed length find out how full they are
by looking at their values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from memfit.trace import cuda, versions
from memfit.trace.ops import op

# the efficient kernel's log-sum-exp is padded to so many rows (mem_eff_attention/kernel_forward.h
# kAlignLSE)
ROW = 32


def nothing(kind: torch.dtype = torch.int64) -> torch.Tensor:
    """Stands for the seed and the offset, which are on the host there unless a graph is captured,
    and for an empty debug mask."""
    return torch.empty(0, dtype=kind, device="meta")


def flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[Any, ...]:
    """ATen/native/transformers/cuda/attention.cu and flash_attn/flash_api.cpp `mha_fwd`,
    torch 2.4."""
    out = torch.empty_like(query.transpose(1, 2)).transpose(1, 2)
    sums = torch.empty(query.shape[:3], dtype=torch.float32, device="meta")
    return (
        out,
        sums,
        None,
        None,
        query.shape[2],
        key.shape[2],
        nothing(),
        nothing(),
        nothing(query.dtype),
    )


def efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: Any,
    sums: bool,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, ...]:
    """attention.cu `_efficient_attention_forward`, torch 2.4."""
    batch, heads, rows = query.shape[:3]
    out = torch.empty(
        (batch, rows, heads, value.shape[-1]), dtype=query.dtype, device="meta"
    ).transpose(1, 2)
    wide = math.ceil(rows / ROW) * ROW if sums else 0
    return (
        out,
        torch.empty((batch, heads, wide), dtype=torch.float32, device="meta"),
        nothing(),
        nothing(),
    )


def supply(library: Any) -> None:
    """Register what this version of torch has no meta function for."""
    wanted = {
        "_scaled_dot_product_flash_attention": flash,
        "_scaled_dot_product_efficient_attention": efficient,
    }
    for name, function in wanted.items():
        found = op(name)
        if found is not None and not torch._C._dispatch_has_kernel_for_dispatch_key(
            found.name(), "Meta"
        ):
            library.impl(name, function, "Meta")


# -- caches
# --------------------------------------------------------------------------------------------------
FIXED = (
    "StaticCache",
    "SlidingWindowCache",
    "HybridCache",
    "HybridChunkedCache",
    "StaticLayer",
)  # transformers 4 cache_utils.py


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Inside, caches of a fixed length remember the last position that they were given."""
    if versions.TRANSFORMERS >= (5, 0):
        yield
        return
    from transformers import cache_utils

    kinds = [kind for name in FIXED if (kind := getattr(cache_utils, name, None)) is not None]
    patches: list[tuple[Any, str, Any]] = [
        (kind, "update", updating(kind.update)) for kind in kinds if "update" in vars(kind)
    ]
    patches += [
        (kind, "get_seq_length", lambda self, *_: getattr(self, "memfit_seen", 0))
        for kind in kinds
        if "get_seq_length" in vars(kind)
    ]
    with cuda.patched(patches):
        yield


def updating(update: Any) -> Any:
    def counting(self: Any, keys: torch.Tensor, *args: Any, **given: Any) -> Any:
        told = given.get("cache_kwargs") or next((one for one in args if isinstance(one, dict)), {})
        place = told.get("cache_position")
        self.memfit_seen = keys.shape[-2] if place is None else int(place[-1]) + 1
        return update(self, keys, *args, **given)

    return counting


def whole(model: Any, job: Any) -> bool:
    """Whether every token has to be generated: caches of a fixed length do not tell how full they
    are, and tuples, up to 4.41, stay with the caller who hands them over."""
    asked = getattr(model.generation_config, "cache_implementation", None)
    fixed = job.cache == "static" or asked in (
        "static",
        "hybrid",
        "hybrid_chunked",
        "sliding_window",
    )
    return versions.TRANSFORMERS < (4, 42) or (versions.TRANSFORMERS < (5, 0) and fixed)


Shapes = list[tuple[tuple[int, ...], torch.dtype, Any]]


def shapes(cache: Any, length: int) -> Shapes | None:
    """Of the keys and values of a growing cache at that length, as versions before 4.54 hold them;
    None of one of another form."""
    pairs = zip(getattr(cache, "key_cache", ()), getattr(cache, "value_cache", ()), strict=True)
    tensors = [one for pair in pairs for one in pair]
    if not tensors or any(not isinstance(one, torch.Tensor) or one.dim() != 4 for one in tensors):
        return None
    return [((*one.shape[:-2], length, one.shape[-1]), one.dtype, one.device) for one in tensors]


def grown(wanted: Shapes) -> Any:
    """Such a cache; the first one is gone by now."""
    from transformers import DynamicCache

    made = [torch.empty(shape, dtype=kind, device=device) for shape, kind, device in wanted]
    return DynamicCache.from_legacy_cache(tuple(zip(made[::2], made[1::2], strict=True)))


__all__ = ["counted", "grown", "shapes", "supply", "whole"]
