"""DeepSpeed's ZeRO under transformers' Trainer: in which numbers it runs, and what it fills in for
`auto`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memfit.errors import Problem
from memfit.optimizers import OPTIMIZERS
from memfit.program import Program
from memfit.strategy import ZeRO
from memfit.techniques.base import Engines, Technique, flattened

HALF = {"bf16": "bfloat16", "fp16": "float16"}
TOLD = "DeepSpeed's 16-bit training keeps sharded fp32 master weights and runs without autocast"


def apply(program: Program) -> Program:
    """Where bf16 or fp16 is asked for in any way, DeepSpeed casts every parameter to it, adapters
    among them, and its optimizer keeps fp32 partitions of them; accelerate prepares no autocast for
    it (deepspeed 0.19 runtime/engine.py _configure_distributed_model, accelerate 1.15
    accelerator.py _prepare_deepspeed)."""
    assert program.strategy.zero is not None
    half = next((HALF[name] for name in HALF if name in program.job.precision), "")
    changes: dict[str, object] = {
        "autocast": "",
        "master": False,
        "strategy": replace(
            program.strategy, zero=resolved(program.strategy.zero, program.model.width)
        ),
    }
    if half:
        changes["weights"] = half
        if program.quant is not None:
            changes["quant"] = replace(program.quant, narrowed=())
    return program.replace(**changes)


def resolved(zero: ZeRO, width: int) -> ZeRO:
    """What transformers fills in for `auto` (5.23 integrations/deepspeed.py
    trainer_config_finalize)."""
    if (
        zero.stage == 3
    ):  # where nobody says otherwise (deepspeed 0.19 runtime/zero/config.py overlap_comm_valid)
        zero = replace(zero, overlap=True)
    if not zero.auto:
        return zero
    return replace(
        zero,
        reduce_bucket=width * width,
        prefetch_bucket=int(0.9 * width * width),
        persistence=10 * width,
    )


def check(program: Program) -> Iterator[Problem]:
    zero, job = program.strategy.zero, program.job
    assert zero is not None
    if not job.training:
        message = "not supported: inference with ZeRO"
        yield Problem(
            message=message, where="use zero", hint="use `tp` to shard a model for inference"
        )
    if not job.hugging:
        yield Problem(
            message=f"not supported yet: ZeRO under {job.framework}",
            where="use zero",
            hint="use another `--framework`",
        )
    for name in ("tp", "cp", "pp", "ep"):
        if program.strategy.size(name) > 1 and not (
            name == "cp"
            and program.strategy.cp is not None
            and program.strategy.cp.style == "ulysses"
        ):
            yield Problem(
                message=f"not supported yet: ZeRO beside `{name}`",
                where=f"use {name}",
                hint="use `zero` on all ranks",
            )
    if job.training and OPTIMIZERS[job.optimizer].when != "after":
        message = f"`{job.optimizer}` steps during the backward pass, but ZeRO steps after it"
        yield Problem(message=message, where="job.optimizer", hint="use another `--optimizer`")
    if job.training and job.optimizer == "muon":
        message = "not supported: DeepSpeed's Muon, which gathers matrices"
        yield Problem(message=message, where="job.optimizer", hint="use another `--optimizer`")
    yield from flattened(job)
    if program.model.stored:
        yield Problem(
            message="weights stored as bytes cannot be sharded",
            where="use zero",
            hint="use a 16-bit checkpoint",
        )
    if job.precision in ("bf16", "fp16"):
        yield Problem(
            message=TOLD,
            where="job.precision",
            level="note",
            hint="use `bf16-master`, which means the same",
        )
    yield from unserved(zero)


def unserved(zero: ZeRO) -> Iterator[Problem]:
    """Settings without a formula."""
    plus = "hpz" if zero.hpz > 1 else "qwz"
    if (zero.hpz > 1 or zero.qwz) and zero.stage < 3:
        yield Problem(
            message="ZeRO++ applies to the weights that stage 3 gathers",
            where=f"use zero.{plus}",
            hint="`stage=3`",
        )
    if (zero.hpz > 1 or zero.qwz) and zero.offload_param != "none":
        yield Problem(
            message="not supported yet: ZeRO++ beside offloaded weights",
            where=f"use zero.{plus}",
            hint="remove one of them",
        )
    if zero.size % zero.hpz:
        message = f"groups of {zero.hpz} do not divide {zero.size} ranks"
        yield Problem(message=message, where="use zero.hpz", hint="use the number of GPUs per node")
    if zero.qgz:
        message = "not supported: 4-bit gradients, whose kernels' buffers are unknown"
        yield Problem(
            message=message,
            where="use zero.qgz",
            hint=("remove it: buffers for one gradient at a time are smaller than the bucket"),
        )
    if zero.offload_optimizer == "nvme" and zero.stage < 3:
        message = (
            "NVMe offload of states needs stage 3; DeepSpeed's stages 1 and 2 keep "
            "them in CPU memory"
        )
        yield Problem(
            message=message, where="use zero.offload_optimizer", hint="use `cpu`, or `stage=3`"
        )
    if "nvme" in (zero.offload_optimizer, zero.offload_param):
        message = (
            "NVMe offload follows DeepSpeed's source code; its time depends on the "
            "disk and is not predicted"
        )
        yield Problem(message=message, where="use zero.offload_optimizer", level="note")
    if zero.stage < 3 and zero.offload_param != "none":
        yield Problem(
            message="weight offload needs stage 3",
            where="use zero.offload_param",
            hint="`stage=3`",
        )


TECHNIQUE = Technique(
    name="zero",
    order=270,
    cite="deepspeed 0.19.8 runtime/engine.py; transformers 5.23 integrations/deepspeed.py",
    layout="zero",
    apply=apply,
    check=check,
    engines=Engines(
        modules={
            "zero12": "memfit.parallel.zero.stages_1_2",
            "zero3": "memfit.parallel.zero.stage_3",
        },
        choose=lambda strategy: (
            "zero3" if strategy.zero is not None and strategy.zero.stage == 3 else "zero12"
        ),
        precedence=2,
    ),
)
