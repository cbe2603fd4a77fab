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
from memfit.trace import inputs, prepare, serve, steps
from memfit.trace.program import DTYPES, Options, loaded, made, quiet

KERNELS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH", "cudnn": "CUDNN_ATTENTION"}


def perform(case: Case, device: torch.device, meter: Meter) -> dict[str, Any]:
    """Load, then steps or answers; what there is to say of the model."""
    job = case.job
    raise_errors(refusals(case, device))
    torch.manual_seed(0)
    with quiet(), forced(job.attention):
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
        if case.world > 1:
            model = sharded(model, case, device)
        options: Any = Options(steps=case.steps, decode_all=True)
        if job.training:
            steps.train(meter, model, job, options, plan)  # type: ignore[arg-type]
        else:
            watch(model, meter)
            serve.infer(meter, model, job, options, plan)  # type: ignore[arg-type]
    return found


def refusals(case: Case, device: torch.device) -> Iterator[Problem]:
    """What cannot be run for real here, all at once."""
    job = case.job
    if job.framework not in ("transformers", "trl"):
        yield Problem(message=f"measuring runs transformers' code, not `{job.framework}`", where="job.framework", hint="use `transformers`")
    if job.precision not in DTYPES:
        yield Problem(message=f"precision `{job.precision}` cannot be measured", where="job.precision", hint="one of " + ", ".join(DTYPES))
    for name, usual in (("loss", "plain"), ("liger", False), ("unsloth", ""), ("merge", False), ("quantization", "none")):
        if getattr(job, name) != usual:
            where = "job.quant" if name == "quantization" else f"job.{name}"
            yield Problem(message=f"`{name}` `{getattr(job, name)}` cannot be measured yet", where=where, hint=f"`{usual}`, or an estimate")
    if job.optimizer.endswith("8bit") or "paged" in job.optimizer or job.optimizer == "lion":
        yield Problem(message=f"optimizer `{job.optimizer}` cannot be measured yet", where="job.optimizer", hint="one of torch's own")
    if device.type == "cpu" and job.attention not in ("sdpa", "eager"):
        yield Problem(message=f"a CPU has no attention kernel `{job.attention}`", where="job.attention", hint="`sdpa` or `eager`")
    if case.world > 1 and (not job.training or job.method != "full"):
        yield Problem(message="one rank of several is measured in full training", where="world", hint="world 1")


@contextlib.contextmanager
def forced(attention: str) -> Iterator[None]:
    """One backend of scaled_dot_product_attention and no other."""
    if attention not in KERNELS:
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, KERNELS[attention])):
        yield


def sharded(model: Any, case: Case, device: torch.device) -> Any:
    """FSDP2 as one of `world` ranks: the process group does nothing, what it would fill is allocated (torch 2.13
    torch/distributed/fsdp/_fully_shard)."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=case.world, store=FakeStore())
    mesh = init_device_mesh(device.type, (case.world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = max((one for one in model.modules() if isinstance(one, torch.nn.ModuleList)), key=len)
    for layer in (*layers, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=case.reshard)
    return model


def watch(model: Any, meter: Meter) -> None:
    """The first pass of an answer is its prefill, all later ones are its decoding."""
    forward = model.forward

    @functools.wraps(forward)
    def told(*values: Any, **named: Any) -> Any:
        if meter.phase in ("prepare", "prefill"):
            meter.mark("prefill" if meter.phase == "prepare" else "decode")
        return forward(*values, **named)

    model.forward = told
