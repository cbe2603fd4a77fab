"""The flash-attn package for a script that imports it itself on a machine that cannot build it:
its functions, what their Triton kernels save and make; others are an error once they are used.

Read from flash-attn 2.8.4 flash_attn/ops/triton/layer_norm.py, layers/rotary.py and
ops/triton/cross_entropy.py. Of its modules only those that scripts take most are here."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
from types import ModuleType
from typing import Any

import torch
from memfit.trace import flash_attn, flash_older, kernels_of
from memfit.trace.missing_packages import needed
from memfit.trace.refuse import Watcher
from memfit.trace.unused_packages import expected, named


class Rotation(torch.autograd.Function):
    """A new tensor forward and backward, or the same one; only sines and cosines are saved."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inplace: bool
    ) -> Any:
        ctx.save_for_backward(cos, sin)
        ctx.inplace = inplace
        if inplace:
            ctx.mark_dirty(x)
        return x if inplace else torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient if ctx.inplace else torch.empty_like(gradient), None, None, None


def rotated(
    x: Any, cos: Any, sin: Any, interleaved: bool = False, inplace: bool = False, *_: Any, **__: Any
) -> Any:
    return Rotation.apply(x, cos, sin, inplace)


class Norm(torch.autograd.Function):
    """Layer and RMS norm, with a residual that is added first."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, residual: Any, fp32: bool, rms: bool
    ) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        out = torch.empty_like(flat)
        added = flat
        if residual is not None or fp32:
            wanted = torch.float32 if fp32 else residual.dtype
            added = torch.empty_like(flat, dtype=wanted)
        mean = None if rms else torch.empty(len(flat), dtype=torch.float32, device=x.device)
        scale = torch.empty(len(flat), dtype=torch.float32, device=x.device)
        ctx.save_for_backward(added, weight, bias, mean, scale)
        ctx.dtype, ctx.residual = x.dtype, residual is not None
        return out.reshape(x.shape), added.reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        added, weight, bias, _mean, _scale = ctx.saved_tensors
        rows = kernels_of.acting().sms * 8
        made = torch.empty_like(added, dtype=ctx.dtype)
        parts = [
            None if one is None else added.new_empty((rows, added.shape[-1]), dtype=torch.float32)
            for one in (weight, bias)
        ]
        ends = [
            None if part is None else part.sum(0).to(one.dtype)
            for part, one in zip(parts, (weight, bias), strict=True)
        ]
        made = made.reshape(gradient.shape)
        return made, *ends, made if ctx.residual else None, None, None


def normed(
    x: Any,
    weight: Any,
    bias: Any = None,
    residual: Any = None,
    *_: Any,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    **__: Any,
) -> Any:
    out, added = Norm.apply(x, weight, bias, residual, residual_in_fp32, is_rms_norm)
    return (out, added) if prenorm else out


def rms_normed(x: Any, weight: Any, bias: Any = None, *_: Any, **given: Any) -> Any:
    return normed(x, weight, bias, **{**given, "is_rms_norm": True})


class RMSNorm(torch.nn.Module):
    def __init__(
        self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: Any = None, **_: Any
    ) -> None:
        super().__init__()
        self.eps, self.weight = (
            eps,
            torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype)),
        )
        self.register_parameter("bias", None)

    def forward(
        self, x: Any, residual: Any = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Any:
        given = {"prenorm": prenorm, "residual_in_fp32": residual_in_fp32}
        return rms_normed(x, self.weight, None, residual=residual, **given)


class Loss(torch.autograd.Function):
    """A loss, a sum of exponents and another loss for each row; the logits are saved."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, inplace: bool) -> torch.Tensor:
        sums = [
            torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(3)
        ]
        ctx.save_for_backward(logits, sums[1])
        ctx.inplace = inplace
        return sums[0]

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        logits, _sums = ctx.saved_tensors
        return logits if ctx.inplace else torch.empty_like(logits), None


def losses(logits: Any, labels: Any, *_: Any, inplace_backward: bool = False, **__: Any) -> Any:
    found = Loss.apply(logits, inplace_backward)
    return found, torch.zeros_like(found)


class CrossEntropyLoss(torch.nn.Module):
    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", *_: Any, **given: Any
    ) -> None:
        super().__init__()
        self.reduction, self.inplace = reduction, bool(given.get("inplace_backward"))

    def forward(self, logits: Any, labels: Any, *_: Any) -> Any:
        found = Loss.apply(logits, self.inplace)
        return found if self.reduction == "none" else getattr(found, self.reduction)()


def contents() -> dict[str, dict[str, Any]]:
    plain, ragged = flash_attn.functions(2)

    def packed(qkv: Any, *args: Any, **given: Any) -> Any:
        return plain(*qkv.unbind(dim=-3), *args, **given)

    def pair(q: Any, kv: Any, *args: Any, **given: Any) -> Any:
        return plain(q, *kv.unbind(dim=-3), *args, **given)

    def ragged_packed(qkv: Any, ends: Any, longest: Any, *args: Any, **given: Any) -> Any:
        return ragged(*qkv.unbind(dim=-3), ends, ends, longest, longest, *args, **given)

    def ragged_pair(q: Any, kv: Any, *args: Any, **given: Any) -> Any:
        return ragged(q, *kv.unbind(dim=-3), *args, **given)

    functions = {
        "flash_attn_func": plain,
        "flash_attn_qkvpacked_func": packed,
        "flash_attn_kvpacked_func": pair,
        "flash_attn_varlen_func": ragged,
        "flash_attn_varlen_qkvpacked_func": ragged_packed,
        "flash_attn_varlen_kvpacked_func": ragged_pair,
    }
    norms = {"layer_norm_fn": normed, "rms_norm_fn": rms_normed, "RMSNorm": RMSNorm}
    older = {name: vars(one) for name, one in flash_older.package((plain, ragged)).items()}
    return {
        "flash_attn": {**functions, "__version__": flash_older.VERSION},
        "flash_attn.flash_attn_interface": functions,
        "flash_attn.bert_padding": older["flash_attn.bert_padding"],
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": {"apply_rotary_emb": rotated, "apply_rotary_emb_func": rotated},
        "flash_attn.losses": {},
        "flash_attn.losses.cross_entropy": {"CrossEntropyLoss": CrossEntropyLoss},
        "flash_attn.modules": {},
        "flash_attn.modules.mha": functions,
        "flash_attn.ops": {},
        "flash_attn.ops.rms_norm": {"RMSNorm": RMSNorm, "rms_norm": rms_normed},
        "flash_attn.ops.triton": {},
        "flash_attn.ops.triton.layer_norm": norms,
        "flash_attn.ops.triton.cross_entropy": {"cross_entropy_loss": losses},
    }


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for the package where a line of the script imports it and has no other way."""

    def __init__(self, recorder: Watcher) -> None:
        self.recorder, self.held = recorder, dict[str, dict[str, Any]]()

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "flash_attn":
            return None
        if not self.held:
            if name != "flash_attn" or not needed() or expected():
                return None
            self.held = contents()
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self.recorder.note(*flash_attn.COUNTED)
        for name, one in self.held.get(module.__name__, {}).items():
            if name == "__version__" or not name.startswith("__"):
                setattr(module, name, one)

        def unknown(name: str) -> Any:
            """What is not here is an error where it is first used."""
            if name.startswith("__"):
                raise AttributeError(name)
            return named(name, "flash_attn")

        module.__dict__["__getattr__"] = unknown


__all__ = ["Finder"]
