"""Composite functions that choose their kernel by device in C++, chosen here as CUDA would:
attention, dropout, rms_norm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import torch
from memfit import kernels
from memfit.trace import cuda, older
from memfit.trace.ops import aten, op

CURRENT: list[cuda.Device] = []
_LIBRARY: list[Any] = []


def install(device: cuda.Device) -> None:
    """Register the choices for meta tensors, once a process; they act for the device installed
    last."""
    CURRENT[:] = [device]
    if _LIBRARY:
        return
    library = torch.library.Library("aten", "IMPL")
    for one, function in (CHOSEN | BACKWARD).items():
        library.impl(one.name().removeprefix("aten::"), function, "AutogradMeta")
    older.supply(library)
    _LIBRARY.append(library)


def acting() -> cuda.Device:
    return CURRENT[0]


def dropout(source: torch.Tensor, probability: float, train: bool) -> torch.Tensor:
    """CUDA keeps a boolean mask, CPUs noise in the input's dtype; everything is dropped by one zero
    (ATen/native/Dropout.cpp, torch 2.13)."""
    if probability == 0 or not train or source.numel() == 0:
        return source
    if probability == 1:
        return source * torch.zeros((), dtype=source.dtype, device=source.device)
    if acting().type == "cuda" and 0 < probability < 1:
        return aten.native_dropout(source, probability, train)[0]
    noise = torch.empty_like(source, memory_format=torch.contiguous_format)
    noise.bernoulli_(1 - probability)
    noise.div_(1 - probability)
    return source * noise


class FusedRMSNorm(torch.autograd.Function):
    """`_fused_rms_norm` is composite wherever a device has no kernel of its own, and then autograd
    takes it apart before anybody sees it; so what autograd does with CUDA's kernel stands here
    (tools/autograd/derivatives.yaml, torch 2.13)."""

    @staticmethod
    def forward(
        ctx: Any,
        source: torch.Tensor,
        weight: torch.Tensor | None,
        shape: list[int],
        eps: float | None,
    ) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, rows = aten._fused_rms_norm(source, shape, weight, eps)
        ctx.save_for_backward(source, weight, rows)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        source, weight, rows = ctx.saved_tensors
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[1]]
        to_source, to_weight = aten._fused_rms_norm_backward(
            gradient, source, ctx.shape, rows, weight, mask
        )
        return to_source, to_weight, None, None


def rms_norm(
    source: torch.Tensor,
    shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """One fused op where the dtypes agree (torch >= 2.9 on CUDA), else the composite in fp32."""
    if (
        acting().type == "cuda"
        and acting().version >= (2, 9)
        and (weight is None or weight.dtype == source.dtype)
    ):
        fused: torch.Tensor = FusedRMSNorm.apply(source, weight, shape, eps)
        return fused
    wide = source.float() if source.dtype in (torch.float16, torch.bfloat16) else source
    variance = wide.pow(2).mean(list(range(-len(shape), 0)), keepdim=True)
    normed = (wide * (variance.add_(eps or torch.finfo(wide.dtype).eps)).rsqrt()).to(source.dtype)
    return normed if weight is None else normed * weight


def softmax(source: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """CUDA widens fp16 to fp32 inside the kernel, bf16 in a copy first
    (ATen/native/SoftMax.cpp)."""
    if acting().type == "cuda" and source.dtype == torch.float16 and dtype == torch.float32:
        return aten._softmax(source, dim, True)
    return aten._softmax(source if dtype is None else source.to(dtype), dim, False)


def log_softmax(source: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    if acting().type == "cuda" and source.dtype == torch.float16 and dtype == torch.float32:
        return aten._log_softmax(source, dim, True)
    return aten._log_softmax(source if dtype is None else source.to(dtype), dim, False)


def take_along_dim(
    source: torch.Tensor, indices: torch.Tensor, dim: int | None = None
) -> torch.Tensor:
    """As the composite does it, without its check that the indices (small, so real) are on the same
    device."""
    if dim is None:
        return aten.gather(source.reshape(-1), 0, indices.reshape(-1))
    sizes = [max(one, two) for one, two in zip(source.shape, indices.shape, strict=True)]
    wide = list(sizes)
    sizes[dim], wide[dim] = source.shape[dim], indices.shape[dim]
    return aten.gather(source.expand(sizes), dim, indices.expand(wide))


def linear(
    source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """A bias that no fused product adds is added in place; under a mode the composite would copy
    (ATen/native/Linear.cpp `linear`)."""
    if bias is None or source.dim() < 3 or source.is_contiguous():
        whole: torch.Tensor = aten.linear.default.decompose(source, weight, bias)
        return whole
    product = torch.matmul(source, weight.t())
    return product + bias if watched() else product.add_(bias)


def watched() -> bool:
    """Whether the program has a dispatch mode of its own beside the recorder (selective checkpoints
    have one): composites then copy where they would write in place (ATen/TensorSubclassLikeUtils.h
    `areAnyTensorSubclassLike`)."""
    return len(_get_current_dispatch_mode_stack()) > 1


def silu_backward(gradient: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """One kernel on CPU and CUDA, a composite of six ops elsewhere (native_functions.yaml, torch
    2.13)."""
    with torch._C._AutoDispatchBelowAutograd():
        return aten.silu_backward(gradient, source)


def mish_backward(gradient: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gradient)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel that the device would choose, by its own op, so that autograd saves what that
    kernel saves."""
    choice = chosen(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if acting().type == "cuda" and choice not in allowed():
        raise RuntimeError("No available kernel. Aborting execution.")
    wide = query.shape[-1] ** -0.5 if scale is None else scale
    if choice == "flash":
        head = query.shape[-1]
        query, key, value = (padded(one) for one in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=wide
        )[0]
        return out[..., :head] if head % 8 else out
    if choice == "efficient":
        bias = prepared(attn_mask, query, key)
        needs = (
            torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
        ) or dropout_p > 0
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs, dropout_p, is_causal, scale=wide
        )[0]
    bias = additive(attn_mask, query)
    if choice == "cudnn":
        needs = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, needs, dropout_p, is_causal, False, scale=wide
        )[0]
    if choice == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=bias, scale=wide
        )[0]
    return math_attention(query, key, value, bias, dropout_p, is_causal, wide, enable_gqa)


