"""The flash-attn package without its kernels: what its functions save, make and hold, under
transformers' own integration.

Read from flash-attn 2.8.3 flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp;
hopper/flash_attn_interface.py and hopper/flash_api.cpp for version 3. transformers 5.x
modeling_flash_attention_utils.py imports them lazily.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from memfit import kernels
from memfit.errors import InputError
from memfit.trace import cuda, flash_older, kernels_of, versions
from memfit.trace.imports import Patch
from memfit.trace.refuse import Watcher

ACCEPTED = (
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "deterministic",
)  # what transformers looks for
VERSIONS = {"flash-attn-2": 2, "flash-attn-3": 3}


def scratch(size: int, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(-(-size // 4), dtype=torch.float32, device=like.device)


def padded(tensor: torch.Tensor) -> torch.Tensor:
    short = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, short)) if short else tensor


class Attention(torch.autograd.Function):
    """(batch, tokens, heads, head), or (tokens, heads, head) with `batch` sequences of at most
    `longest` tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout: float,
        batch: int,
        longest: int,
        version: int,
    ) -> torch.Tensor:
        if query.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        head = query.shape[-1]
        if version == 2:
            query, key, value = padded(query), padded(key), padded(value)
        out = torch.empty_like(query)
        heads = query.shape[-2]
        sequences, tokens = (1, query.shape[0]) if batch else (query.shape[0], query.shape[1])
        rows = (heads, tokens) if batch else (sequences, heads, tokens)
        lse = torch.empty(rows, dtype=torch.float32, device=query.device)
        ctx.state = torch.empty(
            4 if version == 2 else 1, dtype=torch.float32, device=query.device
        )  # two 64-bit numbers; a semaphore
        if version == 2 and not batch and dropout == 0:
            split = kernels.flash_split_buffers(
                sequences, heads, tokens, key.shape[1], head, kernels_of.acting().sms
            )
            held = [scratch(size, query) for size in split if size]
            del held
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.batch, ctx.longest, ctx.version = batch, longest, version
        return out[..., :head] if out.shape[-1] != head else out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, _out, _lse = ctx.saved_tensors
        head = gradient.shape[-1]
        if ctx.version == 2:
            gradient = padded(gradient)
        if gradient.stride(-1) != 1:
            gradient = gradient.contiguous()
        dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        held = [scratch(size, query) for size in buffers(ctx, query, key) if size]
        del held
        return dq[..., :head], dk[..., :head], dv[..., :head], None, None, None, None


def buffers(ctx: Any, query: torch.Tensor, key: torch.Tensor) -> tuple[int, ...]:
    heads, head = query.shape[-2:]
    batch, real = (ctx.batch, query.shape[0]) if ctx.batch else (query.shape[0], 0)
    longest, keys = (ctx.longest, ctx.longest) if ctx.batch else (query.shape[1], key.shape[1])
    if ctx.version == 3:
        hopper = kernels_of.acting().capability == (9, 0)
        return kernels.flash_attn_3_backward(
            batch, heads, key.shape[-2], longest, keys, head, real=real, hopper=hopper
        )
    row = kernels.flash_attn_2_backward(
        batch, heads, key.shape[-2], longest, keys, head, query.element_size(), real
    )
    return row.softmax_d, row.dq_accum, row.dk_expanded, row.dv_expanded


def functions(version: int) -> tuple[Any, Any]:
    """`flash_attn_func` and `flash_attn_varlen_func` with the signature that transformers reads."""

    def func(
        q: Any,
        k: Any,
        v: Any,
        dropout_p: float = 0.0,
        softmax_scale: Any = None,
        causal: bool = False,
        **_: Any,
    ) -> Any:
        return Attention.apply(q, k, v, dropout_p, 0, 0, version)

    def varlen(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        **known: Any,
    ) -> Any:
        return Attention.apply(
            q,
            k,
            v,
            known.get("dropout_p", 0.0),
            cu_seqlens_q.numel() - 1,
            int(max_seqlen_q),
            version,
        )

    return accepting(func), accepting(varlen)


def accepting(function: Any) -> Any:
    """With the options of the package in its signature, which transformers reads."""
    own = inspect.signature(function).parameters
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
        for name in ACCEPTED
        if name not in own
    ]
    function.__signature__ = inspect.Signature([*[*own.values()][:-1], *more])
    return function


