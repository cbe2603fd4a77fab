"""The real model of a Case on a real device, with random weights, and the trace's own loops over it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from memfit.errors import Problem, raise_errors
from memfit.measure.meter import Meter
from memfit.measure.record import Case
from memfit.optimizers import OPTIMIZERS
from memfit.trace import inputs, prepare, ranks, serve, steps
from memfit.trace.optimizers import OWN, TORCH
from memfit.trace.program import DTYPES, Options, loaded, made, quiet
from memfit.trace.spread import Spread

KERNELS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH", "cudnn": "CUDNN_ATTENTION"}


def perform(case: Case, device: torch.device, meter: Meter) -> dict[str, Any]:
    """Load, then steps or answers; what there is to say of the model."""
    job = case.job
    raise_errors(refusals(case, device))
    torch.manual_seed(0)
    strategy = case.strategy
    with quiet(), forced(job.attention), ranks.group(strategy, device.type) as mesh:
        meter.mark("load")
        kind, model = made(case.config, job, None, device)
        loaded(model, DTYPES[job.precision])
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what making random weights left behind is not a run's
        plan = inputs.plan(model, kind, job, device.type)
        if job.training:
            model = prepare.trainable(model, job, device.type)
        meter.mark("prepare")
        values = [one.numel() for one in model.parameters()]
        found = {"parameters": sum(values), "trainable": sum(one.numel() for one in model.parameters() if one.requires_grad)}
        spread = Alone(strategy, mesh)
        model = spread.cut(model)
        options: Any = Options(steps=case.steps, decode_all=True, spread=spread)
        if job.training:
            steps.train(meter, model, job, options, plan)  # type: ignore[arg-type]
        else:
            watch(model, meter)
            serve.infer(meter, model, job, options, plan)  # type: ignore[arg-type]
    return found


class Alone(Spread):
    """One rank without its neighbours. The fake group's all-reduce has no result, which DDP waits for; torch's own hook has one."""

    def wrapped(self, model: Any) -> Any:
        found = super().wrapped(model)
        if isinstance(found, torch.nn.parallel.DistributedDataParallel):
            from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

            found.register_comm_hook(None, noop_hook)
        return found


def refusals(case: Case, device: torch.device) -> Iterator[Problem]:
    """What cannot be run for real here, all at once."""
    job = case.job
    if not job.hugging:
        yield Problem(message=f"measuring runs transformers' code, not `{job.framework}`", where="job.framework", hint="use `transformers`")
    known = [one for one in DTYPES if one != "bf16-master"]
    if job.precision not in known:
        yield Problem(message=f"precision `{job.precision}` cannot be measured", where="job.precision", hint="one of " + ", ".join(known))
    for name, usual in (("loss", "plain"), ("liger", False), ("unsloth", ""), ("merge", False), ("quantization", "none")):
        if getattr(job, name) != usual:
            where = "job.quant" if name == "quantization" else f"job.{name}"
            yield Problem(message=f"`{name}` `{getattr(job, name)}` cannot be measured yet", where=where, hint=f"`{usual}`, or an estimate")
    if OPTIMIZERS.find(job.optimizer).name not in (*TORCH, *OWN):
        yield Problem(message=f"optimizer `{job.optimizer}` cannot be measured yet", where="job.optimizer", hint="one of torch's own")
    if device.type == "cpu" and job.attention not in ("sdpa", "eager"):
        yield Problem(message=f"a CPU has no attention kernel `{job.attention}`", where="job.attention", hint="`sdpa` or `eager`")
    if device.type == "cpu" and case.strategy.fsdp is not None and case.strategy.fsdp.version == 1:
        yield Problem(message="FSDP1 does not run on a CPU", where="use fsdp.version", hint="`fsdp` is FSDP2, which does")
    yield from ranks.refusals(job, case.strategy)


@contextlib.contextmanager
def forced(attention: str) -> Iterator[None]:
    """One backend of scaled_dot_product_attention and no other."""
    if attention not in KERNELS:
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, KERNELS[attention])):
        yield


def watch(model: Any, meter: Meter) -> None:
    """The first pass of an answer is its prefill, all later ones are its decoding."""
    forward = model.forward

    @functools.wraps(forward)
    def told(*values: Any, **named: Any) -> Any:
        if meter.phase in ("prepare", "prefill"):
            meter.mark("prefill" if meter.phase == "prepare" else "decode")
        return forward(*values, **named)

    model.forward = told
