"""The host's part of a step with offload: copies over PCIe, next to the kernels, and the
optimizer's arithmetic on a CPU that all ranks of a node share."""

from __future__ import annotations

from typing import Annotated

from memfit.constants import assumed
from memfit.formats import FP32
from memfit.hardware import Cluster
from memfit.lazy_dataclass import dataclass
from memfit.strategy import Strategy

_OFFLOAD = (
    "ZeRO-Offload, arXiv 2101.06840, table 4, from memory and not looked up: 2.57 and 14.76 s for "
    "ten billion values on two 24-core processors of 2017. DeepSpeed's documentation says 5 to 7 "
    "times (deepspeed.ai/tutorials/zero-offload). Newer hosts have two to three times that memory "
    "bandwidth"
)
DEEPSPEED: Annotated[
    float, assumed("seconds a value that DeepSpeed's CPUAdam takes on the whole host", _OFFLOAD)
] = 0.257e-9
TORCH: Annotated[
    float, assumed("seconds a value that torch's AdamW takes on the whole host", _OFFLOAD)
] = 1.476e-9


@dataclass(frozen=True, kw_only=True)
class Away:
    """Bytes of gradients that every backward copies to the host and of weights that come back after
    a step, and the step's seconds there."""

    gradients: int
    weights: int
    seconds: float


def away(cluster: Cluster, strategy: Strategy, trainable: int, width: int) -> Away | None:
    """None where nothing lives on the host. DeepSpeed copies gradients as fp32 (deepspeed 0.19.8
    runtime/zero/stage_1_and_2.py async_inplace_copy_grad_to_fp32_buffer_from_gpu) and weights back
    in `width` bytes, unless they stay there, too; FSDP copies gradients as the weights are stored
    (torch 2.13 _fsdp_param_group.py) and gathers new weights from the host, as it does all the
    time. Gemini's chunks go to the host as they are summed up, and come from there for every pass;
    its HybridAdam has DeepSpeed's kernel there (colossalai 0.3.0 kernel/cuda_native)."""
    zero, fsdp, gemini = strategy.zero, strategy.fsdp, strategy.gemini
    here = min(strategy.ranks, cluster.gpus_per_node)
    count = trainable // (strategy.ranks // strategy.size("ddp"))
    if fsdp is not None and fsdp.offload:
        return Away(gradients=count * width, weights=0, seconds=count * here * TORCH)
    if gemini is not None and gemini.placement == "cpu":
        return Away(gradients=count * width, weights=0, seconds=count * here * DEEPSPEED)
    if zero is not None and zero.offload_optimizer != "none":
        back = 0 if zero.offload_param != "none" else count * width
        return Away(gradients=FP32.bytes(count), weights=back, seconds=count * here * DEEPSPEED)
    return None


__all__ = ["Away", "away"]
