"""Stacked experts: which techniques quantize, adapt or shard them, and which do not."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem
from memfit.libraries.peft.check import FUSED, converts
from memfit.model.modules import MoE
from memfit.program import Program
from memfit.strategy import EP
from memfit.techniques.base import Technique
from memfit.techniques.separate_experts import STACKED


def check(program: Program) -> Iterator[Problem]:
    found = program.model.mixtures
    if not found:
        return
    spread = program.strategy.size("ep") > 1
    yield from (
        megatron(program)
        if program.engine
        else shared_out(program)
        if spread
        else routed(program, found)
    )
    if any(one.each for one in found):
        return
    if program.quant is not None and not any(one.format for one in found):
        yield from unpacked(program)
    if program.adapter is not None:
        yield from adapted(program)


def routed(program: Program, found: list[MoE]) -> Iterator[Problem]:
    """Grouped products hold the same whatever the shares; only the backward of fp8 stacks takes a
    part of the experts at a time, with the rows that went to them (transformers 5.23
    integrations/moe.py, finegrained_fp8.py FP8GroupedMatmulFunction)."""
    job, where = program.job, "job.router_skew"
    each = any(one.each for one in found)
    counts = each or (job.training and any(one.format.startswith("float8") for one in found))
    if job.router_skew != 1 and not counts:
        message = (
            "`router_skew` has no effect here: grouped expert matmuls use the same "
            "memory for any load"
        )
        yield Problem(message=message, where=where, level="note")
    elif job.router_skew == 1:
        message = "assumes equal tokens per expert"
        hint = (
            "`--router-skew 2` doubles the busiest expert's tokens"
            if counts
            else "other loads use the same memory"
        )
        yield Problem(message=message, where=where, hint=hint, level="note")


def megatron(program: Program) -> Iterator[Problem]:
    """What Megatron's dispatchers can do, and what they hold where tokens are not balanced
    (megatron-core 0.16.1 transformer_config.py, transformer/moe/token_dispatcher.py)."""
    ep, where = program.strategy.ep or EP(size=1), "use ep.imbalance"
    if ep.dispatcher == "flex":
        message = (
            "not supported yet: dispatcher `flex` (DeepEP's buffers are outside torch's allocator)"
        )
        yield Problem(
            message=message, where="use ep.dispatcher", hint="use `alltoall` or `allgather`"
        )
    if ep.padded and not ep.capacity:
        yield Problem(
            message="experts are already padded to a capacity",
            where="use ep.padded",
            hint="`capacity=1`",
        )
    if ep.padded and ep.imbalance > 1:
        yield Problem(
            message="padded experts all get the same number of rows", where=where, hint="remove it"
        )
    if ep.tensor and ep.size == 1:
        message = "expert matrices are sharded by `tp`"
        yield Problem(message=message, where="use ep.tensor", hint="remove it")
    if program.job.router_skew != 1:
        message = "the busiest rank counts here, not the busiest expert"
        yield Problem(
            message=message,
            where="job.router_skew",
            hint="use `--use ep=8,imbalance=1.5`",
            level="note",
        )
    if not ep.padded:
        yield from shared_out(program)


def shared_out(program: Program) -> Iterator[Problem]:
    """Experts over several ranks: the one told of may get more than its share."""
    ep = program.strategy.ep
    if ep is None or ep.imbalance == 1:
        message = "assumes equal tokens per rank"
        yield Problem(
            message=message,
            where="use ep.imbalance",
            hint="`imbalance=1.5` gives this rank 1.5 times the average",
            level="note",
        )


def unpacked(program: Program) -> Iterator[Problem]:
    """bitsandbytes packs linear layers and nothing else (transformers 5.23
    integrations/bitsandbytes.py replace_with_bnb_linear); PEFT's preparation then takes the stacks
    for leftovers."""
    model, quant = program.model, program.quant
    assert quant is not None
    values = sum(weight.count for weight in model.weights() if weight.role == "expert")
    share = f"the experts, {100 * values // max(1, model.parameters)} % of the parameters"
    if program.job.version("transformers") < STACKED and model.family in FUSED:
        message = (
            "not supported yet: experts packed one by one, as transformers before 5 kept them: "
            f"{share}, are counted as they are"
        )
        yield Problem(
            message=message,
            where="job.versions",
            hint="transformers 5 or newer keeps them in stacks",
            level="warning",
        )
        return
    kept = (
        "are cast to fp32 by prepare_model_for_kbit_training"
        if quant.prepared
        else f"stay in {program.weights}"
    )
    hint = (
        "`--no-prepare-kbit` keeps them as they are"
        if quant.prepared
        else "use a checkpoint that stores them quantized, or remove `quant`"
    )
    message = f"bitsandbytes does not quantize stacked experts: {share}, {kept}"
    yield Problem(message=message, where="job.quant", hint=hint, level="warning")


def adapted(program: Program) -> Iterator[Problem]:
    adapter, model, job = program.adapter, program.model, program.job
    assert adapter is not None
    if not adapter.everywhere:
        return
    if not converts(job) and model.family in FUSED:
        message = (
            "not supported yet: adapters on each expert by itself, as transformers before 5 kept "
            "them: the experts get none here"
        )
        yield Problem(
            message=message,
            where="job.versions",
            hint="transformers 5 and peft 0.19 or newer adapt the stacks",
            level="warning",
        )
    else:
        message = (
            "the experts get no adapters: they are stacked, and `all-linear` covers "
            "linear layers only"
        )
        yield Problem(
            message=message,
            where="job.targets",
            hint=("PEFT's `target_parameters` would adapt them; memfit does not support it yet"),
            level="note",
        )


TECHNIQUE = Technique(
    name="experts",
    order=220,
    cite="transformers 5.23 integrations/moe.py; peft 0.21 utils/transformers_weight_conversion.py",
    wanted=lambda job: True,
    apply=lambda program: program,
    check=check,
)
