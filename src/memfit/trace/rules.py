"""Ops that behave otherwise on the pretended GPU than on meta tensors: what is chosen, what happens
in place, what values are assumed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from memfit.errors import InputError
from memfit.trace.ops import aten, table

RULES: dict[Any, Callable[[Any, Any, Any, Any], tuple[bool, Any]]] = {}
NO = (False, None)


rule = table(RULES)


class References:
    """Reference counts of a gradient that nobody but the engine holds, as this version of torch
    shows them to a rule."""

    known: tuple[int, int, int] = (0, 0, 0)
    learning = False


def learn(recorder: Any) -> None:
    """Run `x·2 + x·3` backward and look at the engine's addition, through the recorder itself, so
    that the frames are the same."""
    leaf = torch.empty(2, device="meta", requires_grad=True)
    References.learning, recorder.phase = True, "backward"
    with torch.enable_grad(), recorder:
        middle = leaf * 1
        (middle * 2 + middle * 3).sum().backward()
    References.learning = False


def counts(tensor: torch.Tensor) -> tuple[int, int, int]:
    storage = tensor.untyped_storage()
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(tensor)


@rule("add.Tensor")
def accumulate(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """The engine adds gradients of a tensor used twice in place, if nobody else holds the first;
    under a mode it does not.

    torch 2.13 torch/csrc/autograd/input_buffer.cpp `accumulate`: the mode makes
    `isTensorSubclassLike` true.
    """
    if torch.is_grad_enabled() or kwargs or recorder.phase != "backward":
        return NO
    first, second = args
    if (
        not isinstance(second, torch.Tensor)
        or first.shape != second.shape
        or first.dtype != second.dtype
    ):
        return NO
    node = torch._C._current_autograd_node()
    if node is None:
        return NO
    recorder.follow_node()
    block = recorder.owned(first)
    if block is None or (block.node == recorder.node_serial and not doubled(node)):
        return NO
    found = counts(first)
    if References.learning:
        References.known = found
    if found[:2] != References.known[:2] or found[2] > References.known[2]:
        return NO
    return True, first


def doubled(node: Any) -> bool:
    following = [one for one in node.next_functions if one[0] is not None]
    return len({(id(one[0]), one[1]) for one in following}) < len(following)


@rule("index_put", "index_add", "scatter_add", "scatter.src")
def into_zeros(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Backward formulas write into fresh zeros; they copy them first only under a mode
    (FunctionsManual.cpp `areAnyTensorSubclassLike`)."""
    if torch.is_grad_enabled() or recorder.phase != "backward":
        return NO
    node = torch._C._current_autograd_node()
    if node is None or node.name().startswith("torch::") or not hasattr(node, "_sequence_nr"):
        return NO
    recorder.follow_node()
    block = recorder.owned(args[0])
    if block is None or block.node != recorder.node_serial or "zeros" not in block.op:
        return NO
    return True, args[0]


