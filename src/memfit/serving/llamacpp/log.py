"""The lines of the start-up log that tell sizes, in llama.cpp's own words."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.serving.llamacpp.memory import Buffers
from memfit.serving.llamacpp.model import GgufModel
from memfit.serving.llamacpp.placement import HOST, Machine
from memfit.serving.llamacpp.settings import Settings
from memfit.units import MIB


def _line(who: str, device: str, what: str, size: int) -> str:
    return f"{who}: {device:>12} {what} buffer size = {size / MIB:8.2f} MiB"


def log_lines(
    model: GgufModel, settings: Settings, machine: Machine, held: Buffers
) -> tuple[str, ...]:
    return tuple(_lines(model, settings, machine, held))


def _lines(model: GgufModel, settings: Settings, machine: Machine, held: Buffers) -> Iterator[str]:
    pinned = machine.backend.host or HOST
    layers = model.number("block_count")
    if machine.devices:
        on = min(settings.gpu_layers, layers + 1)
        yield f"load_tensors: offloaded {on}/{layers + 1} layers to GPU"
    mapped = "CPU_Mapped" if settings.mmap else pinned
    for device, size in held.model.items():
        if size:
            yield _line("load_tensors", mapped if device == HOST else device, "model", size)
    yield _line("llama_context", pinned, "output", held.output)
    for part, what in ((held.kv, "KV"), (held.kv_window, "KV"), (held.state, "RS")):
        who = "llama_memory_recurrent" if what == "RS" else "llama_kv_cache"
        for device, size in part.items():
            yield _line(who, device, what, size)
    for device, size in held.compute.items():
        yield _line("sched_reserve", pinned if device == HOST else device, "compute", size)
