"""Context parallelism: every rank has its part of the tokens of each sequence, two pieces from either end; attention alone looks beyond."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.model.modules import Attention, Latent
from memfit.program import Program
from memfit.strategy import CP
from memfit.techniques.base import TRACE, Technique


def check(program: Program) -> Iterator[Problem]:
    """Heads are those of a rank: what tensor parallelism left of them."""
    cp, job = program.strategy.cp, program.job
    assert cp is not None
    if not program.engine:
        yield from of_torch(program, cp)
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


def of_torch(program: Program, cp: CP) -> Iterator[Problem]:
    """torch's ring attention as accelerate and the Trainer have it (torch 2.13 distributed/tensor/experimental/_context_parallel)."""
    job, strategy = program.job, program.strategy
    heads = {block.mixer.head % 8 for layer, _ in program.model.kinds for block in layer.blocks if isinstance(block.mixer, Attention)}
    windows = {block.mixer.window for layer, _ in program.model.kinds for block in layer.blocks if isinstance(block.mixer, Attention)}
    wrong = (
        (not job.hugging, f"of {job.framework}", "`--framework megatron` has one"),
        (not job.training, "of inference", "leave it away"),
        (cp.style == "ulysses", "of Ulysses attention, which torch has not", "`style=ring` or `style=allgather`"),
        (strategy.fsdp is None or strategy.fsdp.version == 1 or any(strategy.size(name) > 1 for name in ("ddp", "tp", "pp", "zero")),
         "beside other layouts than FSDP2", "`cp=2 fsdp=4`"),
        (job.attention not in ("sdpa", "flash") or not job.packing or bool(job.unsloth),
         "but of flash attention by SDPA on packed sequences", "`--attention sdpa`"),
        (any(0 < window < job.seq for window in windows) or heads != {0}, f"of the family `{program.model.family}` as it is here", TRACE),
        (job.checkpointing == "selective" or job.evaluate or job.loss != "plain", "with selective checkpoints, an evaluation or a fused loss", TRACE),
    )  # fmt: skip
    for one, what, hint in wrong:
        if one:
            yield Problem(message=f"no formula yet for context parallelism {what}", where="use cp", hint=hint)
    if job.seq % (2 * cp.size):
        message = f"{2 * cp.size} chunks do not divide {job.seq} tokens"
        yield Problem(message=message, where="job.seq", hint="every rank holds two chunks of each sequence, an early and a late one")


TECHNIQUE = Technique(
    name="context parallel", cite="TransformerEngine 2.11 pytorch/attention/dot_product_attention/context_parallel.py; megatron-core 0.16.1",
    apply=lambda program: program, check=check, layout="cp",
)  # fmt: skip
