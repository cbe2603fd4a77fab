"""Make a program on a machine without a GPU believe that it runs on one: `device` attributes,
`torch.cuda` answers, kernel choices.

Tensors on the pretended GPU are meta tensors, or real ones whose storage has been claimed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from memfit.trace.imports import put


class _Inside:
    """How deep in the dispatcher we are: kernels must see the true device, programs the pretended
    one."""

    depth = 0


INSIDE = _Inside


class _Here:
    """Which GPU of its machine the program's own is, and how many there are."""

    index = 0
    count = 1


HERE = _Here


def own() -> torch.device:
    """The GPU of this process."""
    return torch.device("cuda", HERE.index)


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device whose kernels the trace stands for. `sms` and `capability` steer kernel choices;
    A100 by default."""

    type: str = "cuda"
    name: str = "NVIDIA A100-SXM4-80GB"
    capability: tuple[int, int] = (8, 0)
    sms: int = 108
    memory: int = 85_899_345_920
    version: tuple[int, int] = (2, 13)  # of torch
    claimed: set[int] = field(default_factory=set, compare=False)
    elsewhere: dict[int, torch.device] = field(
        default_factory=dict, compare=False
    )  # meta storages that are not on the GPU

    def owns(self, tensor: torch.Tensor) -> bool:
        if tensor.is_meta:
            return not self.elsewhere or storage_key(tensor) not in self.elsewhere
        try:
            return tensor.untyped_storage()._cdata in self.claimed
        except (RuntimeError, NotImplementedError):
            return False

    def claim(self, key: int) -> None:
        self.claimed.add(key)

    def release(self, key: int) -> None:
        self.claimed.discard(key)


def storage_key(tensor: torch.Tensor) -> int:
    """Which storage a tensor has: a distributed one that of this rank's part, one that `torch.func`
    wraps that of what is inside."""
    own = getattr(tensor, "_local_tensor", tensor)
    try:
        return int(own.untyped_storage()._cdata)
    except NotImplementedError:
        functorch = torch._C._functorch
        while functorch.is_functorch_wrapped_tensor(own):
            own = functorch.get_unwrapped(own)
        try:
            return int(own.untyped_storage()._cdata)
        except NotImplementedError:
            return 0


class NoSuchDevice(RuntimeError):
    """What CUDA raises for an index beyond the last GPU."""

    def __init__(self, index: int) -> None:
        super().__init__("CUDA error: invalid device ordinal")
        self.index = index


def only(device: torch.device) -> torch.device:
    """A process has one GPU of its machine; without an index it is that one."""
    if device.index not in (None, HERE.index):
        raise NoSuchDevice(device.index)
    return device


LEAVING = torch.device("cpu")  # this very object says that a tensor leaves the GPU
TRUE_DEVICE = torch._C.TensorBase.device
TRUE_TO = torch._C.TensorBase.to


@contextlib.contextmanager
def pretended(device: Device) -> Iterator[None]:
    """Inside, tensors say that they are on `device`, and `torch.cuda` answers as that GPU would."""
    at = torch.device(device.type)

    def where(self: torch.Tensor) -> torch.device:
        true: torch.device = TRUE_DEVICE.__get__(self)
        if INSIDE.depth:
            return true
        here = torch.device("cuda", HERE.index) if device.type == "cuda" else at
        if true.type == "meta":
            if not device.elsewhere:
                return here
            return device.elsewhere.get(storage_key(self), here)
        return here if device.claimed and device.owns(self) else true

    def is_cuda(self: torch.Tensor) -> bool:
        return bool(self.device.type == "cuda")

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if INSIDE.depth:
            return TRUE_TO(self, *args, **kwargs)
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        if device.claimed and TRUE_DEVICE.__get__(self).type == "cpu" and device.owns(self):
            # Real and on the GPU: told to go where it is, it would come back to the CPU
            if args and stays(args[0], self):
                args = without_device(args, self.dtype)
            elif stays(kwargs.get("device"), self):
                kwargs = {key: one for key, one in kwargs.items() if key != "device"}
            if not args and not {*kwargs} - {"non_blocking"}:
                return self
        args = tuple(local(one, device, self) for one in args)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": local(kwargs["device"], device, self)}
        moved = TRUE_TO(self, *args, **kwargs)
        if moved is self and any(one is LEAVING for one in (*args, kwargs.get("device"))):
            with torch._C._DisableTorchDispatch():
                return self.detach().clone()  # small integers are real on either side
        return moved

    def cuda(
        self: torch.Tensor, target: Any = None, non_blocking: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        return self.to("cuda" if target is None else target, non_blocking=non_blocking)

    patches: list[tuple[Any, str, Any]] = [
        (torch.Tensor, "device", property(where)),
        (torch.Tensor, "is_cuda", property(is_cuda)),
        (torch.Tensor, "to", to),
        (torch.Tensor, "cuda", cuda),
    ]
    if device.type == "cuda":
        patches += answers(device)
    else:
        patches += draws()
    lifted = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(
        True
    )  # `torch.tensor(x, device="cuda")` then shows its copy to the mode
    try:
        with patched(patches):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lifted)


def without_device(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of `to(device, dtype, non_blocking, copy)` behind the device. `nn.Module.to`
    passes None for a dtype that stays."""
    rest = args[1:]
    if not rest or rest[0] is not None:
        return rest
    return (dtype, *rest[1:]) if any(rest[2:]) else ()


