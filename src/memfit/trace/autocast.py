"""Autocast for tensors without a device: the op lists and the cache of cast weights, under torch's
own autocast state.

`torch.autocast` keeps its state as always; its kernels only cast tensors that are truly on the
device, so the ones of the lists are replaced here. Lists: torch 2.13 ATen/autocast_mode.h; rules:
aten/src/ATen/autocast_mode.cpp `cached_cast`. A trace that acts as a CPU borrows the GPU's state,
with the CPU's lists.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from memfit.trace import cuda
from memfit.trace.ops import collect, op

LOWER = [
    "_convolution.deprecated",
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "_scaled_dot_product_flash_attention",
    "scaled_dot_product_attention",
]
WIDE = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "_upsample_nearest_exact1d",
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
]
WIDE_OUTPUT = [
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "sum",
    "sum.dim_IntList",
]
WIDE_APPENDED = ["norm.Scalar", "norm.ScalarOpt_dim"]
# Of the CPU's own (autocast_mode.cpp AutocastCPU), those that do not go to fp32.
CPU_LOWER = [
    "conv1d",
    "conv1d.padding",
    "conv2d",
    "conv2d.padding",
    "conv3d",
    "conv3d.padding",
    "bmm",
    "mm",
    "linalg_vecdot",
    "baddbmm",
    "addmm",
    "_addmm_activation",
    "addbmm",
    "linear",
    "_convolution.deprecated",
    "matmul",
    "conv_tbc",
    "mkldnn_rnn_layer",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "prelu",
    "scaled_dot_product_attention",
    "_native_multi_head_attention",
]
CPU_PROMOTE = ["stack", "cat", "index_copy"]
PROMOTE = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
]

Policy = Callable[[Any, Any, Any], Any]
KEY = "AutocastCUDA"
TRUE_IS_CUDA = torch._C.TensorBase.is_cuda
_LIBRARY: list[Any] = []
_NAMES: set[str] = set()
_ACTING = ["cuda"]  # whose lists hold
_CACHE: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def eligible(tensor: torch.Tensor) -> bool:
    """Floats on the GPU, pretended or real: with a CUDA build these kernels serve both. A CPU has
    all of them."""
    here = tensor.is_meta or _ACTING[0] == "cpu" or TRUE_IS_CUDA.__get__(tensor)
    return here and tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """`cached_cast`: leaf fp32 weights that require a gradient keep their 16-bit copy until the
    outermost autocast ends."""
    if isinstance(value, torch.Tensor):
        if not eligible(value) or value.dtype == dtype:
            return value
        keeps = (
            dtype == torch.get_autocast_dtype("cuda")
            and value.dtype == torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not keeps:
            return cuda.TRUE_TO(value, dtype)
        found = _CACHE.get(id(value))
        if found is None:
            found = _CACHE[id(value)] = (value, cuda.TRUE_TO(value, dtype))
        return found[1]
    if isinstance(value, (list, tuple)):
        return type(value)(cast(one, dtype) for one in value)
    return value


def called(func: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    """The last argument is cast first: torch casts them inside a call, and compilers go through
    those from the right."""
    named = {key: cast(value, dtype) for key, value in reversed(kwargs.items())}
    given = [cast(value, dtype) for value in reversed(args)]
    return func(*reversed(given), **named)


def lower(func: Any, args: Any, kwargs: Any) -> Any:
    return called(func, args, kwargs, torch.get_autocast_dtype("cuda"))


def wide(func: Any, args: Any, kwargs: Any) -> Any:
    return called(func, args, kwargs, torch.float32)


def wide_output(func: Any, args: Any, kwargs: Any) -> Any:
    """The op is asked for an fp32 result, unless the caller named a dtype."""
    first = args[0]
    if eligible(first) and kwargs.get("dtype") is None:
        names = [one.name for one in func._schema.arguments]
        index = names.index("dtype")
        if len(args) > index:
            args = (*args[:index], args[index] or torch.float32, *args[index + 1 :])
        else:
            kwargs = {**kwargs, "dtype": torch.float32}
    return func(*args, **kwargs)


def wide_appended(func: Any, args: Any, kwargs: Any) -> Any:
    if not eligible(args[0]):
        return func(*args, **kwargs)
    power = args[1] if len(args) > 1 else kwargs.get("p", 2)
    if func is torch.ops.aten.norm.Scalar:
        return torch.ops.aten.norm.ScalarOpt_dtype(args[0], power, dtype=torch.float32)
    dims = args[2] if len(args) > 2 else kwargs.get("dim", [])
    keep = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    return torch.ops.aten.norm.ScalarOpt_dim_dtype(args[0], power, dims, keep, dtype=torch.float32)


def promote(func: Any, args: Any, kwargs: Any) -> Any:
    """Every tensor to the widest dtype among them, those in lists (`cat`, `stack`) included."""
    tensors: list[torch.Tensor] = []
    collect((*args, *kwargs.values()), tensors)
    wide = any(eligible(one) and one.dtype == torch.float32 for one in tensors)
    dtype = torch.float32 if wide else torch.get_autocast_dtype("cuda")
    return called(func, args, kwargs, dtype)


POLICIES: dict[str, dict[str, Policy]] = {
    "cuda": {
        name: policy
        for names, policy in (
            (LOWER, lower),
            (WIDE, wide),
            (WIDE_OUTPUT, wide_output),
            (WIDE_APPENDED, wide_appended),
            (PROMOTE, promote),
        )
        for name in names
    },
}


def policies(type: str) -> dict[str, Policy]:
    """What each operator of the device's lists does."""
    if type not in POLICIES:
        known = [
            one.removeprefix("aten::")
            for one in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
        ]
        POLICIES[type] = {
            name: lower if name in CPU_LOWER else promote if name in CPU_PROMOTE else wide
            for name in known
        }
    return POLICIES[type]


