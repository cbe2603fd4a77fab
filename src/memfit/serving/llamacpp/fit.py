"""Settings that fit: fewer tokens of context, experts on the CPU, fewer layers on the GPU.

`--fit` of llama.cpp reduces what was not set until a margin is left on every device: the context
first, down to 4,096 tokens, then layers (common/fit.cpp, llama.cpp b11549).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memfit.lazy_dataclass import dataclass
from memfit.serving.llamacpp.memory import Buffers, buffers, storage, with_compute
from memfit.serving.llamacpp.model import GgufModel
from memfit.serving.llamacpp.placement import Machine
from memfit.serving.llamacpp.settings import Settings

SHORTEST = 4096  # fit_params_min_ctx
STEP = 256


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The settings after `--fit`, and their buffers."""

    settings: Settings
    buffers: Buffers


def fits(held: Buffers, machine: Machine, margin: int = 0) -> bool:
    return all(
        held.on(name) + margin <= machine.free[index] for index, name in enumerate(machine.devices)
    )


def works(model: GgufModel, settings: Settings, machine: Machine, margin: int = 0) -> bool:
    """Whether these settings fit. Graphs take most of the time, and are left out where weights and
    caches alone are too large."""
    held = storage(model, settings, machine)
    return fits(held.buffers, machine, margin) and fits(with_compute(held), machine, margin)


def fitted(
    model: GgufModel, settings: Settings, machine: Machine, asked: frozenset[str], margin: int
) -> Fitted:
    """What llama-server would settle on; what the user set stays as it is."""
    held = buffers(model, settings, machine)
    if fits(held, machine, 0 if {"context", "gpu_layers"} <= asked else margin):
        return Fitted(settings=settings, buffers=held)
    if "context" not in asked and settings.context > SHORTEST:
        shorter = longest_context(model, settings, machine, margin)
        if shorter:
            settings = replace(settings, context=shorter)
            return Fitted(settings=settings, buffers=buffers(model, settings, machine))
        settings = replace(settings, context=SHORTEST)
    if not asked & {"gpu_layers", "cpu_moe", "cpu_moe_layers", "overrides"}:
        fewer = offloaded(model, settings, machine, margin)
        if fewer is not None:
            settings = fewer
    return Fitted(settings=settings, buffers=buffers(model, settings, machine))


def largest(low: int, high: int, good: Callable[[int], bool]) -> int:
    """The largest number from `low` on for which `good` holds; `low - 1` where none does."""
    if not good(low):
        return low - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low


def longest_context(
    model: GgufModel, settings: Settings, machine: Machine, margin: int = 0, most: int = 0
) -> int:
    """The most tokens that fit; 0 where not even the shortest context does."""
    most = most or settings.context

    def good(steps: int) -> bool:
        one = replace(settings, context=steps * STEP)
        return works(model, one, machine, margin)

    found = largest(SHORTEST // STEP, max(SHORTEST, most) // STEP, good)
    return 0 if found * STEP < SHORTEST else found * STEP


def most_slots(model: GgufModel, settings: Settings, machine: Machine) -> int:
    """How many slots with this run's context each fit; 0 where not even one does."""
    each = settings.context // (1 if settings.unified else settings.parallel)

    def good(slots: int) -> bool:
        one = replace(settings, context=each * slots, parallel=slots, unified=False)
        return works(model, one, machine)

    return max(0, largest(1, MOST_SLOTS, good))


MOST_SLOTS = 256  # LLAMA_MAX_SEQ


def offloaded(
    model: GgufModel, settings: Settings, machine: Machine, margin: int = 0
) -> Settings | None:
    """Experts of as few layers as possible on the CPU; without experts, as many layers as fit."""
    layers = model.number("block_count")
    if model.number("expert_count"):

        def spared(gpu: int) -> bool:
            one = replace(settings, cpu_moe=layers - gpu)
            return works(model, one, machine, margin)

        on_gpu = largest(0, layers, spared)
        if on_gpu >= 0:
            return replace(settings, cpu_moe=layers - on_gpu)
        settings = replace(settings, cpu_moe=layers)

    def good(count: int) -> bool:
        one = replace(settings, gpu_layers=count)
        return works(model, one, machine, margin)

    count = largest(0, layers + 1, good)
    return None if count < 0 else replace(settings, gpu_layers=count)


def remedy(model: GgufModel, settings: Settings, machine: Machine) -> str:
    """Flags that work, the least change first."""
    ways = []
    context = longest_context(model, settings, machine)
    if context and context < settings.context:
        ways.append(f"-c {context}")
    other = offloaded(model, settings, machine)
    if other is not None:
        if other.cpu_moe != settings.cpu_moe:
            ways.append(f"--n-cpu-moe {other.cpu_moe}")
        if other.gpu_layers != settings.gpu_layers:
            ways.append(f"-ngl {other.gpu_layers}")
    return " or ".join(ways[:2]) or "a larger GPU, or a smaller quantization"
