"""The real model of a Case on a real device, with random weights, and the trace's own loops over
it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from memfit.errors import raise_errors
from memfit.job import Job
from memfit.measure import loading, real
from memfit.measure.meter import Meter
from memfit.measure.record import Case
from memfit.parallel.fsdp2.check import resolved
from memfit.trace import cuda, inputs, kernels_of, ranks, stages, trl
from memfit.trace.program import Options, count, prepared, quiet, ways_of
from memfit.trace.spread import Spread


def perform(case: Case, device: torch.device, meter: Meter) -> dict[str, Any]:
    """Load, then steps or answers; what there is to say of the model."""
    recorder: Any = meter  # what stands in its place
    job = trl.settled(case.job)
    raise_errors(real.refusals(case, device))
    torch.manual_seed(0)
    strategy = resolved(case.strategy, job)
    with quiet():
        trl.load(job)
    with quiet(), kernels_of.forced(job.attention), ranks.group(strategy, device.type) as mesh:
        meter.mark("load")
        kind, model = loading.empty(case.config, job, device)
        plan = inputs.plan(model, kind, job, device.type)
        with (
            real.kernels(model, job),
            cuda.patched([] if strategy.pp is None else stages.settled(recorder)),
        ):
            spread = Alone(strategy, mesh, job.autocast)
            model, found = placed(model, kind, job, spread, meter)
            options = Options(
                steps=case.steps,
                decode_all=True,
                spread=spread,
                strategy=strategy,
                device=device.type,
                optimizer=real.optimizer_of,
            )
            run(meter, model, job, options, plan)
    return found


def placed(
    model: Any, kind: str, job: Job, spread: Spread, meter: Meter
) -> tuple[Any, dict[str, int]]:
    """The model on the device as what trains, and its sizes. Where a rank holds less than the
    whole, it is cut before it arrives; FSDP1 cuts what is there."""
    total = count(model.parameters())
    flat = spread.strategy.fsdp is not None and spread.strategy.fsdp.version == 1
    early = spread.cuts and not flat
    if early:
        model = spread.cut(prepared(spread.split(model), job, kind, "meta"))
    loading.arrive(model, job, meter.device)
    if not early:
        model = prepared(model, job, kind, meter.device.type)
    trained = count(one for one in model.parameters() if one.requires_grad) if job.training else 0
    return spread.cut(model) if flat else model, {"parameters": total, "trainable": trained}


def run(meter: Any, model: Any, job: Job, options: Options, plan: inputs.Plan) -> None:
    """The trace's loops; `meter` stands in its recorder's place."""
    _, act = ways_of(job, options.strategy)
    if not job.training:
        watch(model, meter)
    act(meter, model, job, options, plan)


class Alone(Spread):
    """One rank without its neighbours. The fake group's all-reduce has no result, which DDP waits
    for; torch's own hook has one."""

    def wrapped(self, model: Any) -> Any:
        found = super().wrapped(model)
        if isinstance(found, torch.nn.parallel.DistributedDataParallel):
            from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

            found.register_comm_hook(None, noop_hook)
        return found


def watch(model: Any, meter: Meter) -> None:
    """The first pass of an answer is its prefill, all later ones are its decoding."""
    forward = model.forward

    @functools.wraps(forward)
    def told(*values: Any, **named: Any) -> Any:
        if meter.phase in ("prepare", "prefill"):
            meter.mark("prefill" if meter.phase == "prepare" else "decode")
        return forward(*values, **named)

    model.forward = told
