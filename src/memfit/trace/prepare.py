"""Make the built model into the one that trains: frozen parts, adapters, checkpointing, mixed precision, as PEFT and accelerate do it."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from memfit.errors import InputError
from memfit.job import Job


def names(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def trainable(model: Any, job: Job) -> Any:
    """The model with what `job.method` trains; adapters come from PEFT itself."""
    if job.method == "full":
        return model
    if job.method == "freeze":
        wanted = names(job.trainable)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(one in name for one in wanted))
        if not any(one.requires_grad for one in model.parameters()):
            raise InputError.one(f"no parameter's name contains any of `{job.trainable}`", where="job.trainable")
        return model
    return adapted(model, job)


def adapted(model: Any, job: Job) -> Any:
    from peft import LoraConfig, TaskType, get_peft_model

    targets: Any = job.targets if job.targets == "all-linear" else names(job.targets)
    settings = LoraConfig(
        r=job.rank, lora_alpha=job.alpha, lora_dropout=job.dropout, target_modules=targets, modules_to_save=names(job.modules_to_save) or None,
        use_rslora=job.rslora, task_type=TaskType.CAUSAL_LM,
    )  # fmt: skip
    try:
        with torch.device("meta"):
            return get_peft_model(model, settings, autocast_adapter_dtype=job.adapter_dtype == "float32")
    except ValueError as bad:
        raise InputError.one(str(bad).splitlines()[0][:300].rstrip("."), where="job.targets") from None


def checkpointed(model: Any, job: Job) -> None:
    """Gradient checkpointing by the model's own method, with the arguments that its version takes."""
    if job.checkpointing == "none":
        return
    if job.checkpointing == "selective":
        raise InputError.one("transformers has no selective checkpointing", where="job.checkpointing", hint="use `full` or `every`")
    settings = {"use_reentrant": job.reentrant}
    every = job.checkpoint_every if job.checkpointing == "every" else 1
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    try:
        if hasattr(base, "activation_checkpointing_enable"):
            base.activation_checkpointing_enable(settings, every_n_layers=every)
        elif every > 1:
            raise InputError.one("this transformers checkpoints every layer or none", where="job.checkpoint_every", hint="use 1")
        else:
            base.gradient_checkpointing_enable(settings)
    except ValueError as bad:
        raise InputError.one(str(bad)[:200].rstrip("."), where="job.checkpointing") from None
    if job.adapters and job.reentrant and not getattr(base, "_require_grads_hook", None):
        base.enable_input_require_grads()


def mixed(model: Any, job: Job, device: str) -> Any:
    """The callable that runs a forward: under autocast with outputs made fp32, as accelerate wraps it, or the model itself."""
    if not job.autocast:
        return model
    from accelerate.utils.operations import convert_outputs_to_fp32

    dtype = torch.bfloat16 if "bf16" in job.precision else torch.float16
    return convert_outputs_to_fp32(torch.autocast(device, dtype=dtype)(model))


def accepts(model: Any, name: str) -> bool:
    """Whether the forward of the model (under its adapters) takes an argument of that name."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return name in inspect.signature(base.forward).parameters
