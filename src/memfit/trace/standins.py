"""bitsandbytes' linear layers without its kernels: the same tensors kept, made and saved, in the
order its Python code makes them.

Read from bitsandbytes 0.50 nn/modules.py, autograd/_functions.py, backends/cuda/ops.py and
functional.py; up to 0.49.2 `Linear4bit` dequantizes in every forward that is not one row without
gradients.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.machinery
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from memfit.trace import imports, packing_cpu

BLOCK = 64  # values per scaling constant
NESTED = 256  # constants per second constant
# up to here the fused kernel always runs; up to 1536 rows it depends on the GPU, and dequantizing
# is assumed
FUSED_ROWS = 4


@dataclass(kw_only=True)
class QuantState:
    """What undoes a 4-bit quantization: the tensors stay alive with the weight."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    code: torch.Tensor
    absmax: torch.Tensor
    offset: torch.Tensor | None = None
    second: torch.Tensor | None = None
    second_code: torch.Tensor | None = None

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (
            one
            for one in (self.code, self.absmax, self.offset, self.second, self.second_code)
            if one is not None
        )


class Params4bit(torch.nn.Parameter):
    """A packed weight; PEFT knows it by its class's name."""

    quant_state: QuantState
    quant_type: str
    compress_statistics: bool

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False, **given: Any) -> Params4bit:
        """What a packed weight knows is given again to the one that takes its place after merging
        (peft 0.21 tuners/lora/bnb.py)."""
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        vars(made).update({"quant_type": "nf4", "compress_statistics": True, **given})
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Params4bit:
        """A copy with what unpacks it, which DoRA takes (peft 0.21 tuners/lora/dora.py;
        bitsandbytes 0.50 nn/modules.py)."""
        known = {name: copy.deepcopy(one, memo) for name, one in vars(self).items()}
        made = Params4bit(self.data.clone(), self.requires_grad, **known)
        memo[id(self)] = made
        return made

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Onto the GPU: packed there, unless it is."""
        device = (
            torch._C._nn._parse_to(*args, **kwargs)[0] if self.dtype.is_floating_point else None
        )
        if device is None:
            return super().to(*args, **kwargs)
        packed, state = quantize_4bit(self.data.to(device), self.compress_statistics)
        return Params4bit(packed, **{**vars(self), "quant_state": state})


class Int8Params(torch.nn.Parameter):
    """An int8 weight with one scale per row."""

    CB: Any = None
    SCB: Any = None
    has_fp16_weights = False

    def __new__(
        cls, data: torch.Tensor, requires_grad: bool = False, has_fp16_weights: bool = False
    ) -> Int8Params:
        return torch.Tensor._make_subclass(cls, data, requires_grad)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device = (
            torch._C._nn._parse_to(*args, **kwargs)[0] if self.dtype.is_floating_point else None
        )
        if device is None:
            return super().to(*args, **kwargs)
        rows, scales = quantize_int8(self.data.to(device=device, dtype=torch.float16))
        made = Int8Params(rows)
        made.CB, made.SCB = made.data, scales
        return made


def quantize_int8(half: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`functional.int8_vectorwise_quant` of a weight: one scale a row."""
    if half.device.type == "cpu":
        return packing_cpu.rows(half)
    scales = torch.empty((half.shape[0],), dtype=torch.float32, device=half.device)
    return torch.empty_like(half, dtype=torch.int8), scales


class State8bit(types.SimpleNamespace):
    """`MatmulLtState`, as far as it lasts."""

    def reset_grads(self) -> None:
        self.CB = self.SCB = None


