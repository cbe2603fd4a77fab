"""SFTTrainer's own heads, by version: hidden states straight to the loss, a part of the logits at a
time."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.job import Job
from memfit.program import Program
from memfit.techniques.base import Overlay, Technique

OFFERED = (1, 4)  # `loss_type="chunked_nll"` (trl 1.4 trainer/sft_config.py)
USUAL = (1, 6)  # which is the default from here on, but with Liger's kernels
FUSED = (
    1,
    15,
    # `add_fused_lm_head` takes the place of every loss (trl 1.15 trainer/utils.py); both names mean
    # it
)


# Classes without `base_model_prefix`, or with one that names no module of theirs (transformers 5.23
# modeling_llama4.py, modeling_mllama.py)
OWN_BASE = frozenset({"llama4", "llama4_text", "mllama_text_model"})
LARGEST = 2**28  # tokens of a step, each of which would be walked in tiles


def head_of(job: Job) -> str:
    """`plain` (transformers' own), `chunked` or `fused`."""
    if not job.training or job.framework != "trl" or job.loss not in ("plain", "chunked"):
        return "plain"
    version = job.version("trl")
    if version >= FUSED:
        return "fused"
    usual = (
        version >= USUAL and not job.liger
    )  # with `use_liger_kernel` a loss that is not named is Liger's
    return "chunked" if usual or (job.loss == "chunked" and version >= OFFERED) else "plain"


def wanted(job: Job) -> bool:
    return (
        job.training
        and job.hugging
        and (job.loss == "chunked" or head_of(job) != "plain" or job.framework == "trl")
    )


def check(program: Program) -> Iterator[Problem]:
    """Where the head's weight is cut it is whole when the head runs: FSDP gathers it for the norm
    before it, or with the root; ZeRO-3 when the code asks for it, and from then on with the whole
    model; what tensor parallelism cut the code gathers itself (`parallel/tensor`)."""
    job, head = program.job, program.model.head
    yield from refusals(job)
    if head_of(job) != "plain" and (tokens := job.batch * job.reach) > LARGEST:
        yield Problem(
            message=f"{tokens:,} tokens in one step need more memory than any device has",
            where="job.batch",
            hint="a smaller `batch` or `seq`",
        )
    if head_of(job) == "plain":
        return
    if head_of(job) == "fused" and program.model.family in OWN_BASE:
        message = (
            f"TRL's own head fails with `{program.model.family}`, whose `base_model` is itself"
        )
        hint = "use `--framework transformers`, or an older TRL in `--versions`"
        yield Problem(message=message, where="job.framework", hint=hint)
    if not program.model.tied and program.quantized(head, head.name):
        yield Problem(
            message="TRL's loss needs an unquantized head",
            where="job.quant_skip",
            hint="add `lm_head`",
        )
    if program.adapted(head):
        message = (
            "TRL's loss uses the head's weight directly, so an adapter on it would not be trained"
        )
        yield Problem(message=message, where="job.targets", hint=f"remove `{head.name}`")


def refusals(job: Job) -> Iterator[Problem]:
    """Losses that no version of the code has."""
    if job.loss == "chunked" and job.framework == "transformers":
        message = "transformers has no chunked loss; torchtune and TRL have one"
        yield Problem(
            message=message, where="job.loss", hint="use `plain` or `liger`, or `--framework trl`"
        )
    elif job.loss == "chunked" and head_of(job) == "plain":
        yield Problem(
            message="TRL has no chunked loss before 1.4",
            where="job.loss",
            hint="use `plain`, or a newer TRL in `versions`",
        )
    elif job.loss.startswith("liger") and job.version("trl") >= FUSED and job.framework == "trl":
        message = "TRL uses its own fused head instead of Liger's loss"
        yield Problem(
            message=message, where="job.loss", hint="use `plain`, or an older TRL in `versions`"
        )


TECHNIQUE = Technique(
    name="trl",
    order=180,
    cite="trl 1.4 to 1.16 trainer/sft_trainer.py",
    wanted=wanted,
    apply=lambda program: program,
    check=check,
    overlays=(
        Overlay(
            module="memfit.libraries.trl.heads",
            applies=lambda program: head_of(program.job) != "plain",
            order=10,
        ),
    ),
)
