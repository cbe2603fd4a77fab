"""One rank of several: a process group that sends nothing, its mesh, and what the libraries ask of
a machine with many GPUs.

The group is torch's own `fake` one (torch 2.13 torch/testing/_internal/distributed/fake_pg.py).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from memfit.errors import Problem
from memfit.job import Job
from memfit.parallel.context.check import by_heads, by_sdpa
from memfit.parallel.tensor.check import COLUMNS, ROWS, adapted, masked
from memfit.strategy import ORDER, TP, Strategy
from memfit.techniques.base import names
from memfit.trace import alike, collectives, cuda, experts, flat, stages, streams, zero
from memfit.trace.origins import origin
from memfit.trace.recorder import Recorder

SERVED = ("ddp", "fsdp", "zero", "tp", "cp", "pp", "ep")
ALONE = threading.Lock()  # a process has one default group


def refusals(job: Job, strategy: Strategy) -> Iterator[Problem]:
    """What of a strategy the trace has no code for, all at once."""
    if not strategy:
        return
    for name, _ in strategy.uses():
        if name not in SERVED and strategy.engages(name):
            yield Problem(
                message=f"not supported yet by a trace: layout `{name}`",
                where="use",
                hint="one of " + ", ".join(SERVED),
            )
    if strategy.rank >= strategy.ranks:
        yield Problem(
            message=(f"rank {strategy.rank} does not exist: the layout has {strategy.ranks} ranks"),
            where="rank",
            hint="ranks start at 0",
        )
    if strategy.fsdp is not None and (
        job.quantization == "int8" or (job.quantization != "none" and not strategy.fsdp.packed)
    ):
        hint = "use nf4 with a float `bnb_4bit_quant_storage`"
        yield Problem(
            message="a trace cannot shard weights stored as bytes",
            where="job.quant",
            hint=hint,
        )
    if strategy.zero is not None:
        yield from zero.refusals(job, strategy)
    if strategy.cp is not None:
        yield from of_sequences(job, strategy)
    if strategy.pp is not None:
        yield from stages.refusals(job, strategy)
    if strategy.tp is not None:
        yield from of_tensors(job, strategy.tp)
        if strategy.ddp is not None and strategy.fsdp is None:
            yield Problem(
                message="DDP does not support DTensors",
                where="use ddp",
                hint="use `fsdp` with `tp`, as torchtitan and accelerate do",
            )
    if strategy.size("ep") > 1:
        yield from experts.refusals(job, strategy)
    if not job.training and {name for name, layout in strategy.uses() if layout.size > 1} - {
        "tp",
        "ep",
    }:
        yield Problem(
            message="a trace on several GPUs supports training only",
            where="job.mode",
            hint="remove `use`",
        )


def of_sequences(job: Job, strategy: Strategy) -> Iterator[Problem]:
    """torch's context parallelism as the Trainer and accelerate have it, or DeepSpeed's by
    heads."""
    if strategy.cp is not None and strategy.cp.style == "ulysses":
        yield from by_heads(job, strategy)
        return
    if strategy.fsdp is None or strategy.ddp is not None or strategy.tp is not None:
        message = "a trace supports context parallelism with FSDP2 only"
        yield Problem(
            message=message,
            where="use cp",
            hint="use `cp=2,fsdp=4`, as accelerate and torchtitan do",
        )
    yield from by_sdpa(job)
    if job.attention == "math":
        yield Problem(
            message=("torch's context parallelism needs causal SDPA, without the math kernel"),
            where="job.attention",
            hint="`sdpa`",
        )
    if strategy.cp is not None and job.seq % (2 * strategy.cp.size):
        message = f"{2 * strategy.cp.size} chunks do not divide {job.seq} tokens"
        yield Problem(
            message=message,
            where="job.seq",
            hint="every rank needs two chunks of each sequence",
        )


def of_tensors(job: Job, tp: TP) -> Iterator[Problem]:
    if tp.style == "megatron":
        yield Problem(
            message="a trace runs DTensor's tensor parallelism, not Megatron's",
            where="use tp.style",
            hint="use `dtensor` or `transformers`",
        )
    if tp.style == "transformers" and (tp.sequence or tp.parallel_loss):
        yield Problem(
            message="transformers' own plan has no `sequence` or `parallel_loss`",
            where="use tp.style",
            hint="use `dtensor`",
        )
    if tp.sequence and not tp.vocabulary:
        yield Problem(
            message="sequence parallelism needs a sharded embedding",
            where="use tp.vocabulary",
            hint="remove `vocabulary`",
        )
    yield from masked(job, tp, set())
    yield from adapted(
        job, tp, COLUMNS | ROWS if job.targets == "all-linear" else frozenset(names(job.targets))
    )


@contextlib.contextmanager
def group(strategy: Strategy, device: str) -> Iterator[Any]:
    """The mesh of `strategy` over a group of its size, seen from its rank; None where there is one
    rank."""
    if not strategy:
        yield None
        return
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with ALONE:
        dist.init_process_group(
            "fake", rank=strategy.rank, world_size=strategy.ranks, store=FakeStore()
        )
        try:
            yield mesh_of(strategy, device)
        finally:
            dist.destroy_process_group()
            forget()


def forget() -> None:
    """DTensor remembers what it did on a mesh like this one, and with it the groups that are gone
    (torch 2.13 distributed/tensor/)."""
    from torch.distributed.tensor import DTensor, _redistribute

    remembered = (
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None),
        getattr(
            DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding, "cache_clear", None
        ),
        getattr(getattr(_redistribute, "_gen_transform_infos", None), "cache_clear", None),
    )
    for clear in remembered:
        if clear is not None:
            clear()


def mesh_of(strategy: Strategy, device: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    names = [
        name
        for name in reversed(ORDER)
        if getattr(strategy, name) is not None or (name == "tp" and strategy.size("ep") > 1)
    ]
    return init_device_mesh(
        device, tuple(strategy.size(name) for name in names), mesh_dim_names=tuple(names)
    )


def coordinates(strategy: Strategy) -> dict[str, int]:
    """Where `strategy.rank` stands along each layout."""
    rest, found = strategy.rank, {}
    for name in ORDER:
        rest, found[name] = divmod(rest, strategy.size(name))
    return found


@contextlib.contextmanager
def followed(recorder: Recorder, mesh: Any) -> Iterator[None]:
    """What many GPUs add to a program: streams, collectives, storages that are emptied and filled,
    sharding that is worked out on the side."""
    if mesh is None:
        yield
        return
    collectives.install()
    recorder.origin = origin
    for name in mesh.mesh_dim_names:
        recorder.groups[mesh.get_group(name).group_name] = name
    with (
        streams.followed(recorder),
        cuda.patched(
            [*storages(recorder), *aside(recorder), *strides(), *stages.settled(recorder)]
        ),
    ):
        yield


def storages(recorder: Recorder) -> list[tuple[Any, str, Any]]:
    true = torch.UntypedStorage.resize_

    def resize(self: Any, size: int) -> Any:
        found = true(self, size)
        if not cuda.INSIDE.depth and self.device.type == "meta":
            recorder.resized(self, size)
        return found

    def bytes_of(_: Any, size: Sequence[int], *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Of several dtypes bytes are gathered, which are no small integers to compute with."""
        made: torch.Tensor = torch.ops.aten.empty.memory_format(size, dtype=dtype, device="meta")
        return made

    importlib.import_module("torch.distributed.fsdp")

    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    mixin = getattr(module, "DefaultAllocMixin", None)  # of newer torch
    return [
        (torch.UntypedStorage, "resize_", resize),
        *([] if mixin is None else [(mixin, "allocate", bytes_of)]),
    ]


