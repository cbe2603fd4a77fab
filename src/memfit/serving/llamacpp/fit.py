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


@dataclass(frozen=True, kw_only=True)
class Search:
    """The largest number for which the settings that it makes fit."""

    model: GgufModel
    machine: Machine
    margin: int
    made: Callable[[int], Settings]

    def stored(self, number: int) -> bool:
        """Whether weights and caches fit."""
        held = storage(self.model, self.made(number), self.machine)
        return fits(held.buffers, self.machine, self.margin)

    def works(self, number: int) -> bool:
        """Whether graphs, which take most of the time, fit beside them."""
        held = storage(self.model, self.made(number), self.machine)
        return fits(with_compute(held), self.machine, self.margin)

    def largest(self, low: int, high: int) -> int:
        """From `low` on; `low - 1` where none does. Graphs are tried near the number that weights
        and caches allow, in growing steps down from it."""
        most = bisected(low - 1, high, self.stored)
        step, bad = 1, most + 1
        while most >= low and not self.works(most):
            bad, most, step = most, max(low, most - step) if most > low else low - 1, 2 * step
        return most if most < low else bisected(most, bad - 1, self.works)


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


def bisected(low: int, high: int, good: Callable[[int], bool]) -> int:
    """The largest number above `low` for which `good` holds, or `low`."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low


def longest_context(
    model: GgufModel, settings: Settings, machine: Machine, margin: int = 0, most: int = 0
) -> int:
    """The most tokens that fit; 0 where not even the shortest context does."""
    most = most or settings.context

    def made(steps: int) -> Settings:
        return replace(settings, context=steps * STEP)

    search = Search(model=model, machine=machine, margin=margin, made=made)
    found = search.largest(SHORTEST // STEP, max(SHORTEST, most) // STEP)
    return 0 if found * STEP < SHORTEST else found * STEP


def most_slots(model: GgufModel, settings: Settings, machine: Machine) -> int:
    """How many slots with this run's context each fit; 0 where not even one does."""
    each = settings.context // (1 if settings.unified else settings.parallel)

    def made(slots: int) -> Settings:
        return replace(settings, context=each * slots, parallel=slots, unified=False)

    search = Search(model=model, machine=machine, margin=0, made=made)
    return max(0, search.largest(1, MOST_SLOTS))


MOST_SLOTS = 256  # LLAMA_MAX_SEQ


def offloaded(
    model: GgufModel, settings: Settings, machine: Machine, margin: int = 0
) -> Settings | None:
    """Experts of as few layers as possible on the CPU; without experts, as many layers as fit."""
    layers = model.number("block_count")
    if model.number("expert_count"):

        def spared(gpu: int) -> Settings:
            return replace(settings, cpu_moe=layers - gpu)

        search = Search(model=model, machine=machine, margin=margin, made=spared)
        on_gpu = search.largest(0, layers)
        if on_gpu >= 0:
            return replace(settings, cpu_moe=layers - on_gpu)
        settings = replace(settings, cpu_moe=layers)

    def fewer(count: int) -> Settings:
        return replace(settings, gpu_layers=count)

    search = Search(model=model, machine=machine, margin=margin, made=fewer)
    count = search.largest(0, layers + 1)
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
