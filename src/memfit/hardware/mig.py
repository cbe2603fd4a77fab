"""MIG slices: `h100-sxm/3g.40gb` is the slice of an H100 with three compute and four memory parts.

Fractions are those of NVIDIA's MIG user guide ("Supported MIG Profiles"); the memory that CUDA
shows of a slice is a little less than its fraction of the GPU's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

from memfit.constants import measured, vendor
from memfit.errors import Problem
from memfit.hardware.gpu import GPU

_PROFILE = re.compile(r"(?:mig[ -]?)?([1-7])g\.(\d{1,3})gb", re.IGNORECASE)
SLICED = (
    "a30",
    "a100-pcie-40gb",
    "a100-sxm-40gb",
    "a100-pcie-80gb",
    "a100-sxm-80gb",
    "h100-pcie",
    "h100-sxm",
    "h100-nvl",
    "h200",
    "h200-nvl",
    "gh200-96gb",
    "gh200-144gb",
    "b200",
    "b300",
    "gb200",
    "gb300",
)
_GUIDE = "NVIDIA MIG user guide, supported MIG profiles"
SEVENTHS: Annotated[
    tuple[tuple[int, int], ...], vendor("slices: compute parts, eighths of the memory", _GUIDE)
] = ((1, 1), (1, 2), (2, 2), (3, 4), (4, 4), (7, 8))
QUARTERS: Annotated[tuple[tuple[int, int], ...], vendor("slices of an A30", _GUIDE)] = (
    (1, 2),
    (2, 4),
    (4, 8),
)
H100_SMS: Annotated[
    Mapping[tuple[int, int], int],
    measured(
        "multiprocessors of an H100's slices, by compute parts and eighths",
        "public logs of `nvidia-smi mig -lgip`",
    ),
] = {(1, 1): 16, (1, 2): 26, (2, 2): 32, (3, 4): 60, (4, 4): 64, (7, 8): 132}
A100_SMS: Annotated[
    int, measured("multiprocessors of each compute part of an A100", "as for the H100")
] = 14
LESS: Annotated[
    int,
    measured(
        "bytes that a slice lacks of its fraction at most",
        "public logs of torch and nvidia-smi: an A100-80GB's 3g.40gb shows 39.25 of 39.57 GiB, an "
        "H100's 39.38 to 39.50 of 39.56 and its 1g.10gb 9.75 of 9.89",
    ),
] = 384 * 2**20
CITE = "NVIDIA MIG user guide, supported profiles; public logs of `nvidia-smi mig -lgip`"


def profiles(gpu: GPU) -> dict[str, tuple[int, int]]:
    """The slices that a GPU can be split into: name -> (compute parts, eighths of the memory)."""
    if gpu.id not in SLICED or gpu.label is None:
        return {}
    known = QUARTERS if gpu.id == "a30" else SEVENTHS
    return {f"{parts}g.{-(-gpu.label * share // 8)}gb": (parts, share) for parts, share in known}


def mig_slice(gpu: GPU, text: str, *, where: str = "gpu") -> GPU | Problem:
    """The slice of `gpu` that `text` names, or what is wrong with it."""
    known = profiles(gpu)
    wanted = _PROFILE.fullmatch(text.strip())
    if not known:
        return Problem(message=f"`{gpu.id}` cannot be split into MIG slices", where=where)
    found = None
    if wanted:
        size, parts = int(wanted[2]), int(wanted[1])
        close = [
            name
            for name, (each, _) in known.items()
            if each == parts and abs(int(name.partition(".")[2][:-2]) - size) <= 1
        ]
        found = close[0] if close else None
    if found is None:
        listed = ", ".join(f"`{gpu.id}/{name}`" for name in known)
        return Problem(
            message=f"`{gpu.id}` has no MIG slice `{text[:40]}`", where=where, hint=f"use {listed}"
        )
    return cut(gpu, found, *known[found])


def cut(gpu: GPU, profile: str, parts: int, share: int) -> GPU:
    """One slice: a fraction of memory, bandwidth and cache, and its own multiprocessors."""
    whole = gpu.sms
    sms = None if whole is None else multiprocessors(gpu, whole, parts, share)
    least = gpu.memory * share // 8 - LESS
    rates = {} if sms is None or not whole else {k: v * sms / whole for k, v in gpu.rates.items()}
    return replace(
        gpu,
        id=f"{gpu.id}/{profile}",
        name=f"{gpu.name} MIG {profile}",
        memory=least,
        memory_range=(least, gpu.memory_range[1] * share // 8),
        smi=None,
        label=int(profile.partition(".")[2][:-2]),
        bandwidth=None if gpu.bandwidth is None else gpu.bandwidth * share / 8,
        l2=None if gpu.l2 is None else gpu.l2 * share // 8,
        rates=rates,
        sms=sms,
        link=None,
        bridge=None,
        status={**gpu.status, "memory": "derived", "bandwidth": "derived", "sms": "derived"},
        cites={**gpu.cites, "memory": CITE},
        note="a MIG slice: rates by its share of multiprocessors and memory",
    )


def multiprocessors(gpu: GPU, whole: int, parts: int, share: int) -> int:
    if gpu.sm == (8, 0) and gpu.id != "a30":
        return A100_SMS * parts
    if gpu.id == "h100-sxm":
        return H100_SMS[parts, share]
    return whole * parts // (4 if gpu.id == "a30" else 7)


__all__ = ["SLICED", "mig_slice", "profiles"]
