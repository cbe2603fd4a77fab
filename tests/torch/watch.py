"""Live bytes as the dispatcher sees them, on real tensors, and the same of a tape: what kernels
take for themselves is in neither."""

from __future__ import annotations

from typing import Any

from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import torch
from memfit.tape import Alloc, Free, Mark, Tape

WITHOUT = (
    "FakeTensor",
    "AsyncCollectiveTensor",
)  # memory of their own: DTensor asks for shapes, and what wraps another has the other's


class Watch(TorchDispatchMode):
    """Live bytes after every operation, and the most of each phase."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, StorageWeakRef] = {}
        self.peaks: dict[str, int] = {}
        self.phase = "load"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, (DTensor, AsyncCollectiveTensor)) for one in types):
            return NotImplemented  # the tensors in them come by
        out = func(*args, **(kwargs or {}))
        for one in tree_iter((args, kwargs, out)):
            if (
                isinstance(one, torch.Tensor)
                and one.device.type == "cpu"
                and type(one).__name__ not in WITHOUT
            ):
                storage = one.untyped_storage()
                if storage._cdata not in self.known or self.known[storage._cdata].expired():
                    self.known[storage._cdata] = StorageWeakRef(storage)
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.live())
        return out

    def live(self) -> int:
        self.known = {key: ref for key, ref in self.known.items() if not ref.expired()}
        storages = [
            torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.known.values()
        ]
        return sum(storage.nbytes() for storage in storages if storage is not None)


def told(tape: Tape, workspace: bool = False) -> dict[str, int]:
    """The same of a tape, without what CUDA's kernels take for themselves, or with it."""
    live, phase = 0, "load"
    sizes: dict[int, int] = {}
    peaks: dict[str, int] = {}
    for event in tape:
        if type(event) is Alloc and (workspace or event.part != "workspace"):
            sizes[event.id] = event.size
            live += event.size
            peaks[phase] = max(peaks.get(phase, 0), live)
        elif type(event) is Free:
            live -= sizes.get(event.id, 0)
        elif type(event) is Mark:
            phase = f"{event.phase} {event.step}"
            peaks[phase] = max(peaks.get(phase, 0), live)
    return peaks
