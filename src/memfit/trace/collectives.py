"""Collectives of the simulated GPU: nothing is sent, each call becomes a `Comm`, and its buffers
stay until the program waits for it.

In-place ones (`c10d::`) have no kernel for meta tensors, the functional ones have (torch 2.13
torch/distributed/_functional_collectives.py).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from memfit.tape import Comm
from memfit.trace import gloo
from memfit.trace.ops import collect
from memfit.trace.recorder import Recorder
from memfit.trace.rules import NO, RULES

SPACES = ("c10d", "_c10d_functional", "_dtensor")
IN_A_COPY = {
    f"_c10d_functional::{name}" for name in ("all_reduce", "all_reduce_coalesced", "broadcast")
}
PENDING = 1  # the stream that stands for NCCL's own, where asynchronous collectives run


@functools.cache
def install() -> None:
    """Rules for every operator of the collectives' namespaces, once a process."""
    import torch.distributed._functional_collectives
    import torch.distributed.fsdp
    import torch.distributed.tensor

    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        if space in SPACES:
            func = getattr(
                getattr(getattr(torch.ops, space), name), schema.overload_name or "default"
            )
            RULES.setdefault(func, OWN.get(name, in_place if space == "c10d" else functional))
    RULES.setdefault(torch.ops.fsdp.chunk_cat.default, reduced)
    gloo.install()


def in_place(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """`c10d::`: the result is what was passed in, and a work that is done. (There is no kernel for
    meta tensors, and the work of the fake group has no result, which DDP reads.)"""
    tensors = tensors_of(args)
    if not any(one.is_meta for one in tensors):
        return NO
    note(recorder, func, args, tensors)
    work = done(tensors)
    returns = len(func._schema.returns)
    return True, (args[0], work) if returns == 2 else work if returns == 1 else None


def done(tensors: list[torch.Tensor]) -> Any:
    """A work that is."""
    from torch._C._distributed_c10d import _create_work_from_future

    future: Any = torch.futures.Future()
    future.set_result(tensors)
    return _create_work_from_future(future).boxed()


def functional(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """`_c10d_functional::`: a fresh result, and the operand held until that is waited for
    (ProcessGroupNCCL `WorkNCCL::stash`). A sum is one of a copy, which is the result
    (Functional.cpp `all_reduce`)."""
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
    """The result as torch hands it on: it is waited for by the first who uses it. (Meta tensors it
    leaves as they are.)"""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return (True, AsyncCollectiveTensor(args[0])) if args[0].is_meta else NO


def told(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Numbers that ranks tell each other, how many rows each sends: every rank is taken to choose
    experts as this one does, and this one to receive `imbalance` times its share."""
    target, source = args[:2]
    group = group_in(func, args)
    if target.is_meta or source.is_meta or group is None:
        return in_place(recorder, func, args, kwargs)
    own = source.view(group.size(), -1)[group.rank()]
    target.view(group.size(), -1).copy_(
        (own * recorder.imbalance).ceil().to(target.dtype).expand(group.size(), -1)
    )
    note(recorder, func, args, [target, source])
    return True, done([target])


OWN = {"alltoall_base_": told, "wait_tensor": waited, "_wrap_tensor_autograd": wrapped}


def note(recorder: Recorder, func: Any, args: Any, tensors: list[torch.Tensor]) -> None:
    """The size is that of the whole: of what is gathered, scattered or reduced."""
    name, ranks = group_of(func, args)
    wide = max((one.numel() * one.element_size() for one in tensors), default=0)
    if func._schema.name.endswith(("coalesced", "coalesced_", "allgather_", "reduce_scatter_")):
        wide = max(
            sum(one.numel() * one.element_size() for one in tensors_of([part]))
            for part in args
            if isinstance(part, (list, tuple))
        )
    where = recorder.modules[-1] if recorder.modules else recorder.last_node[1]
    op = func._schema.name.partition("::")[2].strip("_")
    recorder.events.append(
        Comm(op, wide, ranks, recorder.groups.get(name, name), where, recorder.stream)
    )


def group_of(func: Any, args: Any) -> tuple[str, int]:
    """Name and size of the process group that an operator is called with."""
    group = group_in(func, args)
    return ("", 1) if group is None else (group.group_name, group.size())


def group_in(func: Any, args: Any) -> Any:
    from torch._C._distributed_c10d import ProcessGroup
    from torch.distributed.distributed_c10d import _resolve_process_group

    for value, argument in zip(args, func._schema.arguments, strict=False):
        if argument.name in ("process_group", "group_name"):
            group = _resolve_process_group(value) if isinstance(value, str) else value
            return group if isinstance(group, ProcessGroup) else ProcessGroup.unbox(group)
    return None


def tensors_of(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    collect(values, found)
    return found


__all__ = ["install"]
