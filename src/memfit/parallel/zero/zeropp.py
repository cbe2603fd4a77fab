"""ZeRO++'s weights (deepspeed 0.19.8 runtime/zero/partition_parameters.py,
ops/csrc/quantization/pt_binding.cpp): a second copy of what was gathered, shared out within a group
of ranks (hpZ), and weights that travel as bytes with scales (qwZ)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from memfit.errors import InputError
from memfit.formats import FP16
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Storage
from memfit.strategy import ZeRO

if TYPE_CHECKING:
    from memfit.parallel.zero.coordinator import Param

TARGET, MOST, EIGHT = (
    8000,
    16_000,
    8,
    # values of a group (CUDAQuantizer.target_group_size, its hard limit), and what all are
    # multiples of
)


def second(r: Recorder, param: Param, layout: ZeRO) -> Storage | None:
    """This rank's part of the copy that its group keeps (_partition_param_sec)."""
    return r.scratch(
        param.leaf.format.bytes(param.part * layout.size // layout.hpz), "secondary", "weights"
    )


@cache
def groups(count: int) -> int:
    """Groups of values that share a scale (CUDAQuantizer.quantize)."""
    found = -(-count // TARGET)
    while found < count and count % (EIGHT * found):
        found += 1
    while count % (2 * EIGHT * found) == 0 and count / found > TARGET:
        found *= 2
    if count % (EIGHT * found) or count / found >= MOST or found >= count:
        message = f"DeepSpeed cannot quantize a shard of {count} values in groups of {EIGHT}"
        raise InputError.one(
            message, where="use zero.qwz", hint="use another number of ranks, or remove it"
        )
    return found


def quantized(
    r: Recorder, params: Sequence[Param], ranks: tuple[int, int], stream: int
) -> tuple[int, list[Storage | None]]:
    """(bytes that travel, what stays until they are used). `ranks`: all, and those that gather. The
    kernel takes fp16 and gives a byte a value, with an fp32 scale a group; what this rank sends is
    held until somebody waits for it (the last two)."""
    whole = sum(param.part for param in params) * ranks[0]
    own, width = whole // ranks[1], params[0].leaf.format.block_bytes
    flat = r.scratch(whole, "all_gather", "communication", stream)
    together = r.scratch(width * own, "cat", "communication", stream) if len(params) > 1 else None
    half = (
        r.scratch(2 * own, "to", "communication", stream)
        if params[0].leaf.format is not FP16
        else None
    )
    codes = r.scratch(own, "quantize", "communication", stream)
    scales = r.scratch(4 * groups(own), "quantize", "communication", stream)
    del half, together
    gathered = r.scratch(4 * groups(own) * ranks[1], "all_gather", "communication", stream)
    return whole + 4 * groups(own) * ranks[1], [flat, gathered, codes, scales]


def opened(
    r: Recorder, params: Sequence[Param], ranks: int, buffers: list[Storage | None], stream: int
) -> None:
    """Bytes become fp16 values, all at once, and each parameter takes its own from there; one by
    itself is what they become, or a copy of it."""
    alone, narrow = len(params) == 1, params[0].leaf.format is FP16
    del buffers[2:]  # has been sent
    flat = (
        r.scratch(
            2 * sum(param.part for param in params) * ranks, "dequantize", "communication", stream
        )
        if not (alone and narrow)
        else None
    )
    for param in params:
        piece = (
            None if alone or narrow else r.scratch(2 * param.count, "cat", "communication", stream)
        )
        param.storage.take()
        del piece
    if not alone:
        buffers.append(flat)


__all__ = ["groups", "opened", "quantized", "second"]
