"""What a job takes of the host's memory beside the process itself: the copy of the weights that comes first, and paged optimizer states."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.formats import FORMATS
from memfit.lower.optimize import SMALLEST_PAGED
from memfit.optimizers import OPTIMIZERS
from memfit.program import Program

PAGED = {"int8_paged": 1, "fp32_paged": 4}  # bytes a value of the states that are managed memory


@dataclass(frozen=True, kw_only=True)
class Host:
    """Bytes of host memory beside the process itself, at the worst moment, and which that is."""

    size: int
    why: str


def host(program: Program, total: int) -> Host:
    """Without a device_map, from_pretrained fills the model on the CPU and `.to` copies it over; with one, tensors pass the host one at
    a time, out of a memory-mapped file (transformers 5.23 modeling_utils.py, core_model_loading.py)."""
    width, states = FORMATS[program.weights].block_bytes, paged(program)
    if program.job.mapped:
        largest = max((weight.count for weight in program.model.weights()), default=0)
        loading, why = largest * width, "the largest tensor on its way to the GPU"
    else:
        loading, why = total * width, "a copy of the weights while they are loaded without a device_map"
    if states > loading:
        return Host(size=states, why="paged optimizer states, where the GPU has no room for them")
    return Host(size=loading, why=why)


def paged(program: Program) -> int:
    """States in managed memory, which torch's allocator never sees: the driver moves their pages between GPU and host (bitsandbytes 0.50
    functional.py get_paged, optim/optimizer.py get_state_buffer; embeddings keep fp32)."""
    states = [PAGED[state] for state in OPTIMIZERS[program.job.optimizer].states if state in PAGED]
    if not states or not program.job.training:
        return 0
    return sum(
        times * count * (4 if wide else width)
        for count, wide, times in program.trained_tensors()
        if count >= SMALLEST_PAGED
        for width in states
    )