def stays(value: Any, tensor: torch.Tensor) -> bool:
    """Whether a device argument names the one where the tensor is."""
    if isinstance(value, bool) or not isinstance(value, (int, str, torch.device)):
        return False
    kind = tensor.device.type
    return isinstance(value, int) or torch.device(value).type == kind


def local(value: Any, device: Device, tensor: torch.Tensor) -> Any:
    """The device argument of `.to`; where it names what the tensor is on already, the device that
    it truly is on."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = torch.device(device.type, value)
    if isinstance(value, (str, torch.device)):
        value = torch.device(value)
        if value.type == device.type == "cuda":
            only(value)
            value = own()  # without an index torch asks the driver for it
        if value.type == tensor.device.type:
            return TRUE_DEVICE.__get__(tensor)
        if value.type == "cpu" and tensor.is_cuda:
            return LEAVING
    return value


@dataclass(frozen=True)
class Properties:
    """What `get_device_properties` gives."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    warp_size: int = 32
    is_integrated: bool = False
    gcnArchName: str = ""


def answers(device: Device) -> list[tuple[Any, str, Any]]:
    properties = Properties(device.name, *device.capability, device.memory, device.sms)
    state = torch.zeros(16, dtype=torch.uint8)
    values: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: HERE.count,
        "current_device": lambda: HERE.index,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: device.capability,
        "get_device_name": lambda *_: device.name,
        "is_bf16_supported": lambda *_, **__: device.capability >= (8, 0),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "reset_peak_memory_stats": lambda *_: None,
        "set_device": lambda *_: None,
        "get_rng_state": lambda *_: state.clone(),
        "set_rng_state": lambda *_: None,
        "manual_seed": lambda *_: None,
        "manual_seed_all": lambda *_: None,
        "mem_get_info": lambda *_: (device.memory, device.memory),
        "device": lambda *_: contextlib.nullcontext(),
        "_is_in_bad_fork": lambda: False,
        "is_current_stream_capturing": lambda: False,
    }
    return [(torch.cuda, name, value) for name, value in values.items()] + accelerator()


class Idle:
    """The current stream, on which no graph is captured."""

    def is_capturing(self) -> bool:
        return False


def accelerator() -> list[tuple[Any, str, Any]]:
    """`torch.accelerator` (torch 2.6 and later): optimizers ask it for a stream, and a build with
    CUDA would ask the driver."""
    values = {
        "is_available": lambda: True,
        "device_count": lambda: HERE.count,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "current_device_index": lambda: HERE.index,
        "current_stream": lambda *_: Idle(),
        "synchronize": lambda *_: None,
    }
    module = getattr(torch, "accelerator", None)
    return [(module, name, value) for name, value in values.items() if hasattr(module, name)]


def draws() -> list[tuple[Any, str, Any]]:
    """The state of the CPU's generator, which checkpointing keeps, is made below the dispatcher;
    here it is seen."""
    size = torch.get_rng_state().numel()
    values: dict[str, Any] = {
        "get_rng_state": lambda: torch.empty(size, dtype=torch.uint8),
        "set_rng_state": lambda _: None,
    }
    return [(torch, name, value) for name, value in values.items()]


@contextlib.contextmanager
def patched(patches: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes and put every one of them back."""
    missing = object()
    before = [(owner, name, vars(owner).get(name, missing)) for owner, name, _ in patches]
    try:
        for owner, name, value in patches:
            put(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            if value is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