def quantize_4bit(
    weight: torch.Tensor, nested: bool, storage: torch.dtype = torch.uint8
) -> tuple[torch.Tensor, QuantState]:
    """`functional.quantize_4bit`: packed halves, fp32 constants, and with `nested` those in 8 bits
    around their mean."""
    count, device = weight.numel(), weight.device
    if device.type == "cpu":
        packed, absmax = packing_cpu.four_bits(weight, BLOCK)
    else:
        packed = torch.empty(
            (-(-((count + 1) // 2) // storage.itemsize), 1), dtype=storage, device=device
        )
        absmax = torch.empty((-(-count // BLOCK),), dtype=torch.float32, device=device)
    code = torch.empty((16,), dtype=torch.float32, device=device)
    shape, kind = tuple(weight.shape), weight.dtype
    if not nested:
        return packed, QuantState(shape=shape, dtype=kind, code=code, absmax=absmax)
    offset = absmax.mean()
    shifted = absmax - offset
    if device.type == "cpu":
        small, second = packing_cpu.eight_bits(shifted, NESTED)
    else:
        second = torch.empty((-(-shifted.numel() // NESTED),), dtype=torch.float32, device=device)
        small = torch.empty_like(shifted, dtype=torch.uint8)
    second_code = torch.empty((256,), dtype=torch.float32, device=device)
    return packed, QuantState(
        shape=shape,
        dtype=kind,
        code=code,
        absmax=small,
        offset=offset,
        second=second,
        second_code=second_code,
    )


def dequantized(state: QuantState, kind: torch.dtype) -> torch.Tensor:
    """`functional.dequantize_4bit` and a cast: nested constants are first made fp32, and go when it
    returns."""
    return unpacked(state).to(kind)


def unpacked(state: QuantState) -> torch.Tensor:
    absmax = scales(state)
    return torch.empty(state.shape, dtype=state.dtype, device=absmax.device)


def dequantize_4bit(packed: torch.Tensor, quant_state: QuantState) -> torch.Tensor:
    """`functional.dequantize_4bit`, which merging asks for; nested constants go when it returns."""
    return unpacked(quant_state)


def int8_vectorwise_dequant(rows: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    """`functional.int8_vectorwise_dequant`: a product with the scales, then with 1/127
    (_ops.py)."""
    return rows * stats.view(-1, 1) * 7.874015718698502e-3


def scales(state: QuantState) -> torch.Tensor:
    return (
        state.absmax
        if state.offset is None
        else torch.empty_like(state.absmax, dtype=torch.float32)
    )


class MatMul4Bit(torch.autograd.Function):
    """Keeps the packed weight, an alias, and dequantizes again for the input's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        source: torch.Tensor,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        state: QuantState,
        old: bool,
    ) -> torch.Tensor:
        ctx.state, ctx.biased = state, bias is not None
        return multiplied(source, bias, state, old, True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        grad_bias = (
            gradient.sum(0, dtype=gradient.dtype)
            if ctx.biased and ctx.needs_input_grad[2]
            else None
        )
        result = None
        if ctx.needs_input_grad[0]:
            result = torch.matmul(gradient, dequantized(ctx.state, gradient.dtype))
        return result, None, grad_bias, None, None


def multiplied(
    source: torch.Tensor, bias: torch.Tensor | None, state: QuantState, old: bool, gradients: bool
) -> torch.Tensor:
    """From 0.50 on (`_dequant_linear_fallback`) the constants, with and without their mean, stay
    until the product is made."""
    rows = source.numel() // source.shape[-1]
    fused = rows == 1 and not gradients if old else rows <= FUSED_ROWS
    if fused and source.shape[-1] % BLOCK == 0:
        absmax = scales(state) if old else state.absmax
        return torch.empty(
            (*source.shape[:-1], state.shape[0]), dtype=source.dtype, device=absmax.device
        )
    if old:
        return torch.nn.functional.linear(source, dequantized(state, source.dtype), bias)
    absmax = scales(state)
    shifted = absmax + state.offset if state.offset is not None else absmax
    weight = torch.empty(state.shape, dtype=source.dtype, device=shifted.device)
    return torch.nn.functional.linear(source, weight, bias)


class Linear4bit(torch.nn.Linear):
    """`nn.Linear4bit`: the input is cast to the compute dtype and the output back."""

    weight: Any
    quant_state: QuantState | None = None

    def __init__(
        self, source: torch.nn.Linear, *, nested: bool, kind: str, compute: torch.dtype, old: bool
    ) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = source.in_features, source.out_features
        self.weight, self.bias = source.weight, source.bias
        self.nested, self.kind, self.compute_dtype, self.old = nested, kind, compute, old

    def quantize(self, storage: torch.dtype = torch.uint8) -> None:
        """On the GPU: the full weight is there until its packed form is made. Where it is to be
        sharded, as floats, the layer itself keeps what unpacks it: FSDP puts plain tensors in the
        place of weights."""
        packed, state = quantize_4bit(self.weight.data, self.nested, storage)
        self.quant_state = state if storage.is_floating_point else None
        self.weight = Params4bit(
            packed, quant_state=state, quant_type=self.kind, compress_statistics=self.nested
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.dtype
        x = x.to(self.compute_dtype)
        bias = self.bias
        if bias is not None:
            if bias.dtype != x.dtype:
                bias.data = bias.data.to(x.dtype)
            bias = bias.to(self.compute_dtype)
        state = self.quant_state or self.weight.quant_state
        needs = torch.is_grad_enabled() and (
            x.requires_grad or (bias is not None and bias.requires_grad)
        )
        if needs:
            return MatMul4Bit.apply(x, self.weight, bias, state, self.old).to(kind)
        return multiplied(x, bias, state, self.old, False).to(kind)


class MatMul8bitLt(torch.autograd.Function):
    """int8 product with row and column scales; no outlier columns are assumed. The 16-bit input is
    kept even for a frozen weight."""

    @staticmethod
    def forward(
        ctx: Any,
        source: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scales: torch.Tensor,
    ) -> torch.Tensor:
        shape = source.shape
        if source.dim() == 3:
            source = source.reshape(-1, shape[-1])
        half = source.to(torch.float16)
        stats = torch.empty((half.shape[0],), dtype=torch.float32, device=half.device)
        rows = torch.empty_like(half, dtype=torch.int8)
        outliers = half.abs() >= 6.0
        none = outliers.any()
        del outliers, none, half
        product = torch.empty(
            (source.shape[0], weight.shape[0]), dtype=torch.int32, device=source.device
        )
        out = torch.empty(
            (source.shape[0], weight.shape[0]), dtype=torch.float16, device=source.device
        )  # like a small product it would be real
        if bias is not None and bias.dtype != torch.float16:
            out.add_(bias)
        result = out.to(source.dtype)
        del product, out, rows, stats
        ctx.shape, ctx.kind, ctx.scales, ctx.weight, ctx.biased = (
            shape,
            source.dtype,
            scales,
            weight,
            bias is not None,
        )
        ctx.source = source if any(ctx.needs_input_grad[:2]) else None
        return result.reshape(*shape[:-1], weight.shape[0]) if len(shape) == 3 else result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        grad_bias = (
            gradient.sum(0, dtype=gradient.dtype)
            if ctx.biased and ctx.needs_input_grad[2]
            else None
        )
        if gradient.dim() == 3:
            gradient = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        result = None
        if ctx.needs_input_grad[0]:
            weight = ctx.weight.to(ctx.kind, copy=True).mul_(
                ctx.scales.unsqueeze(1).mul(1.0 / 127.0)
            )
            result = torch.matmul(gradient.to(ctx.kind), weight).view(ctx.shape)
        return result, None, grad_bias, None


class MatMul8bitFp(torch.autograd.Function):
    """What trains on a CPU (`autograd/_functions.py matmul`): the weight is unpacked for the
    product, and its input kept."""

    @staticmethod
    def forward(
        ctx: Any,
        source: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scales: torch.Tensor,
    ) -> torch.Tensor:
        ctx.source, ctx.kind, ctx.shape, ctx.scales, ctx.weight, ctx.biased = (
            source,
            source.dtype,
            source.shape,
            scales,
            weight,
            bias is not None,
        )
        full = weight.data.to(source.dtype).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))
        return torch.nn.functional.linear(source, full, bias)

    backward = MatMul8bitLt.backward


class Linear8bitLt(torch.nn.Linear):
    """`nn.Linear8bitLt` with threshold 6.0, as transformers makes it."""

    weight: Any

    def __init__(self, source: torch.nn.Linear) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = source.in_features, source.out_features
        self.weight, self.bias = source.weight, source.bias
        self.state = State8bit(
            has_fp16_weights=False,
            threshold=6.0,
            memory_efficient_backward=False,
            index=None,
            CB=None,
            SCB=None,
        )
        self.index = None

    def quantize(self) -> None:
        rows, scales = quantize_int8(self.weight.data.to(torch.float16))
        self.weight = Int8Params(rows, requires_grad=False)
        self.weight.SCB = self.state.SCB = scales
        self.state.CB = self.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None and self.bias.dtype != x.dtype:
            self.bias.data = self.bias.data.to(x.dtype)
        product = MatMul8bitFp if self.training and x.device.type == "cpu" else MatMul8bitLt
        return product.apply(x, self.weight, self.bias, self.state.SCB)


FUNCTIONAL = {
    "QuantState": QuantState,
    "dequantize_4bit": dequantize_4bit,
    "int8_vectorwise_dequant": int8_vectorwise_dequant,
}


@contextlib.contextmanager
def installed(model: torch.nn.Module) -> Iterator[None]:
    """Inside, `import bitsandbytes` gives the stand-ins, so that PEFT wraps them with its own
    quantized LoRA layers; a model whose layers are bitsandbytes' own needs the real package."""
    from peft import import_utils

    if any(type(one).__module__.startswith("bitsandbytes") for one in model.modules()):
        yield
        return

    package = types.ModuleType("bitsandbytes")
    package.__spec__ = importlib.machinery.ModuleSpec("bitsandbytes", None)
    layers = types.ModuleType("bitsandbytes.nn")
    for one in (Linear4bit, Linear8bitLt, Params4bit, Int8Params):
        setattr(layers, one.__name__, one)
    package.nn = layers  # type: ignore[attr-defined]
    package.functional = types.SimpleNamespace(**FUNCTIONAL)  # type: ignore[attr-defined]
    wanted = {"bitsandbytes": package, "bitsandbytes.nn": layers, "peft.tuners.lora.bnb": None}
    asked = (import_utils.is_bnb_available, import_utils.is_bnb_4bit_available)
    try:
        with imports.replaced(wanted):
            for known in asked:
                known.cache_clear()
            yield
    finally:
        for known in asked:
            known.cache_clear()
