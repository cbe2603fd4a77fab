"""In which order a stage of a pipeline runs its micro-batches: forward and backward of (chunk, micro-batch), as each schedule does on that
stage. Long steady phases repeat themselves, so that only their beginning is written down: what is in flight is the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memfit.strategy import PP

STEADY = 3  # micro-batches of a steady phase (times the chunks): the first, a usual one, the last


class Turn(NamedTuple):
    """`forward` or backward of a micro-batch through one of the rank's chunks."""

    forward: bool
    chunk: int
    micro: int


def turns(pp: PP, stage: int, micro_batches: int) -> tuple[Turn, ...]:
    """What the rank does in a step."""
    chunks = pp.virtual if pp.schedule == "interleaved" else 1
    warm = warm_up(pp, stage, micro_batches)
    count = shortened(warm, micro_batches * chunks, pp.size * chunks if chunks > 1 else 1)
    forward = [Turn(True, *place(index, pp.size, chunks, False)) for index in range(count)]
    backward = [Turn(False, *place(index, pp.size, chunks, True)) for index in range(count)]
    return tuple(woven(forward, backward, min(warm, count)))


def woven(forward: list[Turn], backward: list[Turn], warm: int) -> Iterator[Turn]:
    """`warm` forwards, then one forward and one backward by turns, then the backwards that are left."""
    yield from forward[:warm]
    for one, other in zip(forward[warm:], backward, strict=False):
        yield one
        yield other
    yield from backward[len(forward) - warm :]


def place(index: int, size: int, chunks: int, back: bool) -> tuple[int, int]:
    """The chunk and the micro-batch of a rank's forward or backward of this number: `size` micro-batches run through a chunk, then as many
    through the next (megatron-core 0.16.1 pipeline_parallel/schedules.py get_schedule_table; torch 2.13 pipelining/schedules.py
    ScheduleInterleaved1F1B)."""
    if chunks == 1:
        return 0, index
    around, within = divmod(index, size * chunks)
    chunk = within // size
    return chunks - 1 - chunk if back else chunk, around * size + within % size


def warm_up(pp: PP, stage: int, micro_batches: int) -> int:
    """Forwards before the first backward, less the one that stands right before it."""
    later = pp.size - 1 - stage
    if pp.schedule == "gpipe":
        return micro_batches
    if pp.schedule == "interleaved" and pp.virtual > 1:
        return min(2 * later + (pp.virtual - 1) * pp.size, micro_batches * pp.virtual)
    return min(later, micro_batches)


def in_flight(pp: PP, stage: int, micro_batches: int) -> int:
    """Micro-batches (of a chunk) whose activations the stage holds at most."""
    chunks = pp.virtual if pp.schedule == "interleaved" else 1
    return min(warm_up(pp, stage, micro_batches) + 1, micro_batches * chunks)


def shortened(warm: int, count: int, period: int) -> int:
    """Enough for a warm-up and some steady periods; whole periods where they matter."""
    enough = -(-(warm + STEADY * period) // period) * period
    return min(count, enough)
