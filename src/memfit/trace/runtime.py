"""CUDA's functions other than tensor operations, answered for the simulated GPU: memory, streams,
events, generators.

`cuda.pretended` answers what the libraries ask during a step; this is the rest, for programs of
which nothing is known.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Hashable
from typing import Any

import torch._streambase

import torch
from memfit.trace import by_example, cuda, older_types
from memfit.trace.live import Live
from memfit.trace.ops import collect

CUDA_VERSION = "12.8"  # where the build of torch has none: what its wheels of 2.7 to 2.10 are for
CUDNN_VERSION = 91002


class Stream:
    """A stream on which nothing waits."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.priority, self.cuda_stream, self.stream_id = (
            cuda.own(),
            priority,
            0,
            0,
        )

    def synchronize(self) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Event:
    """An event that is over as soon as it is recorded; times are those of this machine."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1000

    def synchronize(self) -> None: ...
    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True


STREAM = Stream()
for base, kind in (
    ("_StreamBase", Stream),
    ("_EventBase", Event),
):  # torch 2.4's compiler insists on it when it is imported
    register = getattr(getattr(torch._streambase, base, None), "register", None)
    if register is not None:
        register(kind)


@contextlib.contextmanager
def on(_: Any = None, **__: Any) -> Any:
    """`torch.cuda.stream(s)`, `torch.cuda.device(0)`: a context that changes nothing."""
    yield STREAM


def index_of(device: Any = None) -> int:
    """The index a program names, of a GPU that its machine has."""
    if device is None:
        return cuda.HERE.index
    if not isinstance(device, int):
        # Anything else is the current one (torch/_utils.py `_get_device_index`)
        named = isinstance(device, (str, TRUE_KIND))
        device = torch.device(device).index if named else None
        device = cuda.HERE.index if device is None else device
    if device >= cuda.HERE.count:
        raise cuda.NoSuchDevice(device)
    return int(device)


class AnyGenerator(type(torch.Generator)):  # type: ignore[misc]
    """`isinstance(g, torch.Generator)` stays true for the real ones."""

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, TRUE_GENERATOR)


TRUE_GENERATOR = torch._C.Generator


def generator_type() -> Any:
    """`torch.Generator`, whose instances for the GPU are the CPU's: no value that they give is used
    there."""

    def new(cls: Any, device: Any = "cpu") -> Any:
        index_of(device)
        return TRUE_GENERATOR()

    return AnyGenerator("Generator", (), {"__new__": new})


TRUE_KIND = torch.device


class AnyDevice(type):
    """`isinstance(d, torch.device)` stays true for the real ones."""

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, TRUE_KIND)


def device_type() -> Any:
    """`torch.device`, for which a bare index means the GPU, as it does where there is one."""

    def new(cls: Any, *args: Any, **given: Any) -> Any:
        return TRUE_KIND(*(("cuda", *args) if args and is_index(args[0]) else args), **given)

    return AnyDevice(
        "device", (), {"__new__": new, "__module__": "torch", "__qualname__": "device"}
    )


def placed(value: Any) -> Any:
    """A device argument; the GPU with its index, for which torch would ask the driver."""
    if is_index(value):
        return TRUE_KIND("cuda", value)
    if isinstance(value, (str, TRUE_KIND)):
        found = TRUE_KIND(value)
        return cuda.own() if found.type == "cuda" and found.index is None else found
    return value


def is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def constructors() -> list[tuple[Any, str, Any]]:
    """`torch.zeros(3, device=0)` and its kin."""
    from torch.utils._device import _device_constructors

    def indexed(true: Any) -> Any:
        @functools.wraps(true)
        def make(*args: Any, **given: Any) -> Any:
            if given.get("device") is not None:
                given["device"] = placed(given["device"])
            return true(*args, **given)

        return make

    known = _device_constructors()
    found = [
        (torch, name, indexed(one))
        for name, one in vars(torch).items()
        if callable(one) and isinstance(one, Hashable) and (one in known or name.endswith("_like"))
    ]
    found += [
        (torch.Tensor, name, indexed(getattr(torch.Tensor, name)))
        for name in ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
    ]
    return found


def patches(device: cuda.Device, live: Live) -> list[tuple[Any, str, Any]]:
    """(owner, name, value) of all that is answered."""
    properties = cuda.Properties(device.name, *device.capability, device.memory, device.sms)
    state = torch.zeros(16, dtype=torch.uint8)
    values: dict[str, Any] = {
        **{
            name: value for _, name, value in cuda.answers(device)
        },  # again, for the modules that have imported them by name
        **live.answers(),
        "get_device_properties": lambda one=None: (index_of(one), properties)[1],
        "get_device_capability": lambda one=None: (index_of(one), device.capability)[1],
        "get_device_name": lambda one=None: (index_of(one), device.name)[1],
        "set_device": lambda one: (index_of(one), None)[1],
        "init": lambda: None,
        "device": on,
        "device_of": on,
        "stream": on,
        "StreamContext": on,
        "_DeviceGuard": on,
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "current_stream": lambda *_, **__: STREAM,
        "default_stream": lambda *_, **__: STREAM,
        "set_stream": lambda *_: None,
        "get_rng_state_all": lambda: [state.clone()],
        "set_rng_state_all": lambda *_: None,
        "seed": lambda: None,
        "seed_all": lambda: None,
        "initial_seed": lambda: 0,
        "get_arch_list": lambda: [f"sm_{device.capability[0]}{device.capability[1]}"],
        "can_device_access_peer": lambda *_: False,
        "set_per_process_memory_fraction": lambda *_, **__: None,
        "is_tf32_supported": lambda: device.capability >= (8, 0),
        "utilization": lambda *_: 0,
        "temperature": lambda *_: 0,
        "memory_usage": lambda *_: 0,
        "default_generators": (TRUE_GENERATOR(),),
        "_get_device_index": lambda one=None, *_, **__: index_of(one),
    }
    found = [
        (owner, name, value)
        for owner in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams)
        for name, value in values.items()
    ]
    found = [(owner, name, value) for owner, name, value in found if name in vars(owner)]
    found += [
        (torch.cuda.nvtx, name, lambda *_, **__: 0)
        for name in ("range_push", "range_pop", "mark", "range_start", "range_end")
    ]
    found += [
        (torch.cuda.memory, "_record_memory_history", lambda *_, **__: None),
        (torch.cuda.memory, "_dump_snapshot", lambda *_, **__: None),
        (torch.cuda.memory, "_snapshot", lambda *_, **__: {"segments": [], "device_traces": [[]]}),
        (torch.cuda.memory, "memory_snapshot", lambda *_, **__: []),
    ]
    found += [
        (torch, "Generator", generator_type()),
        (torch, "Stream", Stream),
        (torch, "Event", Event),
        (torch, "device", device_type()),
        *constructors(),
    ]
    found += [
        (torch.backends.cudnn, "is_available", lambda: True),
        (torch.backends.cudnn, "version", lambda: CUDNN_VERSION),
    ]
    if torch.version.cuda is None:
        found.append((torch.version, "cuda", CUDA_VERSION))
    return (
        found
        + accelerator(live)
        + tensor_methods()
        + recurrent()
        + older_types.patches()
        + by_example.patches()
    )


def recurrent() -> list[tuple[Any, str, Any]]:
    """`nn.LSTM` and the like compare devices below the dispatcher, where tensors with values are on
    the CPU and those without are not."""
    from torch.utils._python_dispatch import _disable_current_modes

    def alike(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(alike(one) for one in value)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.is_meta:
            return value
        where = value.device
        with _disable_current_modes():
            made = torch.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device="meta"
            )
        return made if where.type == "cuda" else made.to(where)

    def wrapped(true: Any) -> Any:
        def run(*args: Any) -> Any:
            tensors: list[torch.Tensor] = []
            collect(args, tensors)
            return true(*alike(args)) if any(one.is_meta for one in tensors) else true(*args)

        return run

    true_ctc = torch.ctc_loss

    def ctc_loss(
        probabilities: torch.Tensor,
        targets: Any,
        inputs: Any,
        lengths: Any,
        blank: int = 0,
        reduction: int = 0,
        zero_infinity: bool = False,
    ) -> torch.Tensor:
        """Its mean divides by lengths that C++ code brings to the GPU."""
        losses = true_ctc(probabilities, targets, inputs, lengths, blank, 0, zero_infinity)
        if reduction == 1:
            known = lengths if isinstance(lengths, torch.Tensor) else torch.tensor(lengths)
            return (losses / known.to(losses.device, losses.dtype).clamp_min(1)).mean()
        return losses.sum() if reduction == 2 else losses

    home = torch._VF
    return [
        (torch, "ctc_loss", ctc_loss),
        *(
            (home, name, wrapped(getattr(home, name)))
            for name in ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell")
        ),
    ]


def accelerator(live: Live) -> list[tuple[Any, str, Any]]:
    """`torch.accelerator` (torch 2.6 and later), as far as this version has it."""
    module = getattr(torch, "accelerator", None)
    if module is None:
        return []
    values = {
        **live.answers(),
        "is_available": lambda: True,
        "device_count": lambda: cuda.HERE.count,
        "device_index": on,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "current_device_index": lambda: cuda.HERE.index,
        "current_device_idx": lambda: cuda.HERE.index,
        "set_device_index": lambda one: (index_of(one), None)[1],
        "set_device_idx": lambda one: (index_of(one), None)[1],
        "synchronize": lambda *_: None,
        "current_stream": lambda *_, **__: STREAM,
        "set_stream": lambda *_: None,
        "get_memory_info": live.mem_get_info,
    }
    return [(module, name, value) for name, value in values.items() if hasattr(module, name)]


def tensor_methods() -> list[tuple[Any, str, Any]]:
    """Ways from a tensor to its values, to other devices, and to page-locked memory."""
    return [
        *moves(),
        *readings(),
        (
            torch.Tensor,
            "get_device",
            lambda self: -1 if self.device.type == "cpu" else self.device.index or 0,
        ),
        (torch.Tensor, "pin_memory", lambda self, *_: self),
        (torch.Tensor, "is_pinned", lambda self, *_: False),
    ]


def moves() -> list[tuple[Any, str, Any]]:
    true_parse = torch._C._nn._parse_to
    true_copy, true_to = torch.Tensor.__deepcopy__, torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **given: Any) -> torch.Tensor:
        if cuda.INSIDE.depth or not (leaves_all(args, given) and self.is_meta and self.is_cuda):
            return true_to(self, *args, **given)
        kinds = [one for one in (*args, given.get("dtype")) if isinstance(one, torch.dtype)]
        kind = kinds[0] if kinds else self.dtype
        with torch.device("meta"):  # which says that it is nowhere
            return torch.empty_strided(self.size(), self.stride(), dtype=kind)

    def cpu(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self.to("cpu")

    def copied(self: torch.Tensor, memo: Any) -> torch.Tensor:
        """By an operator: a storage of its own has no values to copy."""
        if type(self) is not torch.Tensor or not self.is_leaf:
            return true_copy(self, memo)
        if not self.is_meta and not self.is_cuda:
            with torch._C._DisableTorchDispatch():  # for which a new tensor may be meta
                return true_copy(self, memo)
        if id(self) not in memo:
            made = self.detach().clone().requires_grad_(self.requires_grad)
            memo[id(self)] = made
            made.grad = copy.deepcopy(self.grad, memo)
            vars(made).update(copy.deepcopy(vars(self), memo))
        found: torch.Tensor = memo[id(self)]
        return found

    def parsed(*args: Any, **given: Any) -> Any:
        """`nn.Module.to(0)`: an index means the GPU."""
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (torch.device("cuda", args[0]), *args[1:])
        found = true_parse(*args, **given)
        if found[0] is not None and found[0].type == "cuda":
            cuda.only(found[0])
        return found

    return [
        (torch.Tensor, "to", to),
        (torch.Tensor, "cpu", cpu),
        (torch.Tensor, "__deepcopy__", copied),
        (torch._C._nn, "_parse_to", parsed),
    ]


def readings() -> list[tuple[Any, str, Any]]:
    base, true_format = torch._C.TensorBase, torch.Tensor.__format__
    true = {name: getattr(base, name) for name in ("numpy", "tolist")}

    def numpy(self: torch.Tensor, **given: Any) -> Any:
        if self.is_cuda:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to "
                "copy the tensor to host memory first."
            )
        if self.is_meta:  # on the CPU, where its values are not known
            with torch._C._DisableTorchDispatch():
                return true["numpy"](torch.zeros(self.shape, dtype=self.dtype))
        return true["numpy"](self, **given)

    def tolist(self: torch.Tensor) -> Any:
        selected = getattr(self, "selected", None)  # `assume.counted`
        if selected is not None:
            with torch._C._DisableTorchDispatch():
                return true["tolist"](torch.full(self.shape, selected))
        found = self.detach().to("cpu") if self.is_cuda else self.detach()
        return numpy(found).tolist() if found.is_meta else true["tolist"](found)

    def formatted(self: torch.Tensor, spec: str) -> str:
        return (
            format(self.item(), spec)
            if self.dim() == 0 and self.is_cuda
            else true_format(self, spec)
        )

    def shown(self: torch.Tensor, **given: Any) -> str:
        return TRUE_REPR(
            self.detach().to("cpu") if self.is_cuda and self.numel() <= 1000 else self, **given
        )

    return [
        (torch.Tensor, "numpy", numpy),
        (torch.Tensor, "tolist", tolist),
        (torch.Tensor, "__format__", formatted),
        (torch.Tensor, "__repr__", shown),
    ]


def leaves_all(args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    """Whether a tensor is to go to `torch.device("meta")`, from where nothing comes back."""
    target = given.get("device", args[0] if args else None)
    return isinstance(target, (str, torch.device)) and str(target) == "meta"


TRUE_REPR = torch.Tensor.__repr__

__all__ = ["patches"]
