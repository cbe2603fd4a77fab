"""What CUDA kernels allocate below the dispatcher, read off the arguments of the op: the rows of
`memfit.kernels` applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from memfit import kernels
from memfit.trace.ops import table


class Hidden(NamedTuple):
    """A buffer the kernel allocates. `keep`: it stays until the process ends; `first`: it is there
    before the result; `brief`: it goes before the kernel takes another."""

    name: str
    size: int
    formula: str = ""
    keep: bool = False
    first: bool = False
    brief: bool = False


HIDDEN: dict[Any, Callable[[Any, Any, Any, Any], list[Hidden]]] = {}


row = table(HIDDEN)


def named(**buffers: int) -> list[Hidden]:
    return [Hidden(name, size) for name, size in buffers.items() if size]


@row(
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "addmm_",
    "mv",
    "dot",
    "mm.out",
    "bmm.out",
    "addmm.out",
    "baddbmm.out",
    "mm.dtype",
    "mm.dtype_out",
    "bmm.dtype",
    "bmm.dtype_out",
    "addmm.dtype",
    "addmm.dtype_out",
)
def matmul(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """The first multiplication of a thread makes its cuBLAS workspace; backward runs on a thread of
    its own. Operands that are neither row- nor column-major are copied (ATen/native/cuda/Blas.cpp
    `prepare_matrix_for_cublas`)."""
    device = recorder.device
    found = [
        Hidden("contiguous_operand", one.numel() * one.element_size())
        for one in args
        if isinstance(one, torch.Tensor) and scattered(one)
    ]
    thread = "backward" if recorder.phase == "backward" else "forward"
    if thread not in recorder.workspaces:
        recorder.workspaces.add(thread)
        found.append(
            Hidden(
                f"cublas workspace ({thread})",
                kernels.cublas_workspace(device.capability, device.version),
                keep=True,
            )
        )
    biased = result.dim() == 2 and len(args) > 2 and args[0].dim() == 1
    if biased and kernels.cublaslt_workspace(device.version):
        kept = device.version >= (2, 9)  # then once a thread
        if not kept or f"lt {thread}" not in recorder.workspaces:
            recorder.workspaces.add(f"lt {thread}")
            found.append(
                Hidden("cublasLt workspace", kernels.cublaslt_workspace(device.version), keep=kept)
            )
    return found


def scattered(tensor: torch.Tensor) -> bool:
    """A matrix that cuBLAS cannot read with one leading dimension."""
    if tensor.dim() < 2 or tensor.numel() == 0:
        return False
    rows, columns = tensor.shape[-2:]
    down, across = tensor.stride()[-2:]
    return not (
        (across == 1 and down >= max(1, columns))
        or (down == 1 and across >= max(1, rows))
        or rows == 1
        or columns == 1
    )


@row("_safe_softmax")
def safe_softmax(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """Which scores are minus infinity, one byte each, and whether a whole row is
    (ATen/native/transformers/attention.cpp)."""
    scores = args[0]
    return named(masked=scores.numel(), masked_rows=scores.numel() // max(1, scores.shape[-1]))


@row("logsumexp")
def logsumexp(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """The largest values and the shifted exponentials (ATen/native/ReduceOps.cpp
    `logsumexp_out_impl`)."""
    return named(
        maxima=result.numel() * result.element_size(),
        exponentials=args[0].numel() * args[0].element_size(),
    )


@row("_scaled_dot_product_flash_attention")
def flash_forward(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    query, key = args[0], args[1]
    dropout = args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)
    if dropout:
        return []
    batch, heads, length, head = query.shape
    if length == 1 and heads != key.shape[1]:  # heads of a group are folded into the length
        length, heads = heads // key.shape[1], key.shape[1]
    lse, out = kernels.flash_split_buffers(
        batch, heads, length, key.shape[2], head, recorder.device.sms
    )
    return named(softmax_lse_accum=lse, out_accum=out)


@row("_scaled_dot_product_flash_attention_backward")
def flash_backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    gradient, query, key = args[0], args[1], args[2]
    batch, heads, length, head = query.shape
    buffers = kernels.flash_backward(
        batch, heads, key.shape[1], length, key.shape[2], head, query.element_size()
    )
    copies = [
        0 if one.transpose(1, 2).is_contiguous() else one.numel() * one.element_size()
        for one in (gradient, args[4])
    ]
    return named(
        contiguous_grad=copies[0],
        contiguous_out=copies[1],
        softmax_d=buffers.softmax_d,
        dq_accum=buffers.dq_accum,
        dk_expanded=buffers.dk_expanded,
        dv_expanded=buffers.dv_expanded,
    )


@row("_scaled_dot_product_cudnn_attention_backward")
def cudnn_backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    batch, heads, length, head = args[1].shape
    return named(dq_accum=kernels.cudnn_backward(batch, heads, length, head))


@row("_scaled_dot_product_efficient_attention")
def efficient_forward(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    query, value = args[0], args[2]
    batch, heads, length, head = query.shape
    return named(
        out_accum=kernels.efficient_accumulator(
            batch, heads, length, head, value.shape[-1], query.element_size()
        )
    )


@row("_scaled_dot_product_efficient_attention_backward")
def efficient_backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    query, key, value = args[1], args[2], args[3]
    batch, heads, length, head = query.shape
    size = kernels.efficient_backward(
        batch,
        heads,
        length,
        key.shape[2],
        head,
        value.shape[-1],
        query.element_size(),
        recorder.device.capability,
    )
    return named(workspace=size)


@row("embedding_dense_backward")
def embedding_backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    gradient, indices, vocabulary = args[0], args[1], args[2]
    buffers = kernels.embedding_backward(indices.numel(), vocabulary, gradient.shape[-1])
    copy = 0 if gradient.is_contiguous() else gradient.numel() * gradient.element_size()
    return named(
        contiguous_grad=copy,
        indices=buffers.indices,
        partial_sums=max(buffers.sorting, buffers.summing),
    )


def ordered(tensor: torch.Tensor) -> int:
    """Bytes of the copy that a kernel makes of a tensor that is not contiguous."""
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.element_size()


@row("native_layer_norm")
def layer_norm(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """ATen/native/cuda/layer_norm_kernel.cu `layer_norm_cuda`: `expect_contiguous`."""
    return [one._replace(first=True) for one in named(contiguous_input=ordered(args[0]))]


@row("native_layer_norm_backward")
def layer_norm_backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    gradient, shape = args[0], args[2]
    width = 1
    for one in shape:
        width *= one
    device, mask = recorder.device, args[7]
    size = kernels.norm_backward(
        gradient.numel() // max(1, width),
        width,
        gradient.element_size(),
        device.sms,
        device.version,
    )
    partial = {
        name: size
        for name, needed in zip(("dgamma_partial", "dbeta_partial"), mask[1:], strict=True)
        if needed
    }
    return named(contiguous_grad=ordered(gradient), contiguous_input=ordered(args[1]), **partial)


@row("_fused_rms_norm_backward")
def rms_norm_backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    gradient, width = args[0], args[1].shape[-1]
    size = kernels.norm_backward(
        gradient.numel() // max(1, width), width, gradient.element_size(), recorder.device.sms
    )
    copy = 0 if gradient.is_contiguous() else gradient.numel() * gradient.element_size()
    return named(contiguous_grad=copy, dgamma_partial=size if args[5][1] else 0)


@row("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """Both operands are made contiguous (ATen/native/cuda/SoftMax.cu `host_softmax_backward`)."""
    return named(
        contiguous_grad=sum(
            0 if one.is_contiguous() else one.numel() * one.element_size() for one in args[:2]
        )
    )


@row("sum.dim_IntList")
def column_sum(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """Where whole leading dimensions of a contiguous tensor are summed over."""
    source, dims = args[0], {one % max(1, args[0].dim()) for one in args[1] or ()}
    if (
        not dims
        or dims != set(range(len(dims)))
        or not source.is_contiguous()
        or not result.numel()
        or len(dims) == source.dim()
    ):
        return []
    device = recorder.device
    shares, counters = kernels.column_sum(
        source.numel() // result.numel(), result.numel(), device.sms, device.capability
    )
    return named(partial_sums=shares, counters=counters)


@row("_foreach_norm.Scalar")
def foreach_norm(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    return named(partial_norms=kernels.foreach_norm(tuple(one.numel() for one in args[0])))


@row("index_put", "index_put_", "_index_put_impl_")
def index_put(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if not accumulate:
        return []
    count = max((selected(one) for one in args[1] if one is not None), default=0)
    return named(sorted_indices=kernels.index_put_accumulate(count))


def selected(index: torch.Tensor) -> int:
    """How many places an index names: a mask those that are true
    (ATen/native/TensorAdvancedIndexing.cpp `expandTensors`)."""
    return int(index.sum()) if index.dtype == torch.bool and not index.is_meta else index.numel()


@row("sort", "sort.stable")
def sort(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    values = args[0]
    length = values.shape[-1] if values.dim() else 1
    return named(
        radix=kernels.sort_buffers(values.numel() // max(1, length), length, values.element_size())
    )
