"""Generation by a model whose layers are split over several GPUs of one process, from the view of
one GPU.

The first GPU has the tokens, the choice of the next one and the embedding; each keeps the cache of
its own layers. Hidden states come from the GPU before, and the last one's logits return to the
first (accelerate 1.15 hooks.py AlignDevicesHook, `io_same_device`).
"""

from __future__ import annotations

from memfit.formats import FORMATS, FP32
from memfit.lower import head, versions
from memfit.lower.body import Body
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Tensor
from memfit.program import Chunk, Program


def chunk_of(program: Program) -> Chunk | None:
    """The layers of this GPU; None where it has them all."""
    return None if program.stage is None else program.stage.chunks[0]


def begins(program: Program) -> bool:
    chunk = chunk_of(program)
    return chunk is None or chunk.begins


def elsewhere(x: Tensor, program: Program) -> Tensor:
    """Hidden states on the GPU before: no bytes of this one."""
    shape = (*x.shape[:2], program.model.width)
    return Tensor(shape, FORMATS[program.hidden], None)


def forward(body: Body, program: Program, ids: Tensor, ctx: Context, step: int) -> Tensor:
    """Hidden states behind the layers of this GPU."""
    chunk = chunk_of(program)
    if chunk is None:
        return body.forward(ids, ctx, step)
    x = ids if chunk.begins else elsewhere(ids, program)
    return body.run_chunk(chunk, x, ctx, step)


def logits(r: Recorder, program: Program, body: Body, hidden: Tensor, ctx: Context) -> Tensor:
    """Logits where the head is; on the first GPU the ones that come back; elsewhere no bytes."""
    chunk = chunk_of(program)
    if chunk is None or chunk.ends:
        scores = head.logits(hidden, body.model, body.ends, ctx)
        return versions.wide(scores, ctx) if versions.fp32_logits(program) else scores
    shape = (*hidden.shape[:-1], program.model.vocab)
    if not chunk.begins:
        return Tensor(shape, hidden.format, None)
    wide = versions.fp32_logits(program)
    return r.tensor(shape, FP32 if wide else FORMATS[program.hidden], "to_device", "logits")


__all__ = ["begins", "forward", "logits"]
