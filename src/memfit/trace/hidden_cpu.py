"""What CPU kernels allocate below the dispatcher, for a trace that acts as a CPU without oneDNN:
real steps there judge the trace.

Read from torch 2.13 and watched under its profiler; each row names the source file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from memfit import kernels
from memfit.trace.hidden import HIDDEN, Hidden, named, scattered
from memfit.trace.ops import table

# below it a batched product is a plain loop (ATen/native/LinearAlgebra.cpp `bmm_out_or_baddbmm_`)
SMALL_PRODUCT = 400
HALVES = (torch.float16, torch.bfloat16)
# The rows that hold on any device.
EVERYWHERE = {"logsumexp", "_safe_softmax", "_softmax_backward_data", "_log_softmax_backward_data"}
CPU: dict[Any, Callable[[Any, Any, Any, Any], list[Hidden]]] = {
    one: found for one, found in HIDDEN.items() if one.name().removeprefix("aten::") in EVERYWHERE
}


row = table(CPU)


def size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def copied(*tensors: torch.Tensor, brief: bool = False) -> list[Hidden]:
    """Contiguous copies of those that are not, made before the result."""
    return [
        Hidden("contiguous", size_of(one), first=True, brief=brief)
        for one in tensors
        if not one.is_contiguous()
    ]


@row(
    "add.Tensor",
    "sub.Tensor",
    "mul.Tensor",
    "div.Tensor",
    "add_.Tensor",
    "sub_.Tensor",
    "mul_.Tensor",
    "div_.Tensor",
    "pow.Tensor_Tensor",
    "maximum",
    "minimum",
    "bitwise_and.Tensor",
    "eq.Tensor",
    "ne.Tensor",
    "lt.Tensor",
    "le.Tensor",
    "gt.Tensor",
    "ge.Tensor",
)
def promoted(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """Operands of another dtype than the common one are copied to it first, and a result of another
    is made beside it (ATen/TensorIterator.cpp `compute_types`); CUDA's kernels read them as they
    are."""
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    operands = [one for one in tensors if one.dim() or one.numel() > 1]
    if len({one.dtype for one in tensors}) < 2 or not operands:
        return []
    common = tensors[0].dtype
    for one in operands:
        common = (
            torch.promote_types(common, one.dtype)
            if one.dtype != torch.bool or common == torch.bool
            else common
        )
    return [
        Hidden("promoted", one.numel() * common.itemsize, first=True)
        for one in operands
        if one.dtype != common
    ]


@row("cat")
def cat(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """A part of another dtype than the result is copied in its own first
    (ATen/native/TensorShape.cpp `cat_out_cpu`)."""
    return [
        Hidden("part", size_of(one), brief=True) for one in args[0] if one.dtype != result.dtype
    ]


@row("bmm", "baddbmm")
def batched(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """Matrix by matrix, and one that BLAS cannot read with one leading dimension is copied for its
    product (ATen/native/LinearAlgebra.cpp `addmm_impl_cpu_`)."""
    left, right = args[-2], args[-1]
    if left.shape[1] * left.shape[2] * right.shape[2] < SMALL_PRODUCT:
        return []
    items = [
        Hidden("contiguous", size_of(one) // one.shape[0], brief=True)
        for one in (left, right)
        if scattered(one)
    ]
    return items * int(result.shape[0])


@row(
    "scatter.src", "scatter.value", "scatter_.src", "scatter_.value", "scatter_add", "scatter_add_"
)
def scatter(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """16-bit numbers are gathered in a float copy of all (ATen/native/cpu/ScatterGatherKernel.cpp
    `create_acc_buffer`)."""
    return [Hidden("sums", result.numel() * 4, brief=True)] if result.dtype in HALVES else []


@row("gather")
def gather(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    return scatter(recorder, args, kwargs, result)


@row("mean.dim")
def mean(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """16-bit numbers are summed from a float copy (ATen/native/ReduceOps.cpp `mean_out`)."""
    return (
        [Hidden("sums", result.numel() * 4), Hidden("wide", args[0].numel() * 4, brief=True)]
        if args[0].dtype in HALVES
        else []
    )


@row("sum", "sum.dim_IntList")
def total(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """Numbers of another dtype than the sum are copied to it; 16-bit ones to float where two of the
    loops that are left after joining dimensions are summed over (ATen/native/ReduceOps.cpp
    `should_use_acc_buffer`)."""
    source = args[0]
    dims = args[1] if len(args) > 1 and args[1] else list(range(source.dim()))
    if source.dtype != result.dtype:
        return [Hidden("copy", source.numel() * result.element_size(), first=True, brief=True)]
    if (
        source.dtype not in HALVES
        or loops(source, {one % source.dim() for one in dims} if source.dim() else set()) < 2
    ):
        return []
    return [Hidden("sums", result.numel() * 4), Hidden("wide", source.numel() * 4, brief=True)]


def loops(tensor: torch.Tensor, dims: set[int]) -> int:
    """Of these dimensions, those left when neighbours in memory are joined (ATen/TensorIterator.cpp
    `coalesce_dimensions`)."""
    sizes = sorted((tensor.stride(one), tensor.size(one)) for one in dims if tensor.size(one) > 1)
    return sum(
        index == 0 or stride != sizes[index - 1][0] * sizes[index - 1][1]
        for index, (stride, _) in enumerate(sizes)
    )


@row("native_layer_norm", "native_layer_norm_backward")
def layer_norm(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """ATen/native/layer_norm.cpp `layer_norm_cpu`: everything in order."""
    return copied(*(one for one in args[:2] if isinstance(one, torch.Tensor)))


@row("avg_pool2d_backward")
def average_pool_backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """Gradient and result in the gradient's memory format (ATen/native/cpu/AvgPoolKernel.cpp
    `cpu_avg_pool_backward`)."""
    forms = torch.contiguous_format, torch.channels_last
    form = next(
        (one for one in forms if args[0].is_contiguous(memory_format=one)), torch.contiguous_format
    )
    return [
        Hidden("contiguous", size_of(one))
        for one in (args[0], result)
        if not one.is_contiguous(memory_format=form)
    ]


@row("embedding_dense_backward")
def embedding_backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """ATen/native/Embedding.cpp `embedding_dense_backward_cpu`: the table's gradient is made before
    that of the rows is put in order."""
    return [one._replace(first=False) for one in copied(args[0])]


@row("masked_scatter_backward")
def masked_scatter_backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """`masked_select`: the mask counted as int64, then that and its running sum
    (ATen/native/TensorAdvancedIndexing.cpp)."""
    count = args[0].numel()
    return [
        Hidden("mask", count * 8, first=True, brief=True),
        Hidden("mask", count * 8),
        Hidden("running_sum", count * 8),
    ]


def columns(weight: torch.Tensor, out: torch.Tensor, plain: bool) -> int:
    """The unfolded input: a column of weights' length for each place of the output
    (ATen/native/ConvolutionMM2d.cpp)."""
    return (
        0
        if plain
        else math.prod(weight.shape[1:])
        * math.prod(out.shape[2:])
        * out.shape[0]
        * out.element_size()
    )


def pointwise(weight: torch.Tensor, stride: list[int], padding: list[int]) -> bool:
    return (
        all(one == 1 for one in (*weight.shape[2:], *stride))
        and not any(padding)
        and weight.dim() < 5
    )


@row("convolution")
def convolution(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """One group after the other, their outputs put together at the end (ATen/native/Convolution.cpp
    `_convolution`)."""
    source, weight, stride, padding, groups = args[0], args[1], args[3], args[4], args[8]
    found = copied(source)
    if groups > 1:
        return found + [Hidden("group", size_of(result) // groups, first=True)] * groups
    size = columns(weight, result, pointwise(weight, stride, padding))
    return found + ([Hidden("columns", size, first=True)] if size else [])


@row("convolution_backward")
def convolution_backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    """`slow_conv2d_backward_cpu`: the gradient in order for the input's, and again beside the
    columns for the weight's."""
    gradient, source, weight, stride, padding, groups, mask = (
        args[0],
        args[1],
        args[2],
        args[4],
        args[5],
        args[9],
        args[10],
    )
    if groups > 1:
        pieces = [one for one in result[:2] if one is not None for _ in range(groups)]
        return copied(source, gradient) + [
            Hidden("group", size_of(one) // groups, first=True) for one in pieces
        ]
    found = copied(gradient, brief=True) if mask[0] else []
    if (
        mask[2]
        and gradient.dtype in HALVES
        and loops(gradient, set(range(gradient.dim())) - {1}) > 1
    ):
        found.append(Hidden("wide", gradient.numel() * 4, first=True, brief=True))
    if mask[1]:
        size = columns(weight, gradient, pointwise(weight, stride, padding))
        found += [one._replace(first=False) for one in copied(gradient)]
        found += [Hidden("columns", size)] if size else []
    return found


@row("_scaled_dot_product_flash_attention_for_cpu")
def flash_forward(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    query, key, threads = args[0], args[1], torch.get_num_threads()
    sizes = query.shape[2], key.shape[2]
    half = query.element_size() == 2
    return named(
        buffer=kernels.cpu_flash(*sizes, query.shape[3], threads),
        reduced=kernels.cpu_flash_backward(*sizes, threads, 2) // 2 if half else 0,
    )


@row("_scaled_dot_product_flash_attention_for_cpu_backward")
def flash_backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> list[Hidden]:
    query, key, threads = args[1], args[2], torch.get_num_threads()
    sizes = query.shape[2], key.shape[2]
    half = query.element_size() == 2
    return named(
        buffer=kernels.cpu_flash_backward(*sizes, threads),
        reduced=kernels.cpu_flash_backward(*sizes, threads, 2) if half else 0,
    )
