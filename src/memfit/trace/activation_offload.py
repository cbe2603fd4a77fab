"""Activations on the host between the passes: TRL's own code, or torch's, with streams of the
pretended GPU and a host that has no values."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from memfit.job import Job
from memfit.optimizers import OPTIMIZERS
from memfit.tape import Comm, Sync, Trim
from memfit.trace import cuda, stages, streams
from memfit.trace.recorder import Recorder
from memfit.trace.sides import GPU, VOID, Offloaded, Sides, void_asked
from memfit.trace.spread import layers_of

ADDRESS = 48  # bits of an offset within a block
Around = Callable[[], contextlib.AbstractContextManager[Any]]  # of a training step


class Away(Sides):
    """A recorder for programs that keep activations on the host: those have no values there, and
    copies both ways are told, which hooks on saved tensors ask for; an engine beside them has
    copies of its own."""

    around: Around | None = None
    asked = 0  # by hooks, within one another

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
        if (
            self.asked
            and name in ("aten::copy_", "aten::_to_copy")
            and isinstance(source := args[0 if name == "aten::_to_copy" else 1], torch.Tensor)
        ):
            before = self.device.owns(source)
            result = super().dispatch(func, args, kwargs)
            if before != self.device.owns(result) and result.numel() > 1:
                op = "to_host" if before else "to_device"
                self.events.append(
                    Comm(op, result.numel() * result.element_size(), 1, "host", stream=self.stream)
                )
            return result
        return super().dispatch(func, args, kwargs)


@contextlib.contextmanager
def engaged(recorder: Recorder, job: Job, followed: bool) -> Iterator[None]:
    """Streams, where nobody follows them yet; addresses, of which a meta tensor has none: every
    block has one of its own, which no later one gets. (On a GPU TRL takes a new tensor for one that
    has left if it gets its address while the copy of that is on its way, and keeps it there.)"""
    if not isinstance(recorder, Away):
        yield
        return
    true = torch.UntypedStorage.data_ptr
    packed = (
        job.quantization != "none" or "bitsandbytes" in OPTIMIZERS[job.optimizer].cite
    )  # else nobody need have it installed

    def address(self: Any) -> int:
        if self.device.type != "meta":
            return int(true(self))
        block = recorder.blocks.get(self._cdata)
        return (
            0 if not self.nbytes() else -int(self._cdata) if block is None else block.id << ADDRESS
        )

    with contextlib.ExitStack() as stack:
        if not followed:
            stack.enter_context(streams.followed(recorder))
        answers: list[tuple[Any, str, Any]] = [
            (torch.UntypedStorage, "data_ptr", address),
            (torch.cuda, "empty_cache", lambda: recorder.events.append(Trim()) if packed else None),
            (
                torch.cuda.Stream,
                "synchronize",
                lambda self: recorder.events.append(
                    Sync(1 - min(1, self.stream_id), self.stream_id)
                ),
            ),
            (torch.autograd.graph.saved_tensors_hooks, "__init__", hooks_of(recorder)),
        ]
        stack.enter_context(cuda.patched(answers))
        yield


def hooks_of(recorder: Away) -> Callable[..., None]:
    """`saved_tensors_hooks.__init__`, whose hooks the recorder knows of; a checkpoint's run a part
    of the program."""
    true = torch.autograd.graph.saved_tensors_hooks.__init__

    def known(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(given: Any) -> Any:
            recorder.asked += 1
            try:
                return hook(given)
            finally:
                recorder.asked -= 1

        return run

    def init(self: Any, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        copies = (
            isinstance(self, torch.autograd.graph.save_on_cpu)
            or type(self).__name__ == "OffloadActivations"
        )
        true(self, *((known(pack), known(unpack)) if copies else (pack, unpack)))

    return init


def stood(recorder: Recorder, model: Any, job: Job) -> Around:
    """What stands around a training step; or each layer gets torch's wrapper, and nothing does.
    Asked once: before an engine takes the weights, where it takes them from the host."""
    if not job.training or job.activation_offload == "none":
        return contextlib.nullcontext
    if not isinstance(recorder, Away):  # real steps
        return wrapped(model, job)
    if recorder.around is None:
        recorder.around = wrapped(model, job)
    return recorder.around


def wrapped(model: Any, job: Job) -> Around:
    if job.activation_offload == "all":
        return lambda: torch.autograd.graph.save_on_cpu(pin_memory=True)
    if job.activation_offload == "wrapper":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

        for part in (
            [part.whole for part in model.parts] if isinstance(model, stages.Stages) else [model]
        ):
            layers = layers_of(part)
            for place, layer in enumerate(layers):
                layers[place] = offload_wrapper(layer)
        return contextlib.nullcontext
    library = importlib.import_module("trl.models.activation_offloading")
    context = library.get_act_offloading_ctx_manager(model=model)
    return lambda: context


class OfShards(Away, Offloaded):
    """Beside FSDP whose shards stay on the host."""


__all__ = ["Around", "Away", "OfShards", "engaged", "stood"]
