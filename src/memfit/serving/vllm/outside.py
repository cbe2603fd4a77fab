"""Memory that vLLM finds outside torch's allocator after its profiling run: kernels that were
loaded, and NCCL's buffers."""

from __future__ import annotations

from memfit.serving.base import Device
from memfit.serving.vllm.setup import Setup
from memfit.units import MIB

# Kernels loaded during the run beyond the bare context: 164 MiB on an H100 (vllm#12126), 36 MiB on
# a T4, whose attention and compilation paths are smaller (hardware/contexts.toml).
KERNELS, SMALL_KERNELS = 164 * MIB, 36 * MIB


def non_torch(setup: Setup, device: Device | None) -> int:
    """Bytes of `non_torch_increase`."""
    return SMALL_KERNELS if setup.sm is not None and setup.sm < (8, 0) else KERNELS
