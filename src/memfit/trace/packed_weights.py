"""Weights that stay as their checkpoint stores them: fp8 by transformers' own modules around
kernels that only allocate, other formats by stand-ins that keep the bytes of `formats`.

What a stand-in makes forward and backward is what `lower.stored` says, with its sources.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from memfit.errors import InputError
from memfit.formats import FORMATS, Format
from memfit.model.quantized import format_at, method, settings_in
from memfit.trace import versions
from memfit.trace.cuda import patched

PROBE = "layers.999999.probe"  # a layer that no list names
BLOCK = 128  # values of an input that share an fp8 scale
FEW = {"gptq": 50, "awq": 1023}  # rows up to which the kernel takes the weight as it is packed
FP8 = torch.float8_e4m3fn
SETTINGS = (
    "activation_scheme",
    "weight_block_size",
    "modules_to_not_convert",
    "modules_to_convert",
    "scale_fmt",
    "expert_dtype",
)


def pack(model: Any, config: Mapping[str, Any], *, trains: bool) -> None:
    """Give the model's weights the format of `quantization_config`. Packed experts pass no
    gradients on, so that nothing trains over them here."""
    settings = settings_in(config)
    if fine(config):
        experts = {"expert_dtype": config["expert_dtype"]} if config.get("expert_dtype") else {}
        fine_grained(model, {**experts, **settings})
    else:
        if trains and any(path.endswith(".experts") for path, _ in model.named_modules()):
            message = f"a trace cannot train on experts quantized by `{method(config)}`"
            raise InputError.one(
                message,
                where="config.quantization_config",
                hint="use the 16-bit checkpoint",
            )
        by_format(model, settings)
    for one in model.parameters():
        one.requires_grad_(False)


def fine_grained(model: Any, settings: Mapping[str, Any]) -> None:
    """transformers' own modules in the place of linear layers and experts."""
    import inspect

    from transformers import FineGrainedFP8Config
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    known = inspect.signature(FineGrainedFP8Config.__init__).parameters
    given = {name: settings[name] for name in SETTINGS if name in settings and name in known}
    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(**given), pre_quantized=True)
    quantizer._process_model_before_weight_loading(model)


@contextlib.contextmanager
def installed(name: str) -> Iterator[None]:
    """Kernels replaced by what they allocate: Triton's of fp8 (DeepGEMM's are not loaded), and
    products with packed experts."""
    if not name:
        yield
        return
    from transformers.integrations import finegrained_fp8 as fp8
    from transformers.integrations import moe

    kernels = fp8.FineGrainedFP8(
        matmul=matmul, batched_matmul=batched_matmul, grouped_matmul=grouped_matmul
    )
    changes = [
        (fp8, "_FINEGRAINED_FP8", kernels),
        (fp8, "is_deepgemm_loadable", lambda *_: False),
        (moe, "_grouped_linear", of_packed(moe._grouped_linear)),
        (moe, "_batched_linear", of_packed(moe._batched_linear)),
    ]
    with patched(changes):
        yield