def install(type: str = "cuda") -> None:
    """Replace the autocast kernels of the lists, once a process; on a build without CUDA nothing
    else reaches them."""
    fresh = [
        name for name in {**policies("cuda"), **policies(type)} if name not in _NAMES
    ]  # torch's own would turn all casts off inside
    if not fresh:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that its own kernels are being replaced
        _LIBRARY.append(registered(fresh))


def registered(names: list[str]) -> Any:
    library = torch.library.Library("aten", "IMPL")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    for name in names:
        _NAMES.add(name)
        found = op(name)
        if found is not None:
            library.impl(name, kernel(found, name, keys), KEY)
    return library


def kernel(func: Any, name: str, keys: Any) -> Callable[..., Any]:
    whole = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")

    def run(*args: Any, **kwargs: Any) -> Any:
        policy = POLICIES[_ACTING[0]].get(name)
        if policy is None and whole:  # what it is made of is cast
            return func.decompose(*args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return func(*args, **kwargs) if policy is None else policy(func, args, kwargs)

    return run


def borrowed(type: str) -> list[tuple[Any, str, Any]]:
    """For a CPU, whose own state belongs to real tensors: what `torch.autocast("cpu")` asks and
    sets is the GPU's."""
    if type != "cpu":
        return []

    def moved(true: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: true(*("cuda" if one == "cpu" else one for one in given))

    names = (
        "is_autocast_enabled",
        "set_autocast_enabled",
        "get_autocast_dtype",
        "set_autocast_dtype",
    )
    return [(torch, name, moved(getattr(torch, name))) for name in names]


@contextlib.contextmanager
def emulated(type: str = "cuda") -> Iterator[None]:
    """Inside, `torch.autocast` acts on the tensors of the pretended device."""
    install(type)
    clear = torch.clear_autocast_cache

    def cleared() -> None:
        _CACHE.clear()
        clear()

    before, acting = torch._C._dispatch_tls_is_dispatch_key_included(KEY), _ACTING[0]
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, True)
    _ACTING[0] = type
    try:
        with cuda.patched([(torch, "clear_autocast_cache", cleared), *borrowed(type)]):
            yield
    finally:
        _CACHE.clear()
        _ACTING[0] = acting
        torch._C._dispatch_tls_set_dispatch_key_included(KEY, before)
