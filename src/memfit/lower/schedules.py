"""In which order a stage of a pipeline runs its micro-batches: forward and backward of (chunk,
micro-batch), as each schedule does on that stage. Long steady phases repeat themselves, so that
only their beginning is written down: what is in flight is the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memfit.strategy import PP

STEADY = 3  # micro-batches of a steady phase (times the chunks): the first, a usual one, the last


class Turn(NamedTuple):
    """`forward` or backward of a micro-batch through one of the rank's chunks; `part` of a
    backward: the `whole`, the gradient of what came in (`input`), those of the weights (`weight`).
    """

    forward: bool
    chunk: int
    micro: int
    part: str = "whole"


def turns(pp: PP, stage: int, micro_batches: int, *, whole: bool = False) -> tuple[Turn, ...]:
    """What the rank does in a step; `whole`: every micro-batch, where each leaves something
    behind."""
    own = OWN.get(pp.schedule)
    if own is not None:
        return tuple(own(pp, stage, micro_batches))
    chunks = pp.virtual if pp.schedule == "interleaved" else 1
    warm = warm_up(pp, stage, micro_batches)
    count = micro_batches * chunks
    count = count if whole else shortened(warm, count, pp.size * chunks if chunks > 1 else 1)
    forward = [Turn(True, *place(index, pp.size, chunks, False)) for index in range(count)]
    backward = [Turn(False, *place(index, pp.size, chunks, True)) for index in range(count)]
    return tuple(woven(forward, backward, min(warm, count)))


def woven(forward: list[Turn], backward: list[Turn], warm: int) -> Iterator[Turn]:
    """`warm` forwards, then one forward and one backward by turns, then the backwards that are
    left."""
    yield from forward[:warm]
    for one, other in zip(forward[warm:], backward, strict=False):
        yield one
        yield other
    yield from backward[len(forward) - warm :]


def place(index: int, size: int, chunks: int, back: bool) -> tuple[int, int]:
    """The chunk and the micro-batch of a rank's forward or backward of this number: `size`
    micro-batches run through a chunk, then as many through the next (megatron-core 0.16.1
    pipeline_parallel/schedules.py get_schedule_table; torch 2.13 pipelining/schedules.py
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


# ------------------------------------------------------------------------------------- torch's own
# (torch 2.13 pipelining/schedules.py)
def breadth_first(pp: PP, stage: int, micro_batches: int) -> Iterator[Turn]:
    """All micro-batches through a chunk before the next, and back the other way round
    (ScheduleLoopedBFS)."""
    yield from (
        Turn(True, chunk, micro) for chunk in range(pp.virtual) for micro in range(micro_batches)
    )
    yield from (
        Turn(False, chunk, micro)
        for chunk in reversed(range(pp.virtual))
        for micro in reversed(range(micro_batches))
    )


def zero_bubble(pp: PP, stage: int, micro_batches: int) -> Iterator[Turn]:
    """As interleaved, with half the warm-up; the weights' gradients come as many backwards later as
    there are ranks before this one (ScheduleInterleavedZeroBubble)."""
    count = micro_batches * pp.virtual
    warm = min((pp.virtual - 1) * pp.size + pp.size - 1 - stage, count)
    backward = [place(index, pp.size, pp.virtual, True) for index in range(count)]
    yield from (Turn(True, *place(index, pp.size, pp.virtual, False)) for index in range(warm))
    for index in range(count):
        if warm + index < count:
            yield Turn(True, *place(warm + index, pp.size, pp.virtual, False))
        yield Turn(False, *backward[index], "input")
        if index >= stage:
            yield Turn(False, *backward[index - stage], "weight")
    yield from (Turn(False, *one, "weight") for one in backward[max(0, count - stage) :])


def there_and_back(pp: PP, stage: int, micro_batches: int) -> Iterator[Turn]:
    """Two chunks, the second on the way back of a V (ScheduleZBVZeroBubble): written for as many
    micro-batches as fill it, of which those that there are run."""
    return (
        turn
        for turn in filled_v(pp.size, stage, max(2 * pp.size - 1, micro_batches))
        if turn.micro < micro_batches
    )


def filled_v(size: int, stage: int, micro_batches: int) -> Iterator[Turn]:
    done = {(kind, chunk): 0 for kind in ("forward", "input", "weight") for chunk in (0, 1)}

    def turn(kind: str, chunk: int) -> Turn:
        done[kind, chunk] += 1
        return Turn(
            kind == "forward", chunk, done[kind, chunk] - 1, "whole" if kind == "forward" else kind
        )

    yield from (turn("forward", 0) for _ in range(2 * (size - stage) - 1))
    yield from (turn("forward", chunk) for _ in range(stage) for chunk in (1, 0))
    yield from (
        turn(kind, 1) for _ in range(size - stage) for kind in ("forward", "input", "weight")
    )
    while done["forward", 1] < done["forward", 0] or done["forward", 0] < micro_batches:
        if done["forward", 0] < micro_batches:
            yield turn("forward", 0)
        yield from (
            turn(*one)
            for one in (("input", 0), ("weight", 0), ("forward", 1), ("input", 1), ("weight", 1))
        )
    yield from (turn("input", chunk) for _ in range(stage) for chunk in (0, 1))
    yield from (turn(kind, 0) for _ in range(size - stage) for kind in ("input", "weight"))
    for chunk in (1, 0):
        yield from (
            turn("weight", chunk) for _ in range(done["input", chunk] - done["weight", chunk])
        )


OWN = {"bfs": breadth_first, "zero-bubble": zero_bubble, "zbv": there_and_back}