@contextlib.contextmanager
def installed(attention: str) -> Iterator[None]:
    """Inside, transformers finds the package that `attention` names, if it names one."""
    version = VERSIONS.get(attention)
    if version is None:
        yield
        return
    if versions.TRANSFORMERS < (5, 0):
        if version != 2:
            message = "flash-attn 3 needs transformers 5, but the trace runs an older version"
            raise InputError.one(message, where="job.attention", hint="use `flash-attn-2`")
        with flash_older.installed(functions(version)):
            yield
        return
    from transformers import PreTrainedModel
    from transformers import modeling_flash_attention_utils as utils

    patches = [*finding(utils, version), *dispatching(PreTrainedModel)]
    with cuda.patched(patches):
        yield


def finding(utils: Any, version: int = 0) -> list[Patch]:
    """`_lazy_imports` of transformers gives the functions of this version; without one, of that
    which a model names."""

    def lazy(implementation: Any = None, *_: Any, **__: Any) -> tuple[Any, ...]:
        chosen = version or (3 if str(implementation).endswith("3") else 2)
        cached = (None,) if versions.TRANSFORMERS >= (5, 0) else ()  # with a KV cache
        return (*functions(chosen), *cached, utils._pad_input, utils._unpad_input)

    loaded = [name for name in ("_loaded_implementation", "_flash_fn") if hasattr(utils, name)]
    return [(utils, "_lazy_imports", lazy), *((utils, name, None) for name in loaded)]


def dispatching(model: Any) -> list[Patch]:
    def can_dispatch(self: Any, *_: Any, **__: Any) -> bool:
        if not self._supports_flash_attn:
            raise ValueError(f"`{type(self).__name__}` does not support flash-attn")
        return True

    names = (f"_flash_attn_{number}can_dispatch" for number in ("", "2_", "3_"))
    return [(model, name, can_dispatch) for name in names if hasattr(model, name)]


# What transformers calls versions that are here; kernels of the hub are the same functions.
NAMES = {
    "flash_attention_2": 2,
    "flash_attention_3": 3,
    "kernels-community/flash-attn2": 2,
    "kernels-community/flash-attn": 2,
    "kernels-community/flash-attn3": 3,
    "kernels-community/vllm-flash-attn3": 3,
}


def in_scripts(model: Any, recorder: Watcher) -> list[Patch]:
    """For a script that asks a model for flash-attn on a machine that cannot build the package."""
    if is_installed():
        return []
    true = getattr(model, "_check_and_adjust_attn_implementation", None)  # from 4.56 on
    if true is None:
        return older_in_scripts(model, recorder)

    def adjust(self: Any, *args: Any, **given: Any) -> Any:
        asked, *args = args or (given.pop("attn_implementation", None),)  # type: ignore[assignment]
        version = NAMES.get(asked.removeprefix("paged|")) if isinstance(asked, str) else None
        if version is None:
            return true(self, asked, *args, **given)
        recorder.note(*COUNTED)
        # Not for classes that look whether it is there
        with cuda.patched([*dispatching(model), *without_kernels(model)]):
            return true(self, f"flash_attention_{version}", *args, **given)

    return [(model, "_check_and_adjust_attn_implementation", adjust)]


def is_installed() -> bool:
    """Whether the package is there; one that a script has imported may be its stand-in."""
    try:
        importlib.metadata.version("flash_attn")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def without_kernels(model: Any) -> list[Patch]:
    """Before transformers 5 the package's kernels were downloaded where it is not installed
    (4.57 modeling_utils.py)."""
    module = sys.modules[model.__module__]
    name = "is_kernels_available"
    return [(module, name, lambda: False)] if hasattr(module, name) else []


def older_in_scripts(model: Any, recorder: Watcher) -> list[Patch]:
    """Up to transformers 4.55 a class chooses its attention; from the first that is asked for
    flash-attn on, the package seems to be there."""
    true = getattr(model, "_autoset_attn_implementation", None)
    if true is None:
        return []
    stack = contextlib.ExitStack()  # until the script's end

    def autoset(cls: Any, config: Any, *args: Any, **given: Any) -> Any:
        wanted = given.get("use_flash_attention_2", args[0] if args else False)
        if wanted or getattr(config, "_attn_implementation", None) == "flash_attention_2":
            if "flash-attn" not in recorder.notes:
                stack.enter_context(flash_older.installed(functions(2)))
            recorder.note(*COUNTED)
        return true.__func__(cls, config, *args, **given)

    return [(model, "_autoset_attn_implementation", classmethod(autoset))]


COUNTED = (
    "flash-attn",
    "flash-attn is not installed: its memory is counted, its kernels do not run",
)


def utilities(utils: Any) -> list[Patch]:
    """For `transformers.modeling_flash_attention_utils`, in a script."""
    there = is_installed()
    return [] if there or not hasattr(utils, "_lazy_imports") else finding(utils)
