"""Composite functions that choose their kernel by device in C++, chosen here as CUDA would: attention, dropout, rms_norm."""

from __future__ import annotations

from typing import Any

import torch

from memfit import kernels
from memfit.trace import cuda

aten = torch.ops.aten
CURRENT: list[cuda.Device] = []
_LIBRARY: list[Any] = []


def install(device: cuda.Device) -> None:
    """Register the choices for meta tensors, once a process; they act for the device installed last."""
    CURRENT[:] = [device]
    if _LIBRARY:
        return
    library = torch.library.Library("aten", "IMPL")
    for op, function in (CHOSEN | BACKWARD).items():
        library.impl(op._schema.name.removeprefix("aten::"), function, "AutogradMeta")
    _LIBRARY.append(library)


def acting() -> cuda.Device:
    return CURRENT[0]


def dropout(source: torch.Tensor, probability: float, train: bool) -> torch.Tensor:
    """CUDA keeps a boolean mask, CPUs noise in the input's dtype (ATen/native/Dropout.cpp, torch 2.13)."""
    if probability == 0 or not train or source.numel() == 0:
        return source
    if acting().type == "cuda" and 0 < probability < 1:
        return aten.native_dropout(source, probability, train)[0]
    noise = torch.empty_like(source, memory_format=torch.contiguous_format)
    noise.bernoulli_(1 - probability)
    noise.div_(1 - probability)
    return source * noise


def rms_norm(source: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None) -> torch.Tensor:
    """One fused op where the dtypes agree (torch >= 2.9 on CUDA), else the composite in fp32."""
    if acting().type == "cuda" and acting().torch >= (2, 9) and (weight is None or weight.dtype == source.dtype):
        return aten._fused_rms_norm(source, shape, weight, eps)[0]
    wide = source.float() if source.dtype in (torch.float16, torch.bfloat16) else source
    variance = wide.pow(2).mean(list(range(-len(shape), 0)), keepdim=True)
    normed = (wide * (variance.add_(eps or torch.finfo(wide.dtype).eps)).rsqrt()).to(source.dtype)
    return normed if weight is None else normed * weight


def silu_backward(gradient: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """One kernel on CPU and CUDA, a composite of six ops elsewhere (native_functions.yaml, torch 2.13)."""
    with torch._C._AutoDispatchBelowAutograd():
        return aten.silu_backward(gradient, source)


def mish_backward(gradient: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gradient)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The kernel that `memfit.kernels.sdpa_backend` names, by its own op, so that autograd saves what that kernel saves."""
    device = acting()
    grouped = enable_gqa and query.shape[-3] != key.shape[-3]
    training = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
    if query.dim() != 4:
        choice = "math"
    elif device.type != "cuda":
        choice = "math" if attn_mask is not None and attn_mask.requires_grad else "cpu"
    else:
        choice = kernels.sdpa_backend(
            element=query.element_size(), half=query.dtype in (torch.float16, torch.bfloat16), head=query.shape[-1], value_head=value.shape[-1],
            masked=attn_mask is not None, causal=is_causal, query=query.shape[2], key=key.shape[2], grouped=grouped, training=training,
            dropout=dropout_p, capability=device.capability, allowed=allowed(),
        )  # fmt: skip
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if choice == "flash":
        head = query.shape[-1]
        query, key, value = (padded(one) for one in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :head] if head % 8 else out
    if choice == "efficient":
        bias = prepared(attn_mask, query, key)
        needs = training or dropout_p > 0
        return aten._scaled_dot_product_efficient_attention(query, key, value, bias, needs, dropout_p, is_causal, scale=scale)[0]
    if choice == "cpu":
        bias = additive(attn_mask, query)
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale)[0]
    bias = additive(attn_mask, query)
    return aten._scaled_dot_product_attention_math(query, key, value, bias, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]


def allowed() -> tuple[str, ...]:
    """What `torch.nn.attention.sdpa_kernel` and its flags leave open."""
    flags = torch.backends.cuda
    pairs = (("flash", flags.flash_sdp_enabled()), ("efficient", flags.mem_efficient_sdp_enabled()), ("math", flags.math_sdp_enabled()))
    return tuple(name for name, enabled in pairs if enabled)


def padded(tensor: torch.Tensor) -> torch.Tensor:
    short = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, short)) if short else tensor


def additive(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A boolean mask becomes one of the query's dtype (sdp_utils convert_boolean_attn_mask)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=query.dtype, device=query.device), float("-inf"))


def prepared(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The efficient kernel wants its bias aligned to 16 bytes and expanded (attention.cpp pad_bias)."""
    mask = additive(mask, query)
    if mask is None:
        return None
    columns = mask.shape[-1]
    if columns % 8:
        mask = torch.nn.functional.pad(mask, (0, 8 - columns % 8))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


# Under inference_mode the autograd keys are off and these arrive at the mode whole, which then calls the function itself.
CHOSEN = {aten.scaled_dot_product_attention.default: attention, aten.dropout.default: dropout, aten.rms_norm.default: rms_norm}
BACKWARD = {aten.silu_backward.default: silu_backward, aten.mish_backward.default: mish_backward}
