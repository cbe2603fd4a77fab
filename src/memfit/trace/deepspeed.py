"""DeepSpeed's extensions, which it compiles for a real GPU, in a traced script: the same functions
over the same tensors, which allocate nothing (deepspeed 0.19.8 ops/csrc/)."""

from __future__ import annotations

import types
from types import ModuleType
from typing import Any

from memfit.trace import disk
from memfit.trace.imports import Patch
from memfit.trace.launched_ranks import RankWatcher
from memfit.trace.refuse import CannotFollow

# Optimizers that update in place: names of their extensions, and of the functions there.
IN_PLACE = {
    "fused_adam": ("multi_tensor_adam",),
    "fused_lion": ("multi_tensor_lion",),
    "cpu_adam": ("create_adam", "adam_update", "adam_update_copy", "destroy_adam"),
    "cpu_lion": ("create_lion", "lion_update", "destroy_lion"),
    "cpu_adagrad": ("create_adagrad", "adagrad_update", "destroy_adagrad"),
}


def builders(module: ModuleType, recorder: RankWatcher) -> list[Patch]:
    def load(self: Any, verbose: bool = True) -> Any:
        from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

        if self.name in IN_PLACE:
            return types.SimpleNamespace(
                **{name: lambda *_, **__: None for name in IN_PLACE[self.name]}
            )
        if self.name == "utils":
            return types.SimpleNamespace(
                flatten=_flatten_dense_tensors, unflatten=_unflatten_dense_tensors
            )
        if self.name == "async_io":
            return disk.Module(recorder)
        raise CannotFollow(
            f"DeepSpeed compiles its extension `{self.name}`, which a trace does not support",
            "its allocations are unknown",
        )

    return [
        (module.OpBuilder, "load", load),
        (module.OpBuilder, "is_compatible", lambda *_, **__: True),
        (module, "installed_cuda_version", lambda *_, **__: (12, 8)),
        (module, "assert_no_cuda_mismatch", lambda *_, **__: True),
    ]


__all__ = ["builders"]
