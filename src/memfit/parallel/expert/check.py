"""Expert parallelism: a rank's share of the experts, and of each one's matrices. Routers and shared
experts stand on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from memfit.errors import Problem
from memfit.job import Job
from memfit.model.modules import Layer, MoE
from memfit.program import Program
from memfit.strategy import EP, Strategy
from memfit.techniques.base import TRACE, Overlay, Technique
from memfit.techniques.framework import facts_of

PLANNED = (
    5,
    23,
)  # transformers whose experts are reached by `EPImplementation`s (distributed/expert_parallel.py)


def apply(program: Program) -> Program:
    ep = program.strategy.ep
    assert ep is not None
    if any(True for _ in problems(program, ep)):
        return program
    return program.rebuilt(
        lambda layer: share(layer, ep.size, program.strategy.expert_tensor)
    ).replace(spread=True, joint=facts_of(program.job.framework).stacks)


def share(layer: Layer, ranks: int, tensor: int) -> Layer:
    """A rank's part of a layer. Of an expert's matrices the first is split along its outputs, the
    second along its inputs."""
    blocks = tuple(
        replace(
            block,
            mixer=replace(
                block.mixer, local=block.mixer.experts // ranks, width=block.mixer.width // tensor
            ),
        )
        if isinstance(block.mixer, MoE)
        else block
        for block in layer.blocks
    )
    return replace(layer, blocks=blocks)


def check(program: Program) -> Iterator[Problem]:
    ep = program.strategy.ep
    assert ep is not None
    yield from problems(program, ep) if not program.spread else ()


def stacks(program: Program) -> frozenset[str]:
    """Names of the weights of experts, within a layer."""
    return frozenset(
        weight.name
        for mixer in program.model.mixtures
        for weight in mixer.own()
        if weight.role == "expert"
    )


def problems(program: Program, ep: EP) -> Iterator[Problem]:
    """What keeps the experts from being spread. (After that there is nothing left to ask.)"""
    job, strategy = program.job, program.strategy
    if not program.engine:
        if facts_of(job.framework).stacks:
            yield from sent(job, strategy, ep)
        elif not job.hugging:
            hint = "use `transformers`, `torchtitan` or `megatron`"
            yield Problem(
                message=f"not supported yet: expert parallelism of {job.framework}",
                where="use ep",
                hint=hint,
            )
            return
        else:
            yield from planned(job, strategy, ep)
            yield from unwritten(program)
    found = set(program.model.mixtures)
    if not found:
        yield Problem(
            message=f"`{program.model.name}` has no experts",
            where="use ep",
            hint="remove it",
        )
    for one in found:
        if one.experts % ep.size:
            yield Problem(
                message=f"{ep.size} ranks do not divide {one.experts} experts",
                where="use ep",
                hint="use a size that divides them",
            )
        if one.width % strategy.expert_tensor:
            message = (
                f"{strategy.expert_tensor} ranks do not divide {one.width} values of an expert"
            )
            yield Problem(
                message=message, where="use ep.tensor", hint="use a size that divides them"
            )


# Settings that are Megatron's own (megatron-core 0.16.1 transformer_config.py); transformers drops
# no token, and pads none.
MEGATRONS = ("capacity", "padded", "dispatcher", "fused", "aux_loss", "router_dtype")


def planned(job: Job, strategy: Strategy, ep: EP) -> Iterator[Problem]:
    """What transformers' own plan does not do, for both producers (transformers 5.23
    distributed/configuration_utils.py DistributedConfig)."""
    for one in fields(EP):
        if one.name in MEGATRONS and getattr(ep, one.name) != one.default:
            message = "transformers does not drop or pad tokens: this setting is Megatron's"
            yield Problem(message=message, where=f"use ep.{one.name}", hint="remove it")
    if not job.training:
        yield from answering(strategy, ep)
        return
    fsdp = strategy.fsdp
    if (fsdp is None or fsdp.version == 1) and (strategy.size("tp") == 1 or fsdp is not None):
        message = "transformers runs expert parallelism on the ranks of FSDP2"
        yield Problem(
            message=message,
            where="use ep",
            hint=f"use `--use fsdp={max(2, strategy.ranks)},ep={max(2, ep.size)}`",
        )
        return
    beside = [name for name in ("cp", "pp", "zero", "gemini") if strategy.size(name) > 1]
    if beside:
        message = f"not supported yet: transformers' expert parallelism with `{beside[0]}`"
        yield Problem(
            message=message, where="use ep", hint="use it with `fsdp`, and `ddp` for replicas"
        )
    shards, tensor = strategy.size("fsdp") * strategy.size("tp"), strategy.size("tp")
    if not beside and (shards % ep.size or ep.size % tensor):
        multiple = ", or are no multiple of `tp`" if tensor > 1 else ""
        message = (
            f"expert parallel size {ep.size} does not divide the {shards} ranks that "
            f"shard the weights{multiple}"
        )
        yield Problem(message=message, where="use ep", hint=f"`ep={shards}`")
    if strategy.expert_tensor > 1:
        message = "transformers does not shard the matrices of an expert under expert parallelism"
        yield Problem(message=message, where="use ep.tensor", hint=f"`ep={ep.size},tensor=1`")
    if job.router_skew != 1:
        message = "under expert parallelism the busiest rank counts"
        yield Problem(
            message=message,
            where="job.router_skew",
            hint=f"use `--use ep={ep.size},imbalance={job.router_skew:g}`",
        )
    if job.liger:
        yield Problem(
            message="not supported yet: Liger's experts under expert parallelism",
            where="job.liger",
            hint="remove it",
        )


def answering(strategy: Strategy, ep: EP) -> Iterator[Problem]:
    """By inference the ranks of experts are those of tensor parallelism, which have the same tokens
    (AutoEP)."""
    ranks = max(2, strategy.ranks)
    if ep.size != strategy.size("tp") or strategy.ranks != ep.size or strategy.expert_tensor > 1:
        message = (
            "in inference transformers needs expert parallelism on all ranks of "
            "tensor parallelism, without sharding an expert"
        )
        yield Problem(
            message=message, where="use ep", hint=f"use `--use tp={ranks},ep={ranks},tensor=1`"
        )
    if ep.imbalance != 1:
        message = "in inference every rank runs all rows, whichever experts they use"
        yield Problem(message=message, where="use ep.imbalance", hint="remove it")


def sent(job: Job, strategy: Strategy, ep: EP) -> Iterator[Problem]:
    """torchtitan's ranks of experts are among those of FSDP2 (0.3.0 distributed/parallel_dims.py:
    `ep` divides fsdp x cp x tp)."""
    for one in fields(EP):
        if one.name in MEGATRONS and getattr(ep, one.name) != one.default:
            message = (
                "torchtitan's standard dispatcher does not drop or pad tokens: this "
                "setting is Megatron's"
            )
            yield Problem(message=message, where=f"use ep.{one.name}", hint="remove it")
    beside = [
        name
        for name, layout in strategy.uses()
        if name not in ("ep", "fsdp", "ddp") and layout.size > 1
    ]
    if beside or strategy.fsdp is None or strategy.fsdp.version == 1:
        message = "not supported yet: torchtitan's expert parallelism without FSDP2"
        yield Problem(
            message=message,
            where="use ep",
            hint=f"use `--use fsdp={max(2, strategy.ranks)},ep={max(2, ep.size)}`",
        )
    elif strategy.size("fsdp") % ep.size:
        message = (
            f"expert parallel size {ep.size} does not divide the "
            f"{strategy.size('fsdp')} ranks that shard the weights"
        )
        yield Problem(message=message, where="use ep", hint=f"`ep={strategy.size('fsdp')}`")


def unwritten(program: Program) -> Iterator[Problem]:
    """What has no formula of what transformers does."""
    job, model = program.job, program.model
    wrong = (
        (job.version("transformers") < PLANNED, "before transformers 5.23"),
        (any(one.format for one in model.mixtures), "of quantized experts"),
        (
            program.adapter is not None and bool(program.adapter.parameters),
            "with adapters on stacked experts",
        ),
    )
    for one, what in wrong:
        if one:
            yield Problem(
                message=f"not supported yet: expert parallelism {what}", where="use ep", hint=TRACE
            )


TECHNIQUE = Technique(
    name="expert parallel",
    order=120,
    cite="megatron-core 0.16.1 transformer/moe/experts.py TEGroupedMLP, parallel_state.py "
    "(expert groups); "
    "transformers 5.23 distributed/expert_parallel.py",
    apply=apply,
    check=check,
    layout="ep",
    overlays=(
        Overlay(
            module="memfit.parallel.expert.dispatch",
            applies=lambda program: program.strategy.ep is not None,
        ),
    ),
)