def chosen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    grouping: bool,
) -> str:
    """Dense fused kernels want four dimensions and the same batch and heads, but for grouping
    (sdp_utils `check_batch_size_and_num_heads_dense`)."""
    device = acting()
    if (
        query.dim() != 4
        or query.shape[0] != key.shape[0]
        or (query.shape[1] != key.shape[1] and not grouping)
    ):
        return "math"
    if device.type != "cuda":
        fused = (
            dropout == 0
            and query.shape[-1] == value.shape[-1]
            and not (mask is not None and mask.requires_grad)
        )
        return "cpu" if fused and "flash" in allowed() else "math"
    usable = allowed()
    if (
        mask is not None and mask.requires_grad
    ):  # a learned bias: cuDNN's backward gives it no gradient (tools/autograd/derivatives.yaml)
        usable = tuple(one for one in usable if one != "cudnn")
    return kernels.sdpa_backend(
        element=query.element_size(),
        half=query.dtype in (torch.float16, torch.bfloat16),
        head=query.shape[-1],
        value_head=value.shape[-1],
        masked=mask is not None,
        causal=causal,
        query=query.shape[2],
        key=key.shape[2],
        grouped=grouping and query.shape[1] != key.shape[1],
        training=torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value)),
        dropout=dropout,
        capability=device.capability,
        torch=device.version,
        allowed=usable,
    )


def math_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float,
    grouping: bool,
) -> torch.Tensor:
    """The composite: 16-bit inputs in fp32, scaled queries and keys, the bias added in place, and
    the weights cast back beside the result.

    ATen/native/transformers/attention.cpp `_scaled_dot_product_attention_math`, torch 2.13; the op
    itself adds out of place under a mode. Up to torch 2.4 everything stays in 16 bits.
    """
    kind = query.dtype
    half = kind in (torch.float16, torch.bfloat16) and acting().version >= (2, 5)
    half = half and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    if half:
        query, key, value = query.float(), key.float(), value.float()
    root = abs(scale) ** 0.5
    scaled = query * root
    if causal:
        bias = torch.ones(
            (query.shape[-2], key.shape[-2]), dtype=torch.bool, device=query.device
        ).tril()
        bias = additive(bias, query)
    if grouping and query.shape[-3] != key.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    weights = torch.matmul(scaled, key.transpose(-2, -1) * root)
    if bias is not None:
        weights = weights + bias if watched() else weights.add_(bias)
    safe = op("_safe_softmax")  # since torch 2.5
    weights = aten._softmax(weights, -1, False) if safe is None else safe(weights, -1)
    if dropout_p > 0:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    beside = weights.to(
        kind
        # returned with the result, and made first: compilers go through the arguments of a call
        # from the right
    )
    product = torch.matmul(
        weights, value
    )  # a temporary of the last expression, which ends when both are cast
    result = product.to(kind)
    del beside, product
    return result


@contextlib.contextmanager
def forced(attention: str) -> Iterator[None]:
    """Inside, `scaled_dot_product_attention` may take no other backend than the one named, if it is
    one."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    with sdpa_kernel(backends[attention]) if attention in backends else contextlib.nullcontext():
        yield


def allowed() -> tuple[str, ...]:
    """What `torch.nn.attention.sdpa_kernel` and its flags leave open."""
    flags = torch.backends.cuda
    pairs = (
        ("flash", flags.flash_sdp_enabled()),
        ("efficient", flags.mem_efficient_sdp_enabled()),
        ("math", flags.math_sdp_enabled()),
        ("cudnn", flags.cudnn_sdp_enabled()),
    )
    return tuple(name for name, enabled in pairs if enabled)


def padded(tensor: torch.Tensor) -> torch.Tensor:
    short = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, short)) if short else tensor


def additive(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A boolean mask becomes one of the query's dtype (sdp_utils convert_boolean_attn_mask)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=query.dtype, device=query.device), float("-inf"))


def prepared(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """The efficient kernel wants its bias aligned to 16 bytes and expanded (attention.cpp
    pad_bias)."""
    mask = additive(mask, query)
    if mask is None:
        return None
    columns = mask.shape[-1]
    if columns % 8:
        mask = torch.nn.functional.pad(mask, (0, 8 - columns % 8))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def known(**functions: Any) -> dict[Any, Any]:
    """Functions under their operators; `softmax__int` is `softmax.int`."""
    found = {op(name.replace("__", ".")): function for name, function in functions.items()}
    return {one: function for one, function in found.items() if one is not None}


# Under inference_mode the autograd keys are off; these then arrive at the mode whole, which calls
# the function itself.
CHOSEN = known(
    scaled_dot_product_attention=attention,
    dropout=dropout,
    rms_norm=rms_norm,
    softmax__int=softmax,
    log_softmax__int=log_softmax,
    take_along_dim=take_along_dim,
    linear=linear,
)
BACKWARD = known(silu_backward=silu_backward, mish_backward=mish_backward)
