"""Memory that vLLM finds outside torch's allocator after its profiling run: kernels that were
loaded, and NCCL's buffers."""

from __future__ import annotations

from typing import Annotated

from memfit.constants import fitted
from memfit.model.model import Model
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
# The largest sum that is fused, in MiB, by compute capability and ranks (compilation/passes/fusion/
# allreduce_rms_fusion.py FI_ALLREDUCE_FUSION_MAX_SIZE_MB, 0.24.0); tokens that the copies always
# have room for (trtllm_ar.py OneShotMaxToken)
SUMMED: dict[tuple[int, int], dict[int, float]] = {
    (9, 0): {2: 64, 4: 2, 8: 0.5},
    (10, 0): {2: 64, 4: 32, 8: 1},
    (10, 3): {2: 64, 4: 64, 8: 2},
}
ONE_SHOT = 128
SWITCHED = ("sxm", "superchip")
GRANULE: Annotated[
    int,
    fitted(
        "bytes that memory which GPUs reach through an NVSwitch is rounded up to",
        "what the driver recommends (cuMulticastGetGranularity) is in no source; FlashInfer's "
        "comm/mnnvl.py takes 512 MiB for other such memory, and unseen-0130, 0131 and 0137 have "
        "1.5 GiB more outside torch than one GPU, for three buffers",
    ),
] = 512 * MIB
TORCH = {0: (2, 5), 1: (2, 8)}  # that vLLM 0.7 and 0.11 install


def non_torch(setup: Setup, device: Device | None) -> int:
    """Bytes of `non_torch_increase`, with what a runner keeps where that counts, too."""
    return kept_by_runner(setup) + loaded(setup, device)


def kept_by_runner(setup: Setup) -> int:
    """What the second runner keeps for penalties, a count of each token and a bit of each for every
    request (v1/worker/gpu/sample/penalties.py, 0.22.0 to 0.33.0)."""
    if setup.pooling or not (setup.second_runner and setup.rules.consumed):
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
        kernels += summed(setup, device)
    if device is not None and setup.copies > 1:
        kernels += own * communicator_bytes(device, setup.copies, TORCH[engine])
        if shares_experts(setup.model):
            kernels += communicator_bytes(device, setup.tensor * setup.copies, TORCH[engine])
    return kernels


def summed(setup: Setup, device: Device) -> int:
    """FlashInfer's buffers for sums of the ranks, which compiled models fuse with what follows:
    what they exchange, flags, and three copies in a row for few tokens. Each becomes an object of
    the NVSwitch (distributed/device_communicators/flashinfer_all_reduce.py, 0.17.0 to 0.33.0;
    FlashInfer 0.6.8 `comm/trtllm_ar.py` trtllm_create_ipc_workspace_for_all_reduce_fusion and
    `comm/mnnvl.py` SymmDeviceMemory)."""
    rules, gpu = setup.rules, device.gpu
    alone = setup.pipeline == 1 and setup.copies == 1
    if setup.eager or not rules.fused_sums or not (alone or rules.fused_beside):
        return 0
    if gpu is None or gpu.form not in SWITCHED or gpu.sm is None:
        return 0
    most = SUMMED.get(gpu.sm, {}).get(setup.tensor)
    if most is None:
        return 0
    row = setup.model.width * setup.width
    tokens = min(int(most * MIB) // row, setup.batched)
    sizes = (tokens, 0, 3 * max(tokens, ONE_SHOT))
    return sum(max(1, -(-setup.tensor * one * row // GRANULE)) * GRANULE for one in sizes)


def shares_experts(model: Model) -> bool:
    """Whether copies of the model send tokens to each other's experts."""
    return bool(model.mixtures)
