"""What a trace cannot follow is named with the line of the user's code; what it need not follow is
left out, with a note."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch.utils.data

import torch
from memfit.errors import Problem
from memfit.trace import guards, lines
from memfit.trace.recorder import Block
from memfit.trace.sides import Sides

aten = torch.ops.aten
TORCH = str(Path(torch.__file__).parent)
INF = float("inf")


class CannotFollow(BaseException):
    """Not an `Exception`: programs catch those and go on with another way of theirs."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.problem = Problem(message=message, where=lines.running(sys._getframe(1)), hint=hint)


class Watcher(Sides):
    """A recorder that judges every number a program reads from the GPU."""

    def __init__(self, device: Any, skew: float = 1.0) -> None:
        super().__init__(device, skew)
        self.notes: dict[str, Problem] = {}
        self.truth = False  # of a condition whose value nobody knows

    def note(self, kind: str, message: str, hint: str = "") -> None:
        """The first of its kind is told."""
        if kind not in self.notes:
            self.notes[kind] = Problem(
                message=message, where=lines.running(), hint=hint, level="note"
            )

    def assume(self, kind: str, message: str, where: str = "", hint: str = "") -> None:
        """Told with the line of the script; options are not a script's to set."""
        self.note(kind, message)

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return self.read(args[0])
        if func is aten._pack_padded_sequence.default and args[0].is_meta:
            return self.packed(*args)
        return super().dispatch(func, args, kwargs)

    def packed(self, padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
        """Only what is no padding; how many sequences reach each place stays on the CPU."""
        lengths = lengths if not lengths.is_meta else torch.full(lengths.shape, padded.shape[1])
        longest = int(lengths.max())
        sizes = (lengths[:, None] > torch.arange(longest)).sum(0)
        shape = (int(lengths.sum()), *padded.shape[2:])
        data = torch.empty(shape, dtype=padded.dtype, device="meta")
        if not self.device.owns(padded):
            return self.apart(data), sizes
        return self.seen(aten._pack_padded_sequence.default, (), {}, data, True), sizes

    def read(self, tensor: torch.Tensor) -> float | bool:
        """A float that nobody knows is 1.0, a truth value False in a library; where one's own code
        depends on it, there is no going on."""
        block = self.owned(tensor)
        known = None if block is None else block.value
        kind = tensor.dtype
        if known is not None:
            return (
                bool(known)
                if kind == torch.bool
                else known
                if kind.is_floating_point
                else int(known)
            )
        if kind.is_floating_point:
            if reader_is_user():
                self.note(
                    "value",
                    (
                        "numbers computed on the GPU are assumed to be 1.0 where the script "
                        "reads them"
                    ),
                )
            return 1.0
        if kind == torch.bool:
            return self.condition()
        self.note(
            "integer",
            "integers computed on the GPU are assumed to be 1 where the script reads them",
        )
        return 1

    def condition(self) -> bool:
        """The answer to a condition whose value nobody knows. A check goes through, unless the user
        asked for conditions of the script that are true."""
        reader = None if self.truth and reader_is_user() else reading_frame()
        passing = None if reader is None else guards.passing(reader)
        if reader is not None and passing is not None:
            message = (
                "checks of values on the GPU, which would stop the script, are assumed to pass"
            )
            self.note("guard", message)
            return passing
        if not reader_is_user():
            return False
        answer = "true" if self.truth else "false"
        message = (
            f"conditions computed on the GPU are assumed to be {answer} where the script reads them"
        )
        self.note("truth", message, "choose with `--assume true` or `--assume false`")
        return self.truth

    def constant(self, result: torch.Tensor, func: Any, args: Any, kwargs: Any) -> None:
        """Beside filled tensors: losses are taken to be finite."""
        super().constant(result, func, args, kwargs)
        judge = KNOWN.get(func)
        block = self.owned(result) if judge is not None else None
        if judge is not None and block is not None:
            block.value = judge([self.value(one) for one in args[:2]], args)

    def value(self, one: Any) -> float | None:
        if isinstance(one, torch.Tensor):
            block: Block | None = self.owned(one)
            return None if block is None else block.value
        return float(one) if isinstance(one, (int, float)) else None


def product(values: list[float | None], _: Any) -> float | None:
    return None if None in values else float(bool(values[0]) and bool(values[1]))


Judge = Callable[[list[float | None], Any], float | None]
KNOWN: dict[Any, Judge] = {
    aten.ne.Scalar: lambda values, args: 1.0 if values[1] in (INF, -INF) else None,
    aten.eq.Scalar: lambda values, args: 0.0 if values[1] in (INF, -INF) else None,
    aten.eq.Tensor: lambda values, args: 1.0 if args[0] is args[1] else None,
    aten.ne.Tensor: lambda values, args: 0.0 if args[0] is args[1] else None,
    aten.mul.Tensor: lambda values, args: (
        product(values, args) if args[0].dtype == torch.bool else None
    ),
    aten.logical_and.default: product,
    aten.bitwise_and.Tensor: product,
    aten.logical_or.default: lambda values, args: None if None in values else float(any(values)),
    aten.bitwise_or.Tensor: lambda values, args: None if None in values else float(any(values)),
    aten.logical_not.default: lambda values, args: None if values[0] is None else 1.0 - values[0],
    aten.bitwise_not.default: lambda values, args: (
        None if values[0] is None or args[0].dtype != torch.bool else 1.0 - values[0]
    ),
    **dict.fromkeys(
        (aten.any.default, aten.all.default, aten.any.dim, aten.all.dim),
        lambda values, args: values[0],
    ),
}


def reading_frame() -> FrameType | None:
    """The code that reads a value: the user's, or that of a library which the user called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith((lines.OWN, TORCH, "<")):
            return frame
        frame = frame.f_back
    return None


def reader_is_user() -> bool:
    """Whether the value is read by the user's own code, not by a library that it called."""
    frame = reading_frame()
    return frame is not None and lines.is_users(frame.f_code.co_filename)


GRAPH = "the script captures a CUDA graph, which a trace does not support"
LOADER = (  # the order of DataLoader's arguments, torch 2.4 to 2.13
    "dataset",
    "batch_size",
    "shuffle",
    "sampler",
    "batch_sampler",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
)
ALONE = {
    "num_workers": 0,
    "pin_memory": False,
    "persistent_workers": False,
    "prefetch_factor": None,
    "multiprocessing_context": None,
    "timeout": 0,
}


def refusing(what: str, hint: str = "") -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise CannotFollow(what, hint)

    return refuse


def patches(recorder: Watcher) -> list[tuple[Any, str, Any]]:
    """Ways out of what a dispatcher sees, closed; workers and compilers, left out."""
    true_loader = torch.utils.data.DataLoader.__init__

    def compiled(model: Any = None, **given: Any) -> Any:
        if model is None:
            return lambda one: compiled(one, **given)
        recorder.note(
            "compile",
            "`torch.compile` is ignored: the trace runs the same code eagerly; compiled runs "
            "usually need less",
        )
        return model

    @functools.wraps(true_loader)  # Lightning reads its arguments' names
    def loader(self: Any, *args: Any, **given: Any) -> None:
        """Workers and page-locked memory change nothing on the GPU."""
        given |= dict(zip(LOADER, args, strict=False))
        true_loader(
            self, **{**given, **{key: value for key, value in ALONE.items() if key in given}}
        )

    def equal(true: Any) -> Any:
        """A comparison whose answer is a Python value."""

        def compare(one: torch.Tensor, other: torch.Tensor, *args: Any, **given: Any) -> Any:
            if not (one.is_meta or other.is_meta):
                return true(one, other, *args, **given)
            return one is other or recorder.condition()

        return compare

    def replicated(self: Any, *args: Any, **given: Any) -> Any:
        """`nn.DataParallel` over the one GPU: what is on the CPU is brought there."""
        if len(self.device_ids or ()) > 1:
            raise CannotFollow(
                "the script spreads a model over several GPUs by `nn.DataParallel`",
                "name one GPU, or use DistributedDataParallel",
            )
        return self.module(*brought(args), **brought(given))

    true_item = torch.Tensor.item

    def item(self: Any) -> Any:
        """The one place that a mask selects, where it is assumed to select all."""
        several = self.is_meta and self.numel() > 1 and "mask" in recorder.notes
        return true_item(self.flatten()[0] if several else self)

    true_script = torch.jit.script

    def scripted(one: Any, *args: Any, **given: Any) -> Any:
        """What TorchScript cannot compile, because functions of torch are wrapped here, runs as it
        is."""
        try:
            return true_script(one, *args, **given)
        except Exception:  # noqa: BLE001 - its errors are of many kinds
            return one

    return [
        (torch.jit, "script", scripted),
        (torch.nn.DataParallel, "forward", replicated),
        (torch.jit, "trace", lambda function, *_, **__: function),  # it compares values
        (torch.Tensor, "item", item),
        (torch.Tensor, "share_memory_", lambda self: self),
        # Whether parameters of a distribution are legal depends on their values
        (torch.distributions.Distribution, "_validate_args", False),
        *(
            (owner, name, equal(getattr(owner, name)))
            for owner in (torch, torch.Tensor)
            for name in ("allclose", "equal")
        ),
        (torch, "compile", compiled),
        (torch.nn.Module, "compile", lambda self, *_, **__: compiled(self) and None),
        (torch.utils.data.DataLoader, "__init__", loader),
        (torch.cuda, "CUDAGraph", type("CUDAGraph", (), {"__init__": refusing(GRAPH)})),
        (torch.cuda, "make_graphed_callables", refusing(GRAPH)),
    ]


def brought(value: Any) -> Any:
    """Every tensor in it on the GPU."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, dict):
        return {key: brought(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(brought(one) for one in value)
    return value


def extensions(module: Any) -> list[tuple[Any, str, Any]]:
    """For `torch.utils.cpp_extension`, once it is imported."""
    hint = "its allocations are unknown"
    return [
        (
            module,
            name,
            refusing("the script builds a CUDA extension, which a trace does not support", hint),
        )
        for name in ("load", "load_inline")
    ]


__all__ = ["CannotFollow", "Watcher", "extensions", "patches"]
