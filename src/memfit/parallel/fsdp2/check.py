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
        message = "not supported yet: inference with FSDP"
        yield Problem(message=message, where="use fsdp", hint="use one GPU, without `--use`")
    if job.framework in ("megatron", "litgpt"):
        yield Problem(
            message=f"not supported yet: FSDP under {job.framework}",
            where="use fsdp",
            hint="use another `--framework`",
        )
    if program.model.stored or job.quant == "int8":
        message = "weights stored as bytes cannot be sharded"
        yield Problem(
            message=message,
            where="use fsdp",
            hint="use nf4 with a float `bnb_4bit_quant_storage`, as PEFT's guide does",
        )
    if job.precision == "bf16-master":
        yield Problem(
            message="not supported yet: an optimizer's own fp32 copies of shards",
            where="job.precision",
            hint="use fp32 with `param_dtype=bf16`",
        )
    if layout.version == 1:
        yield from flat(program)
    if kept := formats(program) - {program.weights}:
        yield from mixed(program, layout.version, kept)
    if layout.version == 2 and job.training and OPTIMIZERS[job.optimizer].low_rank:
        stops = job.optimizer.startswith("apollo")
        yield Problem(
            message=(
                "APOLLO fails on DTensors at its first step (apollo-torch 1.0.3 "
                "random_projector.py)"
            )
            if stops
            else "not supported yet: GaLore's decomposition of sharded gradients",
            where="job.optimizer",
            hint="use another `--optimizer`" if stops else TRACE,
        )
    if layout.version == 2 and job.optimizer == "adafactor":
        message = (
            "transformers' Adafactor fails on DTensors at its first step (5.23 optimization.py)"
        )
        yield Problem(message=message, where="job.optimizer", hint="use another `--optimizer`")
    if layout.reshard_to and (
        layout.version == 1 or program.strategy.shards % layout.reshard_to or not layout.reshard
    ):
        message = (
            f"`reshard_to={layout.reshard_to}` does not divide {program.strategy.shards} ranks"
        )
        yield Problem(
            message=message,
            where="use fsdp.reshard_to",
            hint="use a divisor of the ranks, FSDP2, and `reshard=yes`",
        )


def formats(program: Program) -> set[str]:
    """Dtypes of routers that are not cast with the rest (transformers
    `_keep_in_fp32_modules_strict`) or that the class creates in another dtype."""
    layers = [layer for layer, _ in program.model.kinds]
    mixers = (block.mixer for layer in layers for block in layer.blocks)
    captured = (one for layer in layers if layer.captured for one in layer.captured.linears())
    return {
        mixer.router_format for mixer in mixers if isinstance(mixer, MoE) and mixer.router_format
    } | {"float32" for one in captured if one.format == "float32"}


def mixed(program: Program, version: int, kept: set[str]) -> Iterator[Problem]:
    """torch 2.13 _fully_shard/_fsdp_param_group.py _init_mp_dtypes, which asks those that are
    trained alone; _flat_param.py asks all."""
    others = f"routers stay {', '.join(sorted(kept))} next to {program.weights}"
    hint = "use `--precision fp32` or `autocast-bf16`, or DeepSpeed"
    if version == 1:
        yield Problem(
            message=(f"{others}, and FSDP1 fails: Must flatten tensors with uniform dtype"),
            where="use fsdp",
            hint=hint,
        )
    elif program.adapter is None:
        yield Problem(
            message=f"{others}: FSDP expects uniform original parameter dtype",
            where="use fsdp",
            hint=f"use {hint}, or adapters",
        )


def flat(program: Program) -> Iterator[Problem]:
    """What FSDP1 cannot put into one flat parameter (torch 2.13
    torch/distributed/fsdp/_flat_param.py _validate_tensors_to_flatten)."""
    layout, job = resolved(program.strategy, program.job).fsdp, program.job
    assert layout is not None
    yield from flattened(job)
    if program.quant is not None and program.quant.prepared:
        message = (
            "`prepare_model_for_kbit_training` casts norms to fp32, and FSDP1 fails: "
            "Must flatten tensors with uniform dtype"
        )
        yield Problem(
            message=message,
            where="job.prepare_kbit",
            hint="remove it, as TRL does for sharded QLoRA",
        )
    if job.adapters and layout.adapters == "layer" and not layout.orig_params:
        message = (
            "adapters and frozen weights cannot share a flat parameter without `use_orig_params`"
        )
        yield Problem(
            message=message,
            where="use fsdp.adapters",
            hint="use `adapters=units`, as PEFT's policy does",
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
