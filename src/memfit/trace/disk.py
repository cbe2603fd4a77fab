"""DeepSpeed's offload to NVMe without a disk: its swappers' own Python over a handle that takes
every read and write for done."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from memfit.trace.sides import Sides


class Module:
    """What `AsyncIOBuilder` would compile (deepspeed 0.19.8 ops/csrc/aio/py_lib/py_ds_aio.cpp)."""

    def __init__(self, recorder: Sides) -> None:
        locked: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

        class Handle:
            """Buffers that are locked are known by their storages; requests are counted until
            somebody waits."""

            def __init__(self, *_: Any, **__: Any) -> None:
                self.pending = 0

            def get_alignment(self) -> int:
                # bytes: one thread, and the file system's blocks (runtime/swap_tensor/utils.py
                # MIN_AIO_BYTES)
                return 1024

            def new_cpu_locked_tensor(self, count: int, example: torch.Tensor) -> torch.Tensor:
                made = recorder.apart(torch.empty(int(count), dtype=example.dtype, device="cpu"))
                locked[made.untyped_storage()._cdata] = made.untyped_storage()
                return made

            def free_cpu_locked_tensor(self, buffer: torch.Tensor) -> bool:
                return locked.pop(buffer.untyped_storage()._cdata, None) is not None

            def is_pinned(self, buffer: torch.Tensor) -> bool:
                return buffer.untyped_storage()._cdata in locked

            def async_pread(self, *_: Any) -> int:
                self.pending += 1
                return 0

            async_pwrite = async_pread

            def wait(self) -> int:
                done, self.pending = self.pending, 0
                return done

        self.aio_handle = Handle


class Builder:
    """In place of `AsyncIOBuilder`, of which there is one for each accelerator."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def __call__(self) -> Builder:
        return self

    def load(self, **_: Any) -> Module:
        return self.module


def answers(recorder: Sides) -> list[tuple[Any, str, Any]]:
    from deepspeed.runtime.swap_tensor import (
        optimizer_utils,
        partitioned_optimizer_swapper,
        partitioned_param_swapper,
        pipelined_optimizer_swapper,
    )

    class Context(optimizer_utils.SwapTensorContext):
        """A state that is away is an empty tensor, of the kind that it is when it is there."""

        def __init__(self, tensor: torch.Tensor, swap_folder: str) -> None:
            super().__init__(tensor, swap_folder)
            self.swap_tensor = nothing(recorder)

        def release_memory(self) -> None:
            self.compute_tensor.data = nothing(recorder)
            self.swap_tensor.data = nothing(recorder)

    builder = Builder(Module(recorder))
    users = (partitioned_optimizer_swapper, partitioned_param_swapper, pipelined_optimizer_swapper)
    return [
        (optimizer_utils, "SwapTensorContext", Context),
        *((one, "AsyncIOBuilder", builder) for one in users),
    ]


def nothing(recorder: Sides) -> torch.Tensor:
    return recorder.apart(torch.empty_strided((2,), (1,), device="meta"))[:0]


__all__ = ["answers"]
