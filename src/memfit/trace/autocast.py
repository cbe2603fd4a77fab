"""Autocast for tensors without a device: the op lists and the cache of cast weights, under torch's own autocast state.

`torch.autocast` keeps its state as always; its kernels only cast tensors that are truly on the device, so the ones of the
lists are replaced here. Lists: torch 2.13 ATen/autocast_mode.h; rules: aten/src/ATen/autocast_mode.cpp `cached_cast`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from memfit.trace import cuda
from memfit.trace.ops import op

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
PROMOTE = ["addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot", "scatter_add"]

Policy = Callable[[Any, Any, Any], Any]
KEY = "AutocastCUDA"
TRUE_IS_CUDA = torch._C.TensorBase.is_cuda
_LIBRARY: list[Any] = []
_CACHE: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def eligible(tensor: torch.Tensor) -> bool:
    """Floats on the GPU, pretended or real: with a CUDA build these kernels serve both."""
    return tensor.dtype in (torch.float32, torch.float16, torch.bfloat16) and (tensor.is_meta or TRUE_IS_CUDA.__get__(tensor))


def cast(value: Any, dtype: torch.dtype) -> Any:
    """`cached_cast`: leaf fp32 weights that require a gradient keep their 16-bit copy until the outermost autocast ends."""
    if isinstance(value, torch.Tensor):
        if not eligible(value) or value.dtype == dtype:
            return value
        keeps = (
            dtype == torch.get_autocast_dtype("cuda") and value.dtype == torch.float32 and value.requires_grad and value.is_leaf
            and not value._is_view() and torch.is_autocast_cache_enabled()
        )  # fmt: skip
        if not keeps:
            return cuda.TRUE_TO(value, dtype)
        found = _CACHE.get(id(value))
        if found is None:
            found = _CACHE[id(value)] = (value, cuda.TRUE_TO(value, dtype))
        return found[1]
    if isinstance(value, (list, tuple)):
        return type(value)(cast(one, dtype) for one in value)
    return value


def lower(func: Any, args: Any, kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype("cuda")
    return func(*cast(args, dtype), **{key: cast(value, dtype) for key, value in kwargs.items()})


def wide(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*cast(args, torch.float32), **{key: cast(value, torch.float32) for key, value in kwargs.items()})


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
    """Every tensor to the widest dtype among them."""
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor) and eligible(one)]
    dtype = torch.float32 if any(one.dtype == torch.float32 for one in tensors) else torch.get_autocast_dtype("cuda")
    return func(*cast(args, dtype), **{key: cast(value, dtype) for key, value in kwargs.items()})


POLICIES: tuple[tuple[list[str], Policy], ...] = (
    (LOWER, lower), (WIDE, wide), (WIDE_OUTPUT, wide_output), (WIDE_APPENDED, wide_appended), (PROMOTE, promote),
)  # fmt: skip


def install() -> None:
    """Replace the autocast kernels of the lists, once a process; on a build without CUDA nothing else reaches them."""
    if _LIBRARY:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that its own kernels are being replaced
        _LIBRARY.append(registered())


def registered() -> Any:
    library = torch.library.Library("aten", "IMPL")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    for names, policy in POLICIES:
        for name in names:
            found = op(name)
            if found is not None:
                library.impl(name, kernel(found, policy, keys), KEY)
    return library


def kernel(func: Any, policy: Policy, keys: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return policy(func, args, kwargs)

    return run


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Inside, `torch.autocast("cuda")` acts on the pretended GPU's tensors."""
    install()
    clear = torch.clear_autocast_cache

    def cleared() -> None:
        _CACHE.clear()
        clear()

    before = torch._C._dispatch_tls_is_dispatch_key_included(KEY)
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, True)
    try:
        with cuda.patched([(torch, "clear_autocast_cache", cleared)]):
            yield
    finally:
        _CACHE.clear()
        torch._C._dispatch_tls_set_dispatch_key_included(KEY, before)
