"""NVIDIA's management library, which a machine without a GPU does not have: what scripts read from
`pynvml`, as the pretended GPU would answer."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from memfit.trace import cuda
from memfit.trace.imports import Patch
from memfit.trace.live import Live


def functions(device: cuda.Device, live: Live) -> Callable[[ModuleType], list[Patch]]:
    """For `pynvml`, once it is imported; whatever else it is asked reads 0."""

    def memory(*_: Any, **__: Any) -> SimpleNamespace:
        free, total = live.mem_get_info()
        return SimpleNamespace(total=total, free=free, used=total - free, reserved=0)

    known: dict[str, Callable[..., Any]] = {
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetCount": lambda: cuda.HERE.count,
        "nvmlDeviceGetName": lambda _: device.name,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetCudaComputeCapability": lambda _: device.capability,
        "nvmlSystemGetDriverVersion": lambda: "570.00",
        "nvmlDeviceGetComputeRunningProcesses": lambda _: [],
    }

    def change(module: ModuleType) -> list[Patch]:
        names = [
            name
            for name, one in vars(module).items()
            if name.startswith("nvml") and callable(one) and not isinstance(one, type)
        ]
        return [(module, name, known.get(name, lambda *_, **__: 0)) for name in names]

    return change


__all__ = ["functions"]