@rule("_fused_rms_norm")
def fused_rms_norm(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """The CUDA kernel keeps the input as it is and one fp32 number per row
    (ATen/native/cuda/layer_norm_kernel.cu)."""
    if not args[0].is_meta or recorder.device.type != "cuda":
        return NO
    source, shape = args[0], args[1]
    rows = list(source.shape[: source.dim() - len(shape)]) + [1] * len(shape)
    return True, (
        torch.empty_like(source, memory_format=torch.contiguous_format),
        torch.empty(rows, dtype=torch.float32, device="meta"),
    )


@rule("_fused_rms_norm_backward")
def fused_rms_norm_backward(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    if not args[1].is_meta or recorder.device.type != "cuda":
        return NO
    source, weight, mask = args[1], args[4], args[5]
    return True, (
        torch.empty_like(source, memory_format=torch.contiguous_format) if mask[0] else None,
        torch.empty_like(weight) if weight is not None and mask[1] else None,
    )


@rule("native_layer_norm", "native_layer_norm_backward")
def layer_norm(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Both kernels work in order, whatever order they are given (ATen/native/layer_norm.cpp,
    cuda/layer_norm_kernel.cu)."""
    scattered = [one for one in args if isinstance(one, torch.Tensor) and not one.is_contiguous()]
    if not scattered or not args[0].is_meta:
        return NO
    ordered = (
        torch.empty(one.shape, dtype=one.dtype, device="meta")
        if any(one is other for other in scattered)
        else one
        for one in args
    )
    return True, func(*ordered, **kwargs)


@rule("_grouped_mm")
def grouped_mm(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Rows are padded to 16 bytes; every float dtype goes (by a loop over the groups where the fast
    kernel does not).

    torch 2.13 ATen/native/GroupedMMUtils.h `create_grouped_gemm_output_tensor`; the meta function
    takes bf16 only.
    """
    left, right = args[0], args[1]
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    if not left.is_meta:
        return NO
    if left.dim() == 2:
        shape = (
            [left.shape[0], right.shape[-1]]
            if right.dim() == 3
            else [offsets.shape[0], left.shape[0], right.shape[1]]
        )
    else:
        shape = (
            [left.shape[1], right.shape[1]]
            if right.dim() == 2
            else [left.shape[0], left.shape[1], right.shape[-1]]
        )
    align = 16 // left.element_size()
    row = -(-shape[-1] // align) * align
    return True, torch.empty_strided(
        shape, [shape[1] * row, row, 1][-len(shape) :], dtype=left.dtype, device="meta"
    )


MOST_CHOICES = (
    4096  # of a module; outside of them a beam search chooses among all words of its beams
)
BALANCED = (
    "assumes equal tokens per expert",
    "job.router_skew",
    "`--router-skew 2` doubles the busiest expert's tokens",
)  # as `estimate` says it for the formulas


@rule("topk")
def topk(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """A router's choice of experts depends on data: balanced here, the experts taken in turn,
    `skew` times more of the first."""
    scores, count = args[0], args[1]
    if (
        not scores.is_meta
        or scores.dim() < 2
        or (recorder.modules and scores.shape[-1] > MOST_CHOICES)
        or scores.numel() // scores.shape[-1] * count > recorder.real_limit
    ):
        return NO
    values, _ = func(*args, **kwargs)
    choices = scores.shape[-1]
    if recorder.modules and recorder.skew == 1:
        recorder.assume("experts", *BALANCED)
    rows = scores.numel() // choices
    indices = (torch.arange(rows * count) % choices).view(rows, count)
    if recorder.skew > 1 and count < choices:
        wanted = min(rows, int(recorder.skew * rows * count / choices))
        without = (indices != 0).all(-1).nonzero().flatten()
        indices[without[: max(0, wanted - (rows - len(without)))], 0] = 0
    return True, (values, indices.view(*scores.shape[:-1], count))


@rule("argmax")
def argmax(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """A router that takes the one best expert (Switch): balanced like those that take several. Not
    the choice of a next token."""
    dim, keep = [*args[1:], None, None][:2]
    dim, keep = kwargs.get("dim", dim), bool(kwargs.get("keepdim", keep))
    if not recorder.modules or dim not in (-1, args[0].dim() - 1):
        return NO
    done, found = topk(recorder, aten.topk.default, (args[0], 1), {})
    if not done:
        return NO
    return True, found[1] if keep else found[1].squeeze(-1)


@rule("max.dim")
def best(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """The same of a router that looks for one after the other (PhiMoE), where ranks are to be told
    how many rows come."""
    if (
        not recorder.modules
        or not recorder.imbalance
        or len(args) < 2
        or args[1] not in (-1, args[0].dim() - 1)
    ):
        return NO
    done, found = topk(recorder, aten.topk.default, (args[0], 1), {})
    if not done:
        return NO
    keep = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    return True, (found if keep else tuple(one.squeeze(-1) for one in found))


@rule("eq.Scalar", "ne.Scalar", "lt.Scalar", "gt.Scalar", "le.Scalar", "ge.Scalar")
def compare(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """A comparison of a tensor whose one value is known."""
    tensor = args[0]
    block = recorder.owned(tensor) if tensor.is_meta else None
    if (
        tensor.is_meta
        and tensor.dim()
        and args[1] in recorder.decided
        and tensor.numel() <= recorder.real_limit
    ):
        every, told = recorder.decided[args[1]]
        recorder.assume("decided", told)
        return True, (torch.arange(tensor.shape[-1]) % every == 0).expand(tensor.shape).contiguous()
    if block is None or block.value is None:
        return NO
    if tensor.numel() <= recorder.real_limit:
        return True, func(torch.full(tensor.shape, block.value), args[1])
    result = func(*args, **kwargs)
    recorder.seen(func, args, kwargs, result, False)
    recorder.owned(result).value = float(func(torch.tensor(block.value), args[1]))
    return True, result


@rule("isin.Tensor_Tensor", "isin.Tensor_Scalar")
def among(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Whether an answer has come to its end token: it is taken to go on until it is as long as it
    may get."""
    if not args[0].is_meta or args[0].numel() > recorder.real_limit:
        return NO
    return True, torch.zeros(args[0].shape, dtype=torch.bool)


@rule("isnan", "isinf")
def finite(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Nothing is, for the program that asks."""
    return taken_for(0.0, recorder, func, args, kwargs)


@rule("_is_all_true")
def holds(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """What a library checks of its arguments is taken to hold
    (torch/distributions/distribution.py)."""
    return taken_for(1.0, recorder, func, args, kwargs)


def taken_for(value: float, recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """The result has this value throughout, and whoever compares it is told so."""
    if not args[0].is_meta:
        return NO
    result = recorder.seen(func, args, kwargs, func(*args, **kwargs), False)
    if (block := recorder.owned(result)) is not None:
        block.value = value
    return True, result


@rule("sum", "sum.dim_IntList", "prod", "prod.dim_int")
def total(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """How many truths or whole numbers there are, where the one value of all of them is known:
    models count what is no padding."""
    tensor = args[0]
    if not tensor.is_meta or tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return NO
    block, shape = recorder.owned(tensor), func(*args, **kwargs)
    if block is None or block.value is None or shape.numel() > recorder.real_limit:
        return NO
    count = tensor.numel() // max(1, shape.numel())
    value = block.value * count if "sum" in func._schema.name else block.value**count
    return True, torch.full(shape.shape, value, dtype=shape.dtype)


@rule("equal")
def equal(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """`torch.equal` of single numbers that the program said itself; others are taken to differ."""
    if not any(one.is_meta for one in args[:2]):
        return NO
    values = [single(recorder, one) for one in args[:2]]
    return True, args[0] is args[1] or (None not in values and values[0] == values[1])


def single(recorder: Any, tensor: torch.Tensor) -> float | None:
    if tensor.numel() != 1:
        return None
    block = recorder.owned(tensor)
    if tensor.is_meta:
        return None if block is None else block.value
    return float(tensor)


@rule("scatter.value")
def scatter(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """One value into a tensor of one value at known places: a mask that routers make of floats and
    count."""
    tensor, dim, index, value = args[:4]
    block = recorder.owned(tensor)
    if (
        not tensor.is_meta
        or index.is_meta
        or block is None
        or block.value is None
        or tensor.numel() > recorder.real_limit
        or kwargs
    ):
        return into_zeros(recorder, func, args, kwargs)
    return True, torch.full(tensor.shape, block.value, dtype=tensor.dtype).scatter(
        dim, index, value
    )


@rule("histc")
def histc(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Of integers: CUDA counts them, the CPU kernel takes floats only."""
    source = args[0]
    if source.is_meta or source.dtype.is_floating_point or not recorder.device.owns(source):
        return NO
    return True, func(source.float(), *args[1:], **kwargs).to(source.dtype)


@rule("_to_copy")
def to_copy(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Onto the GPU where it is already: the real `to` would have returned the tensor itself. A mask
    made of floats gets its values back."""
    tensor, device = args[0], kwargs.get("device")
    kind = kwargs.get("dtype")
    if (
        tensor.is_meta
        and kind is not None
        and not kind.is_floating_point
        and tensor.numel() <= recorder.real_limit
    ):
        block = recorder.owned(tensor)
        if (
            block is not None
            and block.value is not None
            and (device is None or torch.device(device).type in (recorder.device.type, "meta"))
        ):
            return True, torch.full(
                tensor.shape, block.value, dtype=kind
            )  # its values are known: it becomes real
    if device is None:
        return NO
    target = torch.device(device).type
    dtype = kwargs.get("dtype") or tensor.dtype
    if (
        target == recorder.device.type
        and recorder.device.owns(tensor)
        and dtype == tensor.dtype
        and kwargs.get("memory_format") in (None, torch.preserve_format)
    ):
        return True, aten.alias.default(tensor)
    return NO


@rule("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr")
def fused_step(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Kernels that work in place, and that torch has no meta function for
    (ATen/native/cuda/fused_sgd_impl.cu)."""
    return (True, None) if args[0] and args[0][0].is_meta else NO


@rule("_local_scalar_dense")
def value(recorder: Any, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """A value that does not exist: 1.0 for a float (a loss, a norm) unless the program set it,
    False for a truth value."""
    tensor = args[0]
    if not tensor.is_meta:
        return NO
    if tensor.dtype.is_floating_point:
        block = recorder.owned(tensor)
        return True, 1.0 if block is None or block.value is None else block.value
    if tensor.dtype == torch.bool:
        block = recorder.owned(tensor)
        return True, False if block is None or block.value is None else bool(block.value)
    raise InputError.one(
        (f"the model's code reads an integer of {list(tensor.shape)} that depends on data"),
        where=recorder.modules[-1] if recorder.modules else "",
    )
