"""NCCL's buffers on the GPU of a serving engine, known or not."""

from __future__ import annotations

from typing import Annotated

from memfit.constants import counted, setting
from memfit.hardware import GPU, nvidia_cards
from memfit.hardware.nccl import communicator
from memfit.serving.base import Device

ALIKE: Annotated[
    float, setting("GPUs with as much memory as one without a name: they differ by less")
] = 0.02
GEFORCE = "NVIDIA GeForce"
ALONE: Annotated[
    tuple[int, int],
    counted(
        "compute capability from which a GeForce reaches no other GPU over PCIe: NCCL's buffers "
        "lie in the host's memory",
        "NVIDIA/nccl#1127 (3090) and #1637 (5090), NVIDIA/nccl-tests#117 (2080 Ti, 4090)",
    ),
] = (7, 5)


def communicator_bytes(device: Device, ranks: int, torch: tuple[int, int]) -> int:
    """The most that a communicator of `ranks` GPUs in one node uses on each; where only the
    memory of the GPU is known, on the worst NVIDIA GPU with as much, or nearly."""
    if device.gpu is not None and alone(device.gpu):
        return communicator(device.gpu, ranks, 1, torch).low
    found = (device.gpu,) if device.gpu is not None else same_memory(device.total)
    return max((communicator(gpu, ranks, 1, torch).high for gpu in found), default=0)


def alone(gpu: GPU) -> bool:
    """Whether it reaches no other GPU without the host."""
    linked = gpu.link is not None and gpu.link.kind != "pcie"
    return not linked and gpu.name.startswith(GEFORCE) and (gpu.sm or (0, 0)) >= ALONE


def same_memory(total: int) -> tuple[GPU, ...]:
    """NVIDIA's GPUs with about `total` bytes, else the nearest."""
    apart = {gpu: abs(gpu.memory - total) for gpu in nvidia_cards()}
    most = max(ALIKE * total, min(apart.values()))
    return tuple(gpu for gpu, each in apart.items() if each <= most)


__all__ = ["communicator_bytes"]
