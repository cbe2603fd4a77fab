"""What an answer takes for granted where neither the command nor the GPU tells, with the range that
it may be off by."""

from __future__ import annotations

from memfit.errors import Problem
from memfit.serving.base import Device, shared_memory
from memfit.serving.stored import FLASHINFER, MARLIN
from memfit.serving.vllm.activations import activations, copied_table, profiled
from memfit.serving.vllm.experts import CUTLASS, activation, kernel
from memfit.serving.vllm.setup import Setup
from memfit.units import GIB

# On a DGX Spark, nine start-up logs (rows unseen-0013 to 0158)
LOGGED = "from 1.0 GiB more to 6.2 GiB less"
WORTH = GIB // 10  # less is not worth a word
# Kernels that vLLM picks among by what is installed: names of `--moe-backend`, and whose they are
PICKED = {
    "flashinfer_cutlass": (FLASHINFER, "FlashInfer's"),
    "cutlass": (CUTLASS, "CUTLASS'"),
    "marlin": (MARLIN, "Marlin's"),
}


def assumed(setup: Setup, device: Device) -> tuple[Problem, ...]:
    """Words about what is assumed."""
    found = (shared_memory(device, LOGGED), first_start(setup), picked_kernel(setup))
    return tuple(one for one in found if one is not None)


def first_start(setup: Setup) -> Problem | None:
    """A start that compiles its kernels takes more memory than the next one."""
    table = copied_table(setup)
    more = table - max(setup.images.peak, setup.images.kept + profiled(setup)) if table else 0
    if more < WORTH:
        return None
    return Problem(
        level="note",
        message="this is a start that compiles its kernels; the next one leaves up to "
        f"{more / GIB:.1f} GiB more for the cache",
        where="gpu",
    )


def picked_kernel(setup: Setup) -> Problem | None:
    """Whose kernels run experts in NVFP4, where several can."""
    if setup.rules.expert_kernel or (setup.sm or (0, 0)) < (10, 0):
        return None
    mixer = next(iter(setup.model.mixtures), None)
    if mixer is None or setup.rank.scheme.of(f"{mixer.name}.up").kind != "fp4":
        return None
    taken = kernel(mixer, setup.rank, setup.rules, activation(setup.model))
    whose = next((words for name, words in PICKED.values() if name == taken), "")
    ours = activations(setup)
    others = [
        activations(setup, name) - ours for name, (kind, _) in PICKED.items() if kind != taken
    ]
    sides = {"less": max(others), "more": -min(others)}
    words = [f"{size / GIB:.1f} GiB {side}" for side, size in sides.items() if size >= WORTH]
    if not whose or not words:
        return None
    return Problem(
        level="note",
        message=f"experts are taken to run by {whose} kernels; by others the cache has up to "
        + " or ".join(words),
        where="moe_backend",
        hint="`--moe-backend` names the one that runs",
    )
