"""The real packages in place of the trace's stand-ins: optimizers, kernels, and what cannot run on
this machine."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from memfit.errors import Problem
from memfit.job import Job
from memfit.libraries.trl import check as own_heads
from memfit.measure.record import Case
from memfit.optimizers import OPTIMIZERS
from memfit.trace import liger, optimizers, ranks, stored, trl
from memfit.trace.program import ATTENTION, DTYPES

TORCHAO = ("adamw_torch_8bit", "adamw_torch_4bit")
FLASH = {
    "flash-attn-2": "flash_attn",
    "flash-attn-3": "flash_attn_interface",
}  # packages with kernels


def optimizer_of(model: Any, job: Job) -> Any:
    """Packages' own classes, as the Trainer makes them; torch's, transformers' and PEFT's are those
    that the trace runs."""
    name = OPTIMIZERS.find(job.optimizer).name
    if name in optimizers.BITSANDBYTES:
        return of_bitsandbytes(name, model)
    return (
        optimizers.of_trainer(name, model)
        if name in TORCHAO
        else optimizers.optimizer_of(model, job)
    )


def of_bitsandbytes(name: str, model: Any) -> Any:
    """Eight-bit states of embeddings stay in 32 bits (transformers 5.23 trainer.py
    `create_optimizer`)."""
    made = optimizers.of_trainer(TRAINERS.get(name, name), model)
    if made.args.optim_bits == 8:
        manager = importlib.import_module("bitsandbytes.optim").GlobalOptimManager.get_instance()
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                manager.register_module_override(module, "weight", {"optim_bits": 32})
    return made


TRAINERS = {"paged_adamw": "paged_adamw_32bit"}  # names that differ


def package_of(name: str) -> str:
    """The module that an optimizer is imported from, beside torch, transformers and PEFT; empty
    where nobody runs it for real."""
    if name in optimizers.BITSANDBYTES:
        return "bitsandbytes"
    if name in TORCHAO:
        return "torchao"
    return optimizers.PACKAGES.get(name.partition("_")[0], ("", ""))[0]


@contextlib.contextmanager
def kernels(model: Any, job: Job) -> Iterator[None]:
    """Liger's, with the Triton that is installed."""
    with liger.applied(model, job, contextlib.nullcontext):
        yield


def there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def refusals(case: Case, device: torch.device) -> Iterator[Problem]:
    """What cannot be run for real here, all at once."""
    job = case.job
    if not job.hugging:
        yield Problem(
            message=f"`memfit measure` runs transformers' code, not `{job.framework}`",
            where="job.framework",
            hint="use `transformers`",
        )
    known = [one for one in DTYPES if one != "bf16-master"]
    if job.precision not in known:
        yield Problem(
            message=f"precision `{job.precision}` cannot be measured",
            where="job.precision",
            hint="one of " + ", ".join(known),
        )
    if job.unsloth:
        yield Problem(
            message="Unsloth's kernels cannot be measured yet",
            where="job.unsloth",
            hint="remove it, or use `memfit estimate`",
        )
    there_is = device.type == "cuda" and torch.cuda.is_available()
    if name := stored.kept(
        case.config, job, torch.cuda.get_device_capability(device) if there_is else None
    ):
        message = (
            f"weights quantized by `{name[:40]}` cannot be measured: random weights are 16-bit"
        )
        yield Problem(
            message=message,
            where="config.quantization_config",
            hint="use `--quant nf4` or `int8`, or `memfit estimate`",
        )
    if job.quantization != "none" and not there("bitsandbytes"):
        yield missing("quantized weights are", "bitsandbytes", "bitsandbytes", "job.quant")
    if (
        not job.training
        and job.cache == "quantized"
        and not there("optimum.quanto" if there("optimum") else "optimum")
    ):
        yield missing("a quantized cache is", "optimum-quanto", "optimum-quanto", "job.cache")
    if job.training:
        yield from trained(job, device)
    yield from attending(job, device)
    yield from ranks.refusals(job, case.strategy)
    yield from spread(case, device)


def trained(job: Job, device: torch.device) -> Iterator[Problem]:
    """Optimizers and losses."""
    name = OPTIMIZERS.find(job.optimizer).name
    package = package_of(name)
    if package and not there(package):
        installed = optimizers.PACKAGES.get(name.partition("_")[0], (package, package))[1]
        yield missing(f"optimizer `{job.optimizer}` is", installed, installed, "job.optimizer")
    elif not package and name not in (*optimizers.TORCH, *optimizers.OWN):
        yield Problem(
            message=f"optimizer `{job.optimizer}` cannot be measured yet",
            where="job.optimizer",
            hint="use an optimizer of torch, transformers, PEFT or bitsandbytes",
        )
    if name in TORCHAO and device.type == "cpu":
        yield Problem(
            message=f"optimizer `{job.optimizer}` can only be measured on a GPU",
            where="job.optimizer",
            hint="`adamw`",
        )
    yield from own_heads.refusals(job)
    yield from trl.missing(job)
    if liger.wanted(job):
        where = "job.liger" if job.liger else "job.loss"
        if device.type == "cpu":
            message = "Liger's Triton kernels need a GPU"
            yield Problem(
                message=message,
                where=where,
                hint="use `--loss plain`, or `--framework trl --loss chunked`",
            )
        elif not there("liger_kernel"):
            yield missing("Liger's kernels are", "liger-kernel", "liger-kernel", where)


def missing(what: str, whose: str, package: str, where: str) -> Problem:
    return Problem(
        message=f"{what} {whose}'s, which is not installed",
        where=where,
        hint=f"run `pip install {package}`, or use `memfit estimate`",
    )


def attending(job: Job, device: torch.device) -> Iterator[Problem]:
    if job.attention not in ATTENTION:
        yield Problem(
            message=f"attention `{job.attention}` cannot be measured",
            where="job.attention",
            hint="one of " + ", ".join(ATTENTION),
        )
    elif device.type == "cpu" and job.attention in ("efficient", "cudnn", *FLASH):
        yield Problem(
            message=f"the CPU has no attention kernel `{job.attention}`",
            where="job.attention",
            hint="use `sdpa`, `math` or `eager`",
        )
    elif job.attention in FLASH and not there(FLASH[job.attention]):
        yield missing(
            f"attention `{job.attention}` is", "flash-attn", "flash-attn", "job.attention"
        )


def spread(case: Case, device: torch.device) -> Iterator[Problem]:
    """What one process cannot be a rank of."""
    strategy = case.strategy
    if device.type == "cpu" and strategy.fsdp is not None and strategy.fsdp.version == 1:
        yield Problem(
            message="FSDP1 does not run on the CPU",
            where="use fsdp.version",
            hint="use FSDP2 (`fsdp`)",
        )
    if device.type == "cpu" and strategy.cp is not None:
        yield Problem(
            message="torch does not support context parallelism on the CPU",
            where="use cp",
            hint="measure it on a GPU, or trace it",
        )


__all__ = ["kernels", "optimizer_of", "refusals"]
