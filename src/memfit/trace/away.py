"""Activations on the host between the passes: TRL's own code, or torch's, with streams of the pretended GPU and a host that has no values."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from memfit.job import Job
from memfit.optimizers import OPTIMIZERS
from memfit.tape import Comm, Sync, Trim
from memfit.trace import cuda, streams
from memfit.trace.recorder import Recorder
from memfit.trace.sides import GPU, VOID, Sides, void_asked
from memfit.trace.spread import layers_of

ADDRESS = 48  # bits of an offset within a block
Around = Callable[[], contextlib.AbstractContextManager[Any]]  # of a training step


class Away(Sides):
    """A recorder for programs that keep activations on the host: those have no values there, and copies both ways are told."""

    def brings(self, count: int) -> bool:
        return count == 1

    def side_of(self, func: Any, args: Any, kwargs: Any) -> str:
        """DDP's buckets are asked for while nothing runs yet."""
        found = super().side_of(func, args, kwargs)
        return GPU if found == VOID and not void_asked() else found

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        name = func._schema.name
        if name in ("aten::copy_", "aten::_to_copy") and isinstance(source := args[0 if name == "aten::_to_copy" else 1], torch.Tensor):
            before = self.device.owns(source)
            result = super().dispatch(func, args, kwargs)
            if before != self.device.owns(result) and result.numel() > 1:
                op = "to_host" if before else "to_device"
                self.events.append(Comm(op, result.numel() * result.element_size(), 1, "host", stream=self.stream))
            return result
        return super().dispatch(func, args, kwargs)


@contextlib.contextmanager
def engaged(recorder: Recorder, job: Job, followed: bool) -> Iterator[None]:
    """Streams, where nobody follows them yet; addresses, of which a meta tensor has none: every block has one of its own, which no later one gets. (On
    a GPU TRL takes a new tensor for one that has left if it gets its address while the copy of that is on its way, and keeps it there.)"""
    if not isinstance(recorder, Away):
        yield
        return
    true = torch.UntypedStorage.data_ptr
    packed = job.quantization != "none" or "bitsandbytes" in OPTIMIZERS[job.optimizer].cite  # else nobody need have it installed

    def address(self: Any) -> int:
        block = recorder.blocks.get(self._cdata)
        return true(self) if self.device.type != "meta" else -int(self._cdata) if block is None else block.id << ADDRESS

    with contextlib.ExitStack() as stack:
        if not followed:
            stack.enter_context(streams.followed(recorder))
        answers: list[tuple[Any, str, Any]] = [
            (torch.UntypedStorage, "data_ptr", address), (torch.cuda, "empty_cache", lambda: recorder.events.append(Trim()) if packed else None),
            (torch.cuda.Stream, "synchronize", lambda self: recorder.events.append(Sync(1 - min(1, self.stream_id), self.stream_id))),
        ]  # fmt: skip
        stack.enter_context(cuda.patched(answers))
        yield


def wrapped(model: Any, job: Job) -> Around:
    """What stands around a training step; or each layer gets torch's wrapper, and nothing does."""
    if not job.training or job.activation_offload == "none":
        return contextlib.nullcontext
    if job.activation_offload == "all":
        return lambda: torch.autograd.graph.save_on_cpu(pin_memory=True)
    if job.activation_offload == "wrapper":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

        layers = layers_of(model)
        for place, layer in enumerate(layers):
            layers[place] = offload_wrapper(layer)
        return contextlib.nullcontext
    library = importlib.import_module("trl.models.activation_offloading")
    context = library.get_act_offloading_ctx_manager(model=model)
    return lambda: context


__all__ = ["Around", "Away", "engaged", "wrapped"]
