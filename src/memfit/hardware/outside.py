"""What a job cannot have of a GPU: what others hold, the CUDA context with its kernels, a desktop
on the same card."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from memfit.constants import assumed, counted
from memfit.hardware.gpu import GPU
from memfit.hardware.tables import span, table
from memfit.units import GIB

# For each page of the host that a program has, NVIDIA's driver keeps an entry of the page table
# (nvidia_pte_t, 16 bytes), of the pages to be mapped for the GPU (nv_dma_map_alloc, a pointer), of
# the descriptor (MEMORY_DESCRIPTOR _pteArray, 8) and of the mapping's addresses (IOVAMAPPING
# iovaArray, 8).
PAGE: Annotated[
    int, assumed("bytes of a page of the host's memory", "Ubuntu's kernels for arm64 have 4 KiB")
] = 4096
RECORD: Annotated[
    int,
    counted(
        "bytes that NVIDIA's driver keeps for each page of the host's memory that it hands out",
        "NVIDIA/open-gpu-kernel-modules 580.95.05: kernel-open/common/inc/nv-linux.h, "
        "kernel-open/nvidia/nv-dma.c, src/nvidia/src/kernel/gpu/mem_mgr/mem_desc.c, "
        "src/nvidia/src/kernel/mem_mgr/io_vaspace.c",
    ),
] = 16 + 8 + 8 + 8
OPEN_DRIVER = (10, 0)  # earlier GPUs without memory of their own are Tegra's, with another driver


class Span(NamedTuple):
    """A range of bytes, and where it comes from (`status: source`)."""

    low: int
    high: int
    cite: str


def _span(text: str) -> Span:
    low, high, status, source = span(text)
    return Span(low, high, f"{status}: {source}")


def usable(gpu: GPU) -> int:
    """Bytes a process can have in all, its context included: the lowest total known for the card,
    less what others hold."""
    return max(0, gpu.memory - gpu.held)


def context(gpu: GPU) -> Span:
    """Context and loaded kernels of one process: `low` a bare context, `high` with every kernel of
    torch loaded.

    Real jobs end nearer to `low`, since kernels load as they are first used: 36 MiB more on a T4,
    164 MiB on an H100. A logged card comes first, then 2 KiB for each thread that the GPU can hold,
    then a wide range for the vendor.
    """
    contexts = table("contexts")
    if gpu.id in contexts["gpu"]:
        return _span(contexts["gpu"][gpu.id])
    threads = contexts["threads"].get(f"{gpu.sm[0]}.{gpu.sm[1]}") if gpu.sm else None
    if threads and gpu.sms:
        rule = contexts["rule"]
        bare = gpu.sms * threads * rule["bare"]
        return Span(bare, bare + rule["kernels"], f"{rule['status']}: {rule['source']}")
    vendors = contexts["vendor"]
    return _span(vendors.get(gpu.vendor, vendors["unknown"]))


def page_records(gpu: GPU | None, size: int) -> int:
    """Bytes that the driver keeps beside `size` bytes of a GPU whose memory is the host's. They are
    missing in what the system has left (psutil's `available`), which engines read there."""
    if gpu is None or gpu.vendor != "nvidia" or gpu.form != "unified":
        return 0
    if gpu.sm is None or gpu.sm < OPEN_DRIVER:
        return 0
    return -(-size // PAGE) * RECORD


def desktop(system: Literal["linux", "wsl", "windows"]) -> Span:
    """What a desktop on the same card holds."""
    return _span(table("contexts")["desktop"][system])


def reserve(total: int) -> Span:
    """What the driver keeps of a card of `total` bytes, where nothing better is known."""
    return _span(table("contexts")["reserve"]["small" if total <= 32 * GIB else "large"])
