"""A model with random weights on a real device, as `from_pretrained` brings it there: made without
data, and one parameter after the other.

Quantized weights are bitsandbytes' own, packed as they arrive; what a rank of several does not hold
never comes to its GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from memfit.errors import InputError
from memfit.job import Job
from memfit.trace import prepare, versions
from memfit.trace.program import DTYPES, loaded, made

FORMATS = {
    "nf4": {"load_in_4bit": True},
    "fp4": {"load_in_4bit": True},
    "int8": {"load_in_8bit": True},
}
SPREAD = 0.02  # standard deviation of weights, as most configs have their `initializer_range`


def empty(config: Mapping[str, Any], job: Job, device: torch.device) -> tuple[str, Any]:
    """The kind of model, and the model: parameters on the meta device, buffers where they
    belong."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        kind, model = made(config, job, None, device)
    model.tie_weights()  # each name got a parameter of its own
    if job.quantization != "none":
        pack(model, job)
    loaded(model, DTYPES[job.precision])
    return kind, model


def pack(model: Any, job: Job) -> None:
    """Linear layers become bitsandbytes', by transformers' own hand."""
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    compute = (
        DTYPES[job.precision]
        if job.quant_compute == "weights"
        else getattr(torch, job.quant_compute)
    )
    wanted: dict[str, Any] = dict(FORMATS[job.quantization])
    if "load_in_4bit" in wanted:
        wanted |= {
            "bnb_4bit_quant_type": job.quantization,
            "bnb_4bit_use_double_quant": job.double_quant,
            "bnb_4bit_compute_dtype": compute,
        }
    kept = versions.kept_whole(model, prepare.names(job.quant_skip))
    replace_with_bnb_linear(
        model, modules_to_not_convert=kept, quantization_config=BitsAndBytesConfig(**wanted)
    )
    setattr(model, "is_loaded_in_8bit" if job.quantization == "int8" else "is_loaded_in_4bit", True)


def arrive(model: Any, job: Job, device: torch.device) -> None:
    """Every parameter that has no data yet gets some; a tied one once."""
    if job.mapped:
        warm_up(model, device)
    known: dict[int, torch.nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, one in module._parameters.items():
            if one is None or one.device.type != "meta":
                continue
            if id(one) not in known:
                known[id(one)] = arrived(one, DTYPES[job.precision], device, name == "weight")
            module._parameters[name] = known[id(one)]
        if any(one is not None and one.device.type == "meta" for one in module._buffers.values()):
            raise InputError.one(f"`{path}` has a buffer without data", where="model.config")


def arrived(
    one: torch.nn.Parameter, kind: torch.dtype, device: torch.device, weight: bool
) -> torch.nn.Parameter:
    """Quantized weights arrive whole, and go when they are packed (transformers 5.23
    integrations/bitsandbytes.py `convert`)."""
    name = type(one).__name__
    value = torch.empty_like(
        one, device=device, dtype=kind if name in ("Params4bit", "Int8Params") else None
    )
    fill(value, weight)
    if name == "Params4bit":
        return type(one)(value, requires_grad=False, **vars(one)).to(device)
    if name == "Int8Params":
        given = {key: found for key, found in vars(one).items() if key != "SCB"}
        return type(one)(value.to("cpu"), requires_grad=False, **given).to(device)
    return torch.nn.Parameter(value, requires_grad=one.requires_grad)


@torch.no_grad()
def fill(value: torch.Tensor, weight: bool) -> None:
    """Matrices are random, norms are ones; of a tensor that is shared out, this rank's part."""
    part = value.to_local() if hasattr(value, "to_local") else value
    if part.is_floating_point() and part.dim() > 1:
        part.normal_(0.0, SPREAD)
    else:
        part.fill_(1 if weight and part.is_floating_point() else 0)


def warm_up(model: Any, device: torch.device) -> None:
    """transformers' own block as large as what is to come, in the versions that make one."""
    from transformers import modeling_utils

    warmed = getattr(modeling_utils, "caching_allocator_warmup", None)
    if warmed is None or device.type != "cuda":
        return
    places = {
        name: device
        for name, one in (*model.named_parameters(), *model.named_buffers())
        if one.device.type == "meta"
    }
    warmed(
        model,
        places,
        Sizes()
        if any(type(one).__name__ in ("Params4bit", "Int8Params") for one in model.parameters())
        else None,
    )


class Sizes:
    """What the warm-up asks a quantizer (transformers 5.23 quantizers/quantizer_bnb_4bit.py,
    quantizer_bnb_8bit.py): bytes of one value."""

    def param_element_size(self, model: Any, name: str, one: torch.Tensor) -> float:
        return {"Params4bit": 0.5, "Int8Params": 1.0}.get(type(one).__name__, one.element_size())


__all__ = ["arrive", "empty"]
