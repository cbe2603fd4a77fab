"""NVIDIA vGPUs of the C series: `a40-24c` is the vGPU of an A40 with 24 GB of its memory.

Its name is that of NVIDIA's tables: the card, then the frame buffer. A vGPU has all multiprocessors
of the card in turns with the others (time-sliced), or is a MIG slice (`a100d-3-40c`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

from memfit.constants import vendor
from memfit.errors import Problem
from memfit.hardware.gpu import GPU, find_gpu
from memfit.hardware.mig import mig_slice

_NAME = re.compile(
    r"(?:nvidia |grid )*(?P<card>.+?)-(?:(?P<parts>[1-7])-)?(?P<size>\d{1,3})c", re.IGNORECASE
)
GUIDE = "NVIDIA AI Enterprise user guide, Virtual GPU Types for Supported GPUs"
CITE = f"{GUIDE}: frame buffer; of it the share of the card's memory that CUDA shows"
CARDS: Annotated[
    Mapping[str, tuple[str, tuple[int, ...]]],
    vendor("cards by their names in vGPU types, and the GB of frame buffer offered", GUIDE),
] = {
    "l40": ("l40", (48, 24, 16, 12, 8, 6, 4)),
    "l40s": ("l40s", (48, 24, 16, 12, 8, 6, 4)),
    "l4": ("l4", (24, 12, 8, 6, 4)),
    "rtx6000ada": ("rtx-6000-ada", (48, 24, 16, 12, 8, 6, 4)),
    "a40": ("a40", (48, 24, 16, 12, 8, 6, 4)),
    "a16": ("a16", (16, 8, 4)),
    "a10": ("a10", (24, 12, 8, 6, 4)),
    "a100": ("a100-pcie-40gb", (40, 20, 10, 8, 5, 4)),
    "a100x": ("a100-sxm-40gb", (40, 20, 10, 8, 5, 4)),
    "a100d": ("a100-pcie-80gb", (80, 40, 20, 16, 10, 8, 4)),
    "a100dx": ("a100-sxm-80gb", (80, 40, 20, 16, 10, 8, 4)),
    "h100": ("h100-pcie", (80, 40, 20, 16, 10, 8, 5, 4)),
    "h100xm": ("h100-sxm", (80, 40, 20, 16, 10, 8, 5, 4)),
}
NOTE = "a time-sliced vGPU: rates are the card's while no other vGPU works"


def vgpu(name: str, *, where: str = "gpu") -> GPU | Problem | None:
    """The vGPU that `name` names, what is wrong with it, or None where it names none."""
    found = _NAME.fullmatch(name.strip())
    card = CARDS.get(re.sub(r"[^a-z0-9]", "", found["card"].lower())) if found else None
    if found is None or card is None:
        return None
    (key, sizes), size = card, int(found["size"])
    whole = find_gpu(key)
    if found["parts"]:
        return mig_slice(whole, f"{found['parts']}g.{size}gb", where=where)
    if size not in sizes:
        prefix = found["card"].lower()
        listed = ", ".join(f"`{prefix}-{one}c`" for one in sizes)
        message = f"`{prefix}` has no vGPU with {size} GB"
        return Problem(message=message, where=where, hint=f"use {listed}")
    label = whole.label or sizes[0]
    least, most = (bound * size // label for bound in whole.memory_range)
    return replace(
        whole,
        id=f"{found['card'].lower().replace(' ', '-')}-{size}c",
        name=f"{whole.name} vGPU {size}C",
        memory=min(whole.memory * size // label, most),
        memory_range=(least, most),
        smi=None,
        label=size,
        link=None,
        bridge=None,
        status={**whole.status, "memory": "derived"},
        cites={**whole.cites, "memory": CITE},
        note=NOTE,
    )


__all__ = ["CARDS", "vgpu"]
