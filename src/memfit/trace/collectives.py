"""Collectives of the pretended GPU: nothing is sent, each call becomes a `Comm`, and what the real one holds until it is waited for is held.

In-place ones (`c10d::`) have no kernel for meta tensors, the functional ones have (torch 2.13 torch/distributed/_functional_collectives.py).
"""

from __future__ import annotations

from typing import Any

import torch
from memfit.tape import Comm
from memfit.trace import gloo
from memfit.trace.ops import collect
from memfit.trace.recorder import Recorder
from memfit.trace.rules import NO, RULES

SPACES = ("c10d", "_c10d_functional", "_dtensor")
IN_A_COPY = {f"_c10d_functional::{name}" for name in ("all_reduce", "all_reduce_coalesced", "broadcast")}
PENDING = 1  # the stream that stands for NCCL's own, where asynchronous collectives run


def install() -> None:
    """Rules for every operator of the collectives' namespaces, once a process."""
    import torch.distributed._functional_collectives
    import torch.distributed.fsdp
    import torch.distributed.tensor

    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        if space in SPACES:
            func = getattr(getattr(getattr(torch.ops, space), name), schema.overload_name or "default")
            RULES.setdefault(func, OWN.get(name, in_place if space == "c10d" else functional))
    RULES.setdefault(torch.ops.fsdp.chunk_cat.default, reduced)
    gloo.install()


def in_place(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """`c10d::`: the result is what was passed in, and a work that is done. (There is no kernel for meta tensors, and the work of the
    fake group has no result, which DDP reads.)"""
    tensors = tensors_of(args)
    if not any(one.is_meta for one in tensors):
        return NO
    from torch._C._distributed_c10d import _create_work_from_future

    note(recorder, func, args, tensors)
    future: Any = torch.futures.Future()
    future.set_result(tensors)
    work = _create_work_from_future(future).boxed()
    returns = len(func._schema.returns)
    return True, (args[0], work) if returns == 2 else work if returns == 1 else None


def functional(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """`_c10d_functional::`: a fresh result, and the operand held until that is waited for (ProcessGroupNCCL `WorkNCCL::stash`). A sum is one of
    a copy, which is the result (Functional.cpp `all_reduce`)."""
    tensors = tensors_of(args)
    if not any(one.is_meta for one in tensors):
        return NO
    result = func(*args, **kwargs)
    results = tensors_of([result])
    note(recorder, func, args, [*tensors, *results])
    for one in results:
        if func._schema.name not in IN_A_COPY:
            recorder.waiting[one.untyped_storage()._cdata] = tensors
        recorder.tensor(one, func, True)
    return True, result


def waited(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    tensor = args[0]
    if not tensor.is_meta:
        return NO
    recorder.waiting.pop(tensor.untyped_storage()._cdata, None)
    return True, tensor


def reduced(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Whole gradients on their way into FSDP2's reduction."""
    for one in args[0]:
        block = recorder.owned(one)
        if block is not None and block.part is None:
            block.part = "gradients"
    return NO


def wrapped(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """The result as torch hands it on: it is waited for by the first who uses it. (Meta tensors it leaves as they are.)"""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return (True, AsyncCollectiveTensor(args[0])) if args[0].is_meta else NO


OWN = {"wait_tensor": waited, "_wrap_tensor_autograd": wrapped}


def note(recorder: Recorder, func: Any, args: Any, tensors: list[torch.Tensor]) -> None:
    """The size is that of the whole: of what is gathered, scattered or reduced."""
    name, ranks = group_of(func, args)
    wide = max((one.numel() * one.element_size() for one in tensors), default=0)
    if func._schema.name.endswith(("coalesced", "coalesced_", "allgather_", "reduce_scatter_")):
        wide = max(sum(one.numel() * one.element_size() for one in tensors_of([part])) for part in args if isinstance(part, (list, tuple)))
    where = recorder.modules[-1] if recorder.modules else recorder.last_node[1]
    op = func._schema.name.partition("::")[2].strip("_")
    recorder.events.append(Comm(op, wide, ranks, recorder.groups.get(name, name), where, recorder.stream))


def group_of(func: Any, args: Any) -> tuple[str, int]:
    """Name and size of the process group that an operator is called with."""
    from torch._C._distributed_c10d import ProcessGroup
    from torch.distributed.distributed_c10d import _resolve_process_group

    for value, argument in zip(args, func._schema.arguments, strict=False):
        if argument.name in ("process_group", "group_name"):
            group = _resolve_process_group(value) if isinstance(value, str) else value
            group = group if isinstance(group, ProcessGroup) else ProcessGroup.unbox(group)
            return group.group_name, group.size()
    return "", 1


def tensors_of(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    collect(values, found)
    return found


__all__ = ["install"]
