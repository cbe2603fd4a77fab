"""Memory that vLLM finds outside torch's allocator after its profiling run: kernels that were
loaded, and NCCL's buffers."""

from __future__ import annotations

from memfit.model.modules import Model
from memfit.serving.base import Device
from memfit.serving.links import communicator_bytes
from memfit.serving.vllm.rules import COMPILING
from memfit.serving.vllm.setup import Setup
from memfit.units import GIB, MIB

# Kernels loaded during the run beyond the bare context: 164 MiB on an H100 (vllm#12126), 36 MiB on
# a T4, whose attention and compilation paths are smaller (hardware/contexts.toml).
KERNELS, SMALL_KERNELS = 164 * MIB, 36 * MIB
# ROCm: as the two logs of an MI300X have it (vllm-0030 and vllm-0031 of the published rows, which
# are therefore no evidence).
ROCM = int(0.66 * GIB)
# vLLM keeps a communicator of its own beside torch's. V1 looks at the memory after its own has run
# from 0.11.0 on (v1/worker/gpu_worker.py init_device), V0 before either has (worker/worker.py,
# 0.7.2), and so do earlier versions of V1 (`Rules.early_look`).
COMMUNICATORS = {0: 2, 1: 1}
TORCH = {0: (2, 5), 1: (2, 8)}  # that vLLM 0.7 and 0.11 install


def non_torch(setup: Setup, device: Device | None) -> int:
    """Bytes of `non_torch_increase`, with what a runner keeps where that counts, too."""
    return kept_by_runner(setup) + loaded(setup, device)


def kept_by_runner(setup: Setup) -> int:
    """What the second runner keeps for penalties, a count of each token and a bit of each for every
    request (v1/worker/gpu/sample/penalties.py, 0.22.0 to 0.33.0)."""
    if not (setup.second_runner and setup.rules.consumed):
        return 0
    return setup.requests * (4 * setup.model.vocab + 4 * -(-setup.model.vocab // 32))


def loaded(setup: Setup, device: Device | None) -> int:
    """Kernels, and NCCL's buffers."""
    gpu = device.gpu if device is not None else None
    if gpu is not None and gpu.vendor == "amd":
        return ROCM + (COMPILING if setup.compiles else 0)
    small = setup.sm is not None and setup.sm < (8, 0)
    kernels = SMALL_KERNELS if small else KERNELS
    engine = setup.rules.engine
    own = bool(engine) and setup.rules.early_look
    if device is not None and setup.tensor > 1:
        one = communicator_bytes(device, setup.tensor, TORCH[engine])
        kernels += (COMMUNICATORS[engine] + own) * one
    if device is not None and setup.copies > 1:
        kernels += own * communicator_bytes(device, setup.copies, TORCH[engine])
        if shares_experts(setup.model):
            kernels += communicator_bytes(device, setup.tensor * setup.copies, TORCH[engine])
    return kernels


def shares_experts(model: Model) -> bool:
    """Whether copies of the model send tokens to each other's experts."""
    return bool(model.mixtures)
