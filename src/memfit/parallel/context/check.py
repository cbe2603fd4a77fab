"""Context parallelism: every rank has its part of the tokens of each sequence, two pieces from
either end; attention alone looks beyond."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.job import Job
from memfit.model.modules import Attention, Latent
from memfit.program import Program
from memfit.strategy import CP, Strategy
from memfit.techniques.attention import PACKAGES, element
from memfit.techniques.base import TRACE, Overlay, Technique

HEADED = (
    "sdpa",
    "flash",
    "flash-attn-2",
    "flash-attn-3",
)  # attention of transformers that DeepSpeed exchanges tokens for heads around


def check(program: Program) -> Iterator[Problem]:
    """Heads are those of a rank: what tensor parallelism left of them."""
    cp, job = program.strategy.cp, program.job
    assert cp is not None
    if not program.engine:
        yield from of_deepspeed(program, cp) if cp.style == "ulysses" else of_torch(program, cp)
        return
    pieces = (
        2
        * cp.size
        * (
            program.strategy.size("tp")
            if program.strategy.tp is not None and program.strategy.tp.sequence
            else 1
        )
    )
    if job.seq % pieces:
        message = f"{job.seq} tokens are not a multiple of {pieces}"
        yield Problem(
            message=message,
            where="use cp",
            hint="each rank needs two pieces, split further by sequence parallelism",
        )
    if any(isinstance(mixer, Latent) for mixer in program.model.mixers):
        yield Problem(
            message="not supported yet: context parallelism of latent attention",
            where="use cp",
            hint="remove it",
        )
    if cp.style == "ulysses":
        heads = {
            count
            for mixer in program.model.attentions
            for count in (mixer.heads, mixer.kv_heads)
            if count % cp.size
        }
        for count in sorted(heads):
            message = f"{cp.size} ranks do not divide the {count} heads of a rank"
            yield Problem(
                message=message,
                where="use cp",
                hint="use `style=ring` or `style=allgather`, which support any number of heads",
            )


def by_heads(job: Job, strategy: Strategy) -> Iterator[Problem]:
    """DeepSpeed's Ulysses as accelerate and the Trainer have it (`ParallelismConfig(sp_size=...)`),
    for both producers (accelerate 1.15 parallelism_config.py, accelerator.py; deepspeed 0.19.8
    runtime/sequence_parallel/ulysses_sp.py)."""
    cp, zero = strategy.cp, strategy.zero
    assert cp is not None
    if zero is None or any(strategy.size(name) > 1 for name in ("ddp", "fsdp", "tp", "pp", "ep")):
        message = "transformers' Ulysses attention is DeepSpeed's and needs ZeRO"
        yield Problem(
            message=message,
            where="use cp",
            hint=(
                f"`--use cp={cp.size},style=ulysses --use zero,stage=3`, or `style=ring` "
                "beside `fsdp`"
            ),
        )
    elif zero.hpz > 1:
        yield Problem(
            message="not supported yet: ZeRO++'s second copy with Ulysses",
            where="use zero.hpz",
            hint="remove it",
        )
    if job.attention == "eager":
        message = (
            "DeepSpeed's Ulysses attention does not support eager attention, which "
            "needs a mask (ulysses_sp.py)"
        )
        yield Problem(
            message=message, where="job.attention", hint="use `--attention sdpa` or `flash-attn-2`"
        )
    elif job.attention not in HEADED or job.unsloth:
        message = "Ulysses attention supports SDPA and flash-attn only"
        yield Problem(message=message, where="job.attention", hint="use `--attention sdpa`")
    if not job.training:
        yield Problem(
            message="Ulysses attention supports training only",
            where="use cp",
            hint="`tp`",
        )
    if job.seq % cp.size:
        yield Problem(
            message=f"{cp.size} ranks do not divide {job.seq} tokens",
            where="job.seq",
            hint="every rank needs the same number of tokens",
        )


def of_deepspeed(program: Program, cp: CP) -> Iterator[Problem]:
    job = program.job
    if not job.hugging:
        yield Problem(
            message=f"not supported yet: Ulysses attention of {job.framework}",
            where="use cp",
            hint="use `transformers` or `megatron`",
        )
        return
    yield from by_heads(job, program.strategy)
    mixers = {mixer for mixer in program.model.mixers if isinstance(mixer, (Attention, Latent))}
    for one in mixers:
        if (
            isinstance(one, Latent)
            or 0 < one.window < job.seq
            or len(one.project) != 3
            or "sdpa" not in one.kernels
        ):
            message = (
                "not supported yet: Ulysses attention of the family "
                f"`{program.model.family}` as it is here"
            )
            yield Problem(message=message, where="use cp", hint=TRACE)
            return
        if one.heads % cp.size or (one.kv_heads % cp.size and cp.size % one.kv_heads):
            message = (
                f"{cp.size} ranks do not divide {one.heads} query and {one.kv_heads} "
                "key/value heads"
            )
            yield Problem(
                message=message,
                where="use cp",
                hint="use a size that divides both, or a multiple of the key/value heads",
            )
        if job.evaluate and one.heads == cp.size > one.kv_heads and job.attention not in PACKAGES:
            message = (
                f"evaluation fails: {cp.size} ranks leave one query head per group, and "
                "DeepSpeed keeps that setting in the model (0.19.8 ulysses_sp.py "
                "`module.num_key_value_groups`)"
            )
            yield Problem(
                message=message,
                where="job.evaluate",
                hint="use `flash-attn-2`, a smaller `cp`, or remove `evaluate`",
            )


def of_torch(program: Program, cp: CP) -> Iterator[Problem]:
    """torch's ring attention as accelerate and the Trainer have it (torch 2.13
    distributed/tensor/experimental/_context_parallel)."""
    job, strategy = program.job, program.strategy
    heads = {mixer.head % 8 for mixer in program.model.attentions}
    windows = {mixer.window for mixer in program.model.attentions}
    written_out = any(
        isinstance(mixer, Attention) and "sdpa" not in mixer.kernels
        for mixer in program.model.mixers
    )
    wrong = (
        (not job.hugging, f"of {job.framework}", "use `--framework megatron`"),
        (not job.training, "of inference", "remove it"),
        (
            strategy.fsdp is None
            or strategy.fsdp.version == 1
            or any(strategy.size(name) > 1 for name in ("ddp", "tp", "pp", "zero")),
            "with layouts other than FSDP2",
            "`cp=2 fsdp=4`",
        ),
        (
            job.attention not in ("sdpa", "flash", "eager", *PACKAGES) or bool(job.unsloth),
            "other than SDPA's flash attention",
            "use `--attention sdpa`",
        ),
        (
            any(0 < window < job.seq for window in windows) or heads != {0} or written_out,
            f"of the family `{program.model.family}` in this configuration",
            TRACE,
        ),
    )
    for one, what, hint in wrong:
        if one:
            yield Problem(
                message=f"not supported yet: context parallelism {what}", where="use cp", hint=hint
            )
    yield from by_sdpa(job)
    if job.attention not in ("eager", *PACKAGES) and element(program) != 2:
        grouped = any(mixer.heads != mixer.kv_heads for mixer in program.model.attentions)
        message = (
            (
                "fp32 queries with grouped heads use SDPA's math kernel, where torch "
                "fails on a plain mask and a DTensor (torch 2.13 "
                "ATen/native/transformers/attention.cpp)"
            )
            if grouped
            else "not supported yet: ring attention by another kernel than flash"
        )
        yield Problem(
            message=message,
            where="use cp",
            hint=(
                "use a 16-bit `--precision`; with quantized weights also "
                "`--no-prepare-kbit`, as TRL does"
            ),
        )
    if job.seq % (2 * cp.size):
        message = f"{2 * cp.size} chunks do not divide {job.seq} tokens"
        yield Problem(
            message=message,
            where="job.seq",
            hint="every rank needs two chunks of each sequence",
        )


def by_sdpa(job: Job) -> Iterator[Problem]:
    """For both producers."""
    if job.attention in ("eager", *PACKAGES):
        message = (
            "the Trainer supports context parallelism with SDPA attention only "
            "(transformers 5.23 trainer.py)"
        )
        yield Problem(
            message=message,
            where="job.attention",
            hint="use `--attention sdpa`, or `style=ulysses` with `zero` for flash-attn",
        )


def used(program: Program) -> bool:
    return program.strategy.cp is not None


TECHNIQUE = Technique(
    name="context parallel",
    order=150,
    cite=(
        "TransformerEngine 2.11 pytorch/attention/dot_product_attention/context_parallel.py; "
        "megatron-core 0.16.1"
    ),
    apply=lambda program: program,
    check=check,
    layout="cp",
    overlays=(
        Overlay(
            module="memfit.parallel.context.ring",
            applies=used,
        ),
        Overlay(
            module="memfit.parallel.context.ulysses",
            applies=used,
        ),
    ),
)
