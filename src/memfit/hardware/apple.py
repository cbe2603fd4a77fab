"""Apple silicon in any memory size: `m4-max-64gb`, `mac-16gb`. The GPU shares the memory of the
machine, and macOS lets it use a part."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

from memfit.constants import measured, vendor
from memfit.errors import Problem
from memfit.hardware.gpu import GPU, all_gpus, plain
from memfit.units import GIB

# `MacBook Pro 14-inch`
_MACHINE = r"(?:(?:mac(?:book|mini|studio|pro|air|os)*|metal|mps|silicon)(?:\d{2,4}(?:inch)?)*)"
_CHIP = re.compile(rf"(?:apple)?{_MACHINE}?(m[1-9])(pro|max|ultra)?{_MACHINE}?(\d{{1,3}})gb")
_MAC = re.compile(r"(?:apple)?mac(?:book|mini|studio)?(?:air|pro)?(\d{1,3})gb")
_ANY_MAC = re.compile(rf"(?:apple)?{_MACHINE}(?:m\d(?:pro|max|ultra)?|\d{{2,4}}(?:inch)?)*")
SIZES: Annotated[
    tuple[int, ...], vendor("GB of memory that Macs come with", "Apple's data sheets, M1 to M5")
] = (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)
# Which memory a hint names as an example.
USUAL: Annotated[
    Mapping[str, int], vendor("GB of memory that a kind of chip comes with", "Apple's data sheets")
] = {"": 16, "pro": 32, "max": 64, "ultra": 128}
CITE = (
    "macOS' default share for the GPU. Up to 32 GB: 10.67 GB of 16 (exo-explore/exo#1672) to 11.84 "
    "of 16 and 17.76 of 24 GiB (AlexsJones/llmfit#754, sgl-project/sglang#29949). Above: 75 % "
    "(gpustack/gpustack#1375) to 107.52 of 128 GiB (antirez/ds4#893, macOS 26)"
)
SMALL: Annotated[int, measured("GB up to which the share is the lower one", CITE)] = 32
SHARES: Annotated[
    Mapping[bool, tuple[float, float]],
    measured(
        "what Metal recommends of the whole memory (`recommendedMaxWorkingSetSize`), lowest and "
        "highest, of a small Mac or a large one",
        CITE,
    ),
] = {True: (2 / 3, 0.74), False: (0.75, 0.84)}


def without_memory(name: str, where: str) -> Problem | None:
    """What to say of a Mac or a chip that is named without its memory, or None."""
    text = plain(name)
    chip = re.fullmatch(r"(?:apple)?(m[1-9])(pro|max|ultra)?", text)
    if chip is None and not _ANY_MAC.fullmatch(text):
        return None
    kind = (chip[2] or "") if chip else ""
    like = "-".join(filter(None, (chip[1], kind))) if chip else "mac"
    return Problem(
        message=f"`{name[:80]}` comes in several memory sizes",
        where=where,
        hint=f"add the memory of the machine, like `{like}-{USUAL[kind]}gb`",
    )


def apple_gpu(name: str) -> GPU | None:
    """The Mac that `name` describes by its memory, or None."""
    text = plain(name)
    chip, mac = _CHIP.fullmatch(text), _MAC.fullmatch(text)
    size = int(chip[3]) if chip else int(mac[1]) if mac else 0
    if size not in SIZES:
        return None
    low, high = (int(size * GIB * share) for share in SHARES[size <= SMALL])
    title = f"Apple {chip[1].upper()}{f' {chip[2].title()}' if chip[2] else ''}" if chip else "Mac"
    like = [gpu for gpu in all_gpus() if gpu.vendor == "apple" and gpu.name.startswith(f"{title} ")]
    base = (
        like[0]
        if chip and like
        else GPU(id="mac", name=title, vendor="apple", memory=low, memory_range=(low, high))
    )
    return replace(
        base,
        id=f"{title.lower().removeprefix('apple ').replace(' ', '-')}-{size}gb",
        name=f"{title} {size}GB",
        form="unified",
        label=size,
        memory=low,
        memory_range=(low, high),
        status={**base.status, "memory": "derived"},
        cites={**base.cites, "memory": CITE},
    )
