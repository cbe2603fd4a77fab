"""Context parallelism: every rank has its part of the tokens of each sequence, two pieces from either end; attention alone looks beyond."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.model.modules import Attention, Latent
from memfit.program import Program
from memfit.techniques.base import TRACE, Technique


def check(program: Program) -> Iterator[Problem]:
    """Heads are those of a rank: what tensor parallelism left of them."""
    cp, job = program.strategy.cp, program.job
    assert cp is not None
    if not program.engine:
        message = f"no formula yet for context parallelism of {job.framework}"
        yield Problem(message=message, where="use cp", hint=f"`--framework megatron` has one; {TRACE}")
        return
    pieces = 2 * cp.size * (program.strategy.size("tp") if program.strategy.tp is not None and program.strategy.tp.sequence else 1)
    if job.seq % pieces:
        message = f"{job.seq} tokens are no multiple of {pieces}"
        yield Problem(message=message, where="use cp", hint="two pieces for each rank, split further by sequence parallelism")
    if any(isinstance(block.mixer, Latent) for layer, _ in program.model.kinds for block in layer.blocks):
        yield Problem(message="no formula yet for context parallelism of latent attention", where="use cp", hint="leave it away")
    if cp.style == "ulysses":
        heads = {count for layer, _ in program.model.kinds for block in layer.blocks if isinstance(block.mixer, Attention)
                 for count in (block.mixer.heads, block.mixer.kv_heads) if count % cp.size}  # fmt: skip
        for count in sorted(heads):
            message = f"{cp.size} ranks do not divide the {count} heads of a rank"
            yield Problem(message=message, where="use cp", hint="`style=ring` or `style=allgather` take any number of heads")


TECHNIQUE = Technique(
    name="context parallel", cite="TransformerEngine 2.11 pytorch/attention/dot_product_attention/context_parallel.py; megatron-core 0.16.1",
    apply=lambda program: program, check=check, layout="cp",
)  # fmt: skip