def of_packed(true: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The product of rows with experts, whose weights may be packed."""

    def product(
        x: torch.Tensor, weight: torch.Tensor, *args: Any, is_transposed: bool = False, **rest: Any
    ) -> torch.Tensor:
        if weight.dtype not in (torch.uint8, FP8):
            return true(x, weight, *args, is_transposed=is_transposed, **rest)
        held = quantized_rows(x)
        outputs = weight.shape[2 if is_transposed else 1]
        out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
        del held
        return out if rest.get("bias") is None else out.add_(rest["bias"])

    return product


def quantized_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The input in fp8 and its scales, which DeepGEMM's `per_token_cast_to_fp8` makes."""
    rows, width = x.numel() // max(1, x.shape[-1]), x.shape[-1]
    scales = torch.empty((rows, -(-width // BLOCK)), dtype=torch.float32, device=x.device)
    return torch.empty(x.shape, dtype=FP8, device=x.device), scales


def matmul(
    x: torch.Tensor, weight: torch.Tensor, scale: Any, block: Any, kind: torch.dtype, **_: Any
) -> torch.Tensor:
    held = quantized_rows(x)
    out = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=kind, device=x.device)
    del held
    return out


def batched_matmul(x: torch.Tensor, weight: torch.Tensor, scale: Any, **_: Any) -> torch.Tensor:
    return matmul(x, weight[0], scale, None, x.dtype)


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, scale: Any, **_: Any) -> torch.Tensor:
    return matmul(x, weight[0], scale, None, x.dtype)


def by_format(model: Any, settings: Mapping[str, Any]) -> None:
    """Stand-ins for the linear layers of the language model, and packed experts."""
    for path, module in list(model.named_modules()):
        linear = type(module) is torch.nn.Linear
        if not linear and not path.endswith(".experts"):
            continue
        name = format_at(path, settings)
        if name is None:
            message = f"the format of `{path}` is unknown"
            raise InputError.one(message, where="config.quantization_config")
        if name and linear:
            parent, _, own = path.rpartition(".")
            setattr(model.get_submodule(parent), own, StoredLinear(module, FORMATS[name]))
        elif name:
            pack_experts(module, FORMATS[name])


def pack_experts(module: torch.nn.Module, format: Format) -> None:
    """A stack of matrices as bytes: values along the inputs packed, scales beside them. Grouped
    products read their other sizes alone."""
    for name, weight in list(module.named_parameters(recurse=False)):
        if weight.dim() != 3:
            continue
        if format.block == 1:
            setattr(module, name, frozen(torch.empty_like(weight, dtype=FP8)))
            continue
        axis = 1 if getattr(module, "is_transposed", False) else 2
        values = list(weight.shape)
        values[axis] //= 2
        packed = torch.empty(values, dtype=torch.uint8, device=weight.device)
        rest = format.bytes(weight.numel()) - packed.numel()
        setattr(module, name, frozen(packed))
        scales = torch.empty((rest,), dtype=torch.uint8, device=weight.device)
        module.register_parameter(f"{name}_scales", frozen(scales))


def frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


class StoredLinear(torch.nn.Linear):
    """A linear layer whose weight is bytes."""

    def __init__(self, source: torch.nn.Linear, format: Format) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = source.in_features, source.out_features
        device = source.weight.device
        sizes = format.tensors(source.weight.numel(), source.in_features)
        values, *rest = (torch.empty((size,), dtype=torch.uint8, device=device) for size in sizes)
        self.weight = frozen(values)
        for place, tensor in enumerate(rest):
            self.register_parameter(f"beside_{place}", frozen(tensor))
        self.bias, self.method = source.bias, format.name.partition("-")[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (self.out_features, self.in_features)
        out: torch.Tensor = StoredProduct.apply(x, self.weight, shape, self.method)
        return out if self.bias is None else out + self.bias


class StoredProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, shape: tuple[int, int], method: str
    ) -> torch.Tensor:
        ctx.shape = shape
        rows = x.numel() // max(1, x.shape[-1])
        unpacks = method == "int4" or (
            method in FEW and (rows > FEW[method] or ctx.needs_input_grad[0])
        )
        held: Any = None
        if unpacks:
            held = torch.empty(shape, dtype=x.dtype, device=x.device)
        elif method not in FEW:
            held = quantized_rows(x)
        out = torch.empty((*x.shape[:-1], shape[0]), dtype=x.dtype, device=x.device)
        del held
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weight = torch.empty(ctx.shape, dtype=gradient.dtype, device=gradient.device)
        return gradient @ weight, None, None, None


def trains(config: Mapping[str, Any]) -> bool:
    """Whether adapters may be trained over such weights here."""
    return method(config) in ("fp8", "gptq", "awq", "compressed-tensors")


def known(config: Mapping[str, Any]) -> bool:
    """Whether the format is one that is run here."""
    if fine(config):
        return versions.TRANSFORMERS >= (5, 0)
    settings = settings_in(config)
    return bool(settings.get("quantized_layers")) or bool(format_at(PROBE, settings))


def fine(config: Mapping[str, Any]) -> bool:
    """Whether all of it is fp8 as transformers' own modules have it."""
    return method(config) == "fp8" and not settings_in(config).get("quantized_layers")


__all__ = ["installed", "known", "pack", "trains"]
