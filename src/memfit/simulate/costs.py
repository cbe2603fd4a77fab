"""The bytes that a kernel moves, inferred from the block that it allocates: an elementwise kernel
reads tensors as large as the one it writes.

Kernels that write a `Compute` of their own are priced by that; what an optimizer does in place its
row says.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Annotated

from memfit.constants import counted
from memfit.tape import Alloc

# How many tensors of the output's size a kernel reads; one, unless it stands here.
READS: Mapping[str, float] = {
    "add": 2,
    "sub": 2,
    "mul": 2,
    "div": 2,
    "accumulate": 2,
    "copy_slices": 2,
    "scale": 1,
    "silu": 1,
    "gelu": 1,
    "zeros": 0,
    "ones": 0,
    "ones_like": 0,
    "zeros_like": 0,
    "arange": 0,
    "nll_loss": 0,
    "freqs": 0,
    "full": 0,
    "log_softmax": 2,
    "softmax": 2,
    "layer_norm": 2,  # two passes over the input
}
# No kernel makes these: memory that something else fills, or that was there before the step.
NO_KERNEL = frozenset(
    {
        "parameter",
        "cublas",
        "load",
        "inputs",
        "empty_like",
        "new_empty",
        "end",
        "contiguous_operand",
        "state",
        "code",
        "brought_back",
    }
)
# One kernel makes all their results: statistics of rows, a mask.
TOGETHER = frozenset({"layer_norm", "rms_norm", "dropout"})
REDUCTIONS = frozenset(
    {"mean", "sum", "norm", "amax", "max", "argmax", "all"}
)  # these read what was made last
# FSDP2 copies what it gathered into place, FSDP1 gathers it there: a stream of its own tells them
# apart.
COPIES: Annotated[
    Mapping[str, float],
    counted(
        "how often a kernel moves the bytes of a block of communication that it fills; collectives "
        "fill the others themselves",
        "torch 2.13 _fsdp_collectives.py foreach_all_gather_copy_out",
    ),
] = {"unshard": 2, "cast": 3, "to": 1.5, "cat": 2, "flatten": 2}


def moved(event: Alloc, before: int) -> float:
    """Bytes that the kernel behind this block reads and writes; `before` is the size of the block
    made before it."""
    if event.op in NO_KERNEL or event.part == "weights":
        return 0.0
    if event.part == "communication":
        return (
            0.0 if event.op == "unshard" and event.stream else event.size * COPIES.get(event.op, 0)
        )
    if event.op in REDUCTIONS:
        return event.size + max(before, event.size)
    if event.op == "to":  # between 16 and 32 bits
        wide = isinstance(event.formula, tuple) and event.formula[-1] == 4
        return event.size * (1 + (1 / 2 if wide else 2))
    return event.size * (1 + READS.get(event.op, 1))


def heads(event: Alloc) -> tuple[int, int]:
    """(width of a head, values) of the output of attention."""
    if not isinstance(event.formula, tuple) or len(event.formula) < 3:
        return 128, max(1, event.size // 2)
    return event.formula[-2], max(1, prod(event.formula[:-1]))


__all__ = ["NO_KERNEL", "READS", "TOGETHER", "heads", "moved"]
