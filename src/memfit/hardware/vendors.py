"""How each vendor's tools name what memfit counts, what is known of its allocator, and which
hardware is refused because nothing is."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memfit.errors import Problem
from memfit.hardware.gpu import GPU
from memfit.lazy_dataclass import dataclass
from memfit.units import GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Vendor:
    """`shown_by` prints the device's memory, `context` is what one process adds outside the
    allocator, `allocator` is what is known of torch's allocator there (empty: as on CUDA)."""

    shown_by: str
    context: str
    allocator: str = ""


VENDORS: dict[str, Vendor] = {
    "nvidia": Vendor(shown_by="nvidia-smi", context="CUDA context"),
    # torch's ROCm build is its CUDA code translated (tools/amd_build), allocator included.
    "amd": Vendor(
        shown_by="rocm-smi",
        context="HIP context",
        allocator="ROCm's torch uses the same caching allocator as CUDA's; kernel workspaces "
        "are CUDA's and may differ",
    ),
    # c10/xpu/XPUCachingAllocator.cpp (torch 2.13) has CUDA's size classes and rounding.
    "intel": Vendor(
        shown_by="xpu-smi",
        context="Level Zero context",
        allocator="torch's XPU allocator has the size classes of CUDA's; kernel workspaces are "
        "CUDA's and may differ",
    ),
    # aten/src/ATen/mps/MPSAllocator.h (torch 2.13) has heaps of its own sizes.
    "apple": Vendor(
        shown_by="torch.mps.driver_allocated_memory()",
        context="Metal driver",
        allocator="torch's MPS allocator has heaps of its own, so `reserved` and kernel workspaces "
        "are CUDA's and only approximate; `allocated` does not depend on them",
    ),
}
UNKNOWN = Vendor(shown_by="nvidia-smi", context="CUDA context")
_TPU = re.compile(r"(?:google|cloud)?tpuv?\d*\w*|v[2-7][ep]?(?:lite)?pod\d*|trillium|ironwood")
_TRAINIUM = re.compile(r"(?:aws)?(?:trainium|inferentia|neuron|trn|inf)\d?\w*")
BY_TENSORS = "`--memory 32GiB` answers as for a CUDA GPU of that size"


def vendor_of(gpu: GPU | None) -> Vendor:
    """The vendor's words; those of NVIDIA where no GPU or an unlisted one is named."""
    return UNKNOWN if gpu is None else VENDORS.get(gpu.vendor, UNKNOWN)


def vendor_remarks(gpu: GPU) -> Iterator[Problem]:
    """What an answer for hardware that is not NVIDIA's rests on."""
    known = vendor_of(gpu).allocator
    if known:
        yield Problem(message=f"{gpu.name}: {known}", where="gpu", level="warning")
    if gpu.vendor == "apple" and gpu.label:
        low, high = (size / GIB for size in gpu.memory_range)
        yield Problem(
            message=f"macOS lets the GPU use {low:.3g} to {high:.3g} of {gpu.label} GiB by default",
            where="gpu",
            hint="`sudo sysctl iogpu.wired_limit_mb=N` raises it; then pass `--memory`",
            level="note",
        )


def refusal(gpu: GPU | str, where: str) -> Problem | None:
    """Why hardware whose memory management is unknown is refused, or None."""
    if isinstance(gpu, GPU):
        return (
            Problem(
                message=f"{gpu.name} (Gaudi) is not supported: nothing is known of its allocator",
                where=where,
                hint=f"`--memory {gpu.label or 96}GiB` answers as for a CUDA GPU of that size",
            )
            if gpu.id.startswith("gaudi")
            else None
        )
    word = re.sub(r"[^a-z0-9]", "", gpu[:80].lower())
    if _TPU.fullmatch(word):
        return Problem(
            message=f"`{gpu[:80]}` is not supported: XLA plans the memory of TPUs at compile time",
            where=where,
            hint=BY_TENSORS,
        )
    if _TRAINIUM.fullmatch(word):
        return Problem(
            message=f"`{gpu[:80]}` is not supported: the Neuron compiler plans its memory",
            where=where,
            hint=BY_TENSORS,
        )
    return None