def aside(recorder: Recorder) -> list[tuple[Any, str, Any]]:
    """DTensor asks what an operator returns by running it on tensors of its own: no allocation of
    the program's."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import _disable_current_modes

    true = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate(self: Any, schema: Any) -> Any:
        first = schema.args_schema[0] if schema.args_schema else None
        known = getattr(first, "tensor_meta", None)
        reshapes = torch.Tag.inplace_view in schema.op.tags  # as `squeeze_` does
        if schema.op._schema.name.endswith("_") and known is not None and not reshapes:
            return known  # in place: the result is what was there
        cuda.INSIDE.depth += 1
        try:
            with _disable_current_modes():
                return true(self, schema)
        finally:
            cuda.INSIDE.depth -= 1

    found: list[tuple[Any, str, Any]] = [
        (ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate)
    ]
    true_new = AsyncCollectiveTensor.__new__

    def new(cls: Any, elem: torch.Tensor) -> Any:
        cuda.INSIDE.depth += 1  # a wrapper lies where its tensor truly is
        try:
            return true_new(cls, elem)
        finally:
            cuda.INSIDE.depth -= 1

    found.append((AsyncCollectiveTensor, "__new__", staticmethod(new)))
    found += [*alike.answers(), *flat.answers()]
    found += recorder.answers()
    # DDP compares with the other ranks how many parameters there are: a few numbers, sent and read
    found.append(
        (
            torch.nn.parallel.distributed,
            "_verify_param_shape_across_processes",
            lambda *_, **__: None,
        )
    )
    return found


def strides() -> list[tuple[Any, str, Any]]:
    """Tensors whose strides alone are asked for (transformers 5.23
    distributed/tensor_parallel.py) never are on the GPU."""
    from torch.utils._python_dispatch import _disable_current_modes

    true = torch.empty

    def empty(*size: Any, **given: Any) -> torch.Tensor:
        if cuda.INSIDE.depth or str(given.get("device")) != "meta":
            return true(*size, **given)
        with _disable_current_modes():
            return true(*size, **given)

    return [(torch, "empty", empty)]


__all__ = ["coordinates", "followed", "group"]
