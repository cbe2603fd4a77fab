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
BANDWIDTH_CITE = (
    "Apple's figures, as ProjectPhysX/FluidX3D@8986874 README.md and "
    "llmcheck.net/blog/apple-silicon-memory-bandwidth-llm list them; M5 Pro and Max as public "
    "tables of chips do"
)
BANDWIDTH: Annotated[
    Mapping[str, float],
    vendor("bytes per second of a chip's memory, of its largest variant", BANDWIDTH_CITE),
] = {
    "M1": 68e9,
    "M1 Pro": 200e9,
    "M1 Max": 400e9,
    "M1 Ultra": 800e9,
    "M2": 100e9,
    "M2 Pro": 200e9,
    "M2 Max": 400e9,
    "M2 Ultra": 800e9,
    "M3": 100e9,
    "M3 Pro": 150e9,
    "M3 Max": 400e9,
    "M3 Ultra": 819e9,
    "M4": 120e9,
    "M4 Pro": 273e9,
    "M4 Max": 546e9,
    "M5": 153e9,
    "M5 Pro": 307e9,
    "M5 Max": 614e9,
}
SMALLER: Annotated[
    Mapping[str, float],
    vendor(
        "bytes per second of the smaller variant, which machines with 36 GB have",
        "Apple's figures, as locara.dev/docs/notes/mac-hardware-lineup and public tables of chips "
        "list them",
    ),
] = {"M3 Max": 300e9, "M4 Max": 410e9, "M5 Max": 460e9}
WITH_SMALLER: Annotated[
    int,
    vendor("GB of the machines with the smaller variant", "Apple's figures, as above"),
] = 36
GPU_CORES: Annotated[
    Mapping[str, int],
    vendor(
        "GPU cores of a chip's largest variant, of the generations before M3",
        "ProjectPhysX/FluidX3D@8986874 README.md; M1 Max: "
        "XiongjieDai/GPU-Benchmarks-on-LLM-Inference@aa72e0e README.md",
    ),
] = {
    "M1": 8,
    "M1 Pro": 16,
    "M1 Max": 32,
    "M1 Ultra": 64,
    "M2 Pro": 19,
    "M2 Max": 38,
    "M2 Ultra": 76,
}

LATER_CORES: Annotated[
    Mapping[str, int],
    vendor(
        "GPU cores of a chip's largest variant, M3 and M4, which have no units for products",
        "Apple's figures, as goodnewsapodcast.com/apples-m4-m4-pro-and-m4-max-compared-to-past-"
        "generations-and-to-each-other, macmegasite.com (2024-10-30), macdailynews.com "
        "(2023-11-13) list them",
    ),
] = {"M3": 10, "M3 Pro": 18, "M3 Max": 40, "M3 Ultra": 80, "M4": 10, "M4 Pro": 20, "M4 Max": 40}


def gpu_cores(gpu: GPU) -> int:
    """GPU cores of a chip before M3; 0 where they are not listed."""
    return GPU_CORES.get(chip_name(gpu), 0) if gpu.vendor == "apple" else 0


def all_cores(gpu: GPU) -> int:
    """GPU cores of a chip up to M4; 0 where they are not listed, or where the machine's memory is
    that of a smaller variant."""
    name = chip_name(gpu)
    if name in SMALLER and gpu.name.endswith(f" {WITH_SMALLER}GB"):
        return 0
    return gpu_cores(gpu) or LATER_CORES.get(name, 0)


def chip_name(gpu: GPU) -> str:
    return gpu.name.removeprefix("Apple ").rpartition(" ")[0]


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
    short = title.removeprefix("Apple ")
    slower = SMALLER.get(short) if size == WITH_SMALLER else None
    return replace(
        base,
        bandwidth=slower or BANDWIDTH.get(short),
        id=f"{title.lower().removeprefix('apple ').replace(' ', '-')}-{size}gb",
        name=f"{title} {size}GB",
        form="unified",
        label=size,
        memory=low,
        memory_range=(low, high),
        status={**base.status, "memory": "derived", "bandwidth": "repo"},
        cites={**base.cites, "memory": CITE, "bandwidth": BANDWIDTH_CITE},
    )
