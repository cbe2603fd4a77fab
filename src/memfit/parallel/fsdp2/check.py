"""FSDP: which units are gathered and reduced together, and in which numbers, as the framework that
calls torch has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memfit.errors import Problem
from memfit.job import Job
from memfit.model.modules import MoE
from memfit.optimizers import OPTIMIZERS
from memfit.program import Program
from memfit.strategy import Strategy
from memfit.techniques.base import TRACE, Engines, Technique, flattened

ENDS = (
    1,
    15,
    # accelerate whose embedding, and final norm and head, are units (utils/fsdp_utils.py
    # fsdp2_prepare_model)
)


def resolved(strategy: Strategy, job: Job) -> Strategy:
    """What the framework decides where the user does not. Under accelerate's mixed precision
    weights and reductions are in its dtype, and autocast stays (accelerate 1.15
    utils/dataclasses.py set_mixed_precision, accelerator.py prepare_model); torchtitan reduces in
    fp32 and has no autocast then (torchtitan distributed/fsdp.py)."""
    layout, titan = strategy.fsdp, job.framework == "torchtitan"
    if layout is None:
        return strategy
    autocast = (
        job.precision.replace("autocast", "").strip("-") if "autocast" in job.precision else ""
    )
    param = layout.param_dtype or (autocast if titan or job.hugging else "")
    reduce = layout.reduce_dtype or ("fp32" if titan and param else param)
    ends = titan or (layout.version == 2 and job.hugging and job.version("accelerate") >= ENDS)
    wrap = layout.wrap if layout.wrap != "auto" else "ends" if ends else "layers"
    backward = (
        layout.backward_prefetch
        if layout.backward_prefetch != "auto"
        else "none"
        if job.hugging
        else "pre"
    )
    adapters = layout.adapters if layout.adapters != "auto" else "units" if job.hugging else "layer"
    settled = replace(
        layout,
        param_dtype=param,
        reduce_dtype=reduce,
        wrap=wrap,
        backward_prefetch=backward,
        adapters=adapters,
    )
    return replace(strategy, fsdp=settled)


def apply(program: Program) -> Program:
    autocast = "" if program.job.framework == "torchtitan" else program.autocast
    return program.replace(strategy=resolved(program.strategy, program.job), autocast=autocast)


def check(program: Program) -> Iterator[Problem]:
    layout, job = program.strategy.fsdp, program.job
    assert layout is not None
    if not job.training:
        message = (
            "inference with FSDP gathers every layer for every token, and no formula knows that"
        )
        yield Problem(message=message, where="use fsdp", hint="one GPU, without `use`")
    if job.framework in ("megatron", "litgpt"):
        yield Problem(
            message=f"no formula yet for FSDP under {job.framework}",
            where="use fsdp",
            hint="another `framework`",
        )
    if program.model.stored or job.quant == "int8":
        message = "weights stored as bytes have no shards of their own"
        yield Problem(
            message=message,
            where="use fsdp",
            hint="nf4 with `bnb_4bit_quant_storage` of a float dtype is what PEFT's guide takes",
        )
    if job.precision == "bf16-master":
        yield Problem(
            message="no formula yet for an optimizer's own fp32 copies of shards",
            where="job.precision",
            hint="fp32 with `param-dtype=bf16`",
        )
    if layout.version == 1:
        yield from flat(program)
    if kept := formats(program) - {program.weights}:
        yield from mixed(program, layout.version, kept)
    if layout.version == 2 and job.training and OPTIMIZERS[job.optimizer].low_rank:
        stops = job.optimizer.startswith("apollo")
        yield Problem(
            message=(
                "APOLLO multiplies DTensors with plain tensors, and stops at its first step "
                "(apollo-torch 1.0.3 random_projector.py)"
            )
            if stops
            else "no formula yet for GaLore's decomposition of sharded gradients",
            where="job.optimizer",
            hint="another `optimizer`" if stops else TRACE,
        )
    if layout.version == 2 and job.optimizer == "adafactor":
        message = (
            "transformers' Adafactor mixes tensors and DTensors, and stops at its first step "
            "(5.23 optimization.py)"
        )
        yield Problem(message=message, where="job.optimizer", hint="another `optimizer`")
    if layout.reshard_to and (
        layout.version == 1 or program.strategy.shards % layout.reshard_to or not layout.reshard
    ):
        message = f"{layout.reshard_to} ranks to reshard to, of {program.strategy.shards}"
        yield Problem(
            message=message,
            where="use fsdp.reshard_to",
            hint="a divisor, with FSDP2, and `reshard` left on",
        )


def formats(program: Program) -> set[str]:
    """Of routers that stay as they are whatever the others are cast to (transformers
    `_keep_in_fp32_modules_strict`)."""
    mixers = (block.mixer for layer, _ in program.model.kinds for block in layer.blocks)
    return {
        mixer.router_format for mixer in mixers if isinstance(mixer, MoE) and mixer.router_format
    }


def mixed(program: Program, version: int, kept: set[str]) -> Iterator[Problem]:
    """torch 2.13 _fully_shard/_fsdp_param_group.py _init_mp_dtypes, which asks those that are
    trained alone; _flat_param.py asks all."""
    others = f"routers stay {', '.join(sorted(kept))} beside {program.weights}"
    hint = "`--precision fp32` or `autocast-bf16`, whose weights are alike, or DeepSpeed"
    if version == 1:
        yield Problem(
            message=(
                f"{others}, and FSDP1 flattens one dtype: Must flatten tensors with uniform dtype"
            ),
            where="use fsdp",
            hint=hint,
        )
    elif program.adapter is None:
        yield Problem(
            message=f"{others}: FSDP expects uniform original parameter dtype",
            where="use fsdp",
            hint=f"{hint}, or adapters",
        )


def flat(program: Program) -> Iterator[Problem]:
    """What FSDP1 cannot put into one flat parameter (torch 2.13
    torch/distributed/fsdp/_flat_param.py _validate_tensors_to_flatten)."""
    layout, job = resolved(program.strategy, program.job).fsdp, program.job
    assert layout is not None
    yield from flattened(job)
    if program.quant is not None and program.quant.prepared:
        message = (
            "`prepare_model_for_kbit_training` makes norms fp32, and FSDP1 flattens one "
            "dtype: Must flatten tensors with uniform dtype"
        )
        yield Problem(
            message=message,
            where="job.prepare_kbit",
            hint="leave it away, as TRL does for sharded QLoRA",
        )
    if job.adapters and layout.adapters == "layer" and not layout.orig_params:
        message = (
            "trained adapters and frozen weights share no flat parameter without `use_orig_params`"
        )
        yield Problem(
            message=message,
            where="use fsdp.adapters",
            hint="`adapters=units`, as PEFT's policy has it",
        )


def engine(strategy: Strategy) -> str:
    """FSDP with replicas beside it is one engine."""
    assert strategy.fsdp is not None
    if strategy.fsdp.version == 1:
        return "fsdp1"
    return "fsdp2_stages" if strategy.size("pp") > 1 else "fsdp2"


TECHNIQUE = Technique(
    name="fsdp",
    order=260,
    cite="torch 2.13 torch/distributed/fsdp/; accelerate 1.15 utils/fsdp_utils.py",
    layout="fsdp",
    apply=apply,
    check=check,
    engines=Engines(
        modules={
            "fsdp1": "memfit.parallel.fsdp1.engine",
            "fsdp2": "memfit.parallel.fsdp2.engine",
            "fsdp2_joint": "memfit.parallel.fsdp2.joint",
            "fsdp2_stages": "memfit.parallel.fsdp2.stages",
        },
        choose=engine,
        precedence=4,
    ),
)
