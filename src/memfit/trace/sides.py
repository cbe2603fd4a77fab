"""A recorder for programs that also have tensors off the GPU: models are built on the CPU, batches
come from there.

The CPU's large tensors are meta tensors, too, whose storages are listed in `Device.elsewhere`; its
small ones are real, so that data keeps its values. Only what is on the GPU is recorded.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from memfit.trace import cuda
from memfit.trace.ops import collect
from memfit.trace.recorder import Recorder, local
from memfit.trace.rules import RULES
from memfit.trace.shadows import count_of, restored, shadowed
from memfit.trace.shapes import result_of

aten = torch.ops.aten
GPU, CPU, VOID = (
    "gpu",
    "cpu",
    "void",
)  # void: `torch.device("meta")`, as the program itself asked for
WHERE = {CPU: torch.device("cpu"), VOID: torch.device("meta")}
REAL_COUNT = 1 << 22  # values of one real tensor on the CPU
REAL_BYTES = 1 << 28  # of all larger real ones together
SMALL = 1 << 14
EMPTY = {
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::empty_permuted",
}
BY_VALUES = {  # whose results depend on values, on whichever side they are
    aten._local_scalar_dense.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.max.dim,
    aten.min.dim,
    aten.mode.default,
    aten.multinomial.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.index.Tensor,
    aten._ctc_loss.default,
    aten._ctc_loss.Tensor,
    aten._ctc_loss_backward.default,
    aten._ctc_loss_backward.Tensor,
}
COPIES = {"aten::copy_", "aten::_foreach_copy_"}
TOGETHER = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::mv",
    "aten::cat",
    "aten::embedding",
    "aten::native_layer_norm",
    "aten::convolution",
    "aten::add",
    "aten::mul",
    "aten::sub",
    "aten::div",
    "aten::where",
    "aten::_fused_rms_norm",
}  # ops that a program cannot run over two devices; others have their exceptions


class Sides(Recorder):
    """A `Recorder` that knows on which side every tensor is."""

    def __init__(self, device: cuda.Device, skew: float = 1.0) -> None:
        super().__init__(device, skew)
        self.off = ""  # the side of the rule that runs, unless it is the GPU
        self.kept = 0  # bytes of large real tensors on the CPU
        self.host_blocks: dict[int, weakref.ref[Any]] = {}
        self.host = self.host_peak = 0  # bytes of meta tensors on the CPU

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        side = self.side_of(func, args, kwargs)
        if side == GPU or func in BY_VALUES:
            rule = RULES.get(func)
            if rule is not None:
                done, result = self.ruled(rule, side, func, args, kwargs)
                if done and side == GPU:
                    return self.seen(func, args, kwargs, result, True)
                if done:
                    return self.apart_all(result, side)
        if side == GPU:
            _, args, kwargs, swapped = self.placed(func, args, kwargs)
            result = result_of(func, args, kwargs)
            return self.seen(
                func, args, kwargs, restored(result, swapped) if swapped else result, False
            )
        return self.aside(func, args, kwargs, side)

    def ruled(self, rule: Any, side: str, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """What a rule says; off the GPU, what it makes on its way is on that side, too."""
        before, self.off = self.off, "" if side == GPU else side
        try:
            found: tuple[bool, Any] = rule(self, func, args, kwargs)
        finally:
            self.off = before
        return found

    def seen(self, func: Any, args: Any, kwargs: Any, result: Any, ruled: bool) -> Any:
        if self.off:
            return self.apart_all(result, self.off)
        return super().seen(func, args, kwargs, result, ruled)

    def side_of(self, func: Any, args: Any, kwargs: Any) -> str:
        """Where the result of an op is: as the program asks, else where its operands are."""
        owns = self.device.owns
        tensors: list[torch.Tensor] = []
        collect(args, tensors)
        if kwargs:
            collect(tuple(kwargs.values()), tensors)
        asked = kwargs.get("device")
        if asked is not None:
            asked = torch.device(asked)
            if asked.type == self.device.type:
                cuda.only(asked)
                return GPU
            if asked.type == "cpu":
                return CPU
            if asked.type != "meta":
                return CPU
            if not any(
                one.is_meta for one in tensors
            ):  # C++ code says `meta` where it means the GPU
                return VOID if void_asked() or (self.phase == "load" and not self.modules) else GPU
        if not tensors:
            return CPU
        sides = [GPU if owns(one) else CPU for one in tensors]
        if GPU in sides:
            if CPU in sides and func._schema.name in TOGETHER:
                if all(
                    side == CPU or (not one.dim() and self.owned(one) is None)
                    for side, one in zip(sides, tensors, strict=True)
                ):
                    return CPU  # a number that C++ code made on `meta`, which nobody allocated
                together(tensors, sides, str(func._schema.name))
            return sides[0] if func._schema.name in COPIES else GPU
        elsewhere = self.device.elsewhere
        return (
            VOID
            if any(
                elsewhere.get(one.untyped_storage()._cdata) == WHERE[VOID]
                for one in tensors
                if one.is_meta
            )
            else CPU
        )

    def aside(self, func: Any, args: Any, kwargs: Any, side: str) -> Any:
        """Run an op off the GPU: for real where its values may matter, on meta where they would be
        too large."""
        tensors: list[torch.Tensor] = []
        collect(args, tensors)
        meta = side == VOID or any(one.is_meta for one in tensors)
        if (
            meta
            and side == CPU
            and func is aten._to_copy.default
            and self.brings(args[0].numel())
            and self.device.owns(args[0])
        ):
            return self.fetched(args[0], kwargs.get("dtype"))
        if not meta and "device" in [one.name for one in func._schema.arguments]:
            meta = self.too_large(func, args, kwargs)
        if not meta:
            result = func(*args, **kwargs)
            self.keep(result)
            return result
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        if any(one.name == "device" for one in func._schema.arguments) and (
            not tensors or kwargs.get("device") is not None
        ):
            kwargs["device"] = "meta"
        swapped: dict[int, torch.Tensor] = {}
        args, kwargs = (
            shadowed(args, swapped),
            {key: shadowed(value, swapped) for key, value in kwargs.items()},
        )
        return self.apart_all(restored(func(*args, **kwargs), swapped), side)

    def apart_all(self, result: Any, side: str) -> Any:
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, torch.Tensor) and one.is_meta:
                self.apart(one, side)
        return result

    def brings(self, count: int) -> bool:
        """Whether what comes from the GPU has values on the CPU, which are assumed."""
        return count <= REAL_COUNT

    def too_large(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a new tensor is better not made for real: without values from the start, or too
        many of them."""
        kind = (
            kwargs.get("dtype")
            or next((one.dtype for one in args if isinstance(one, torch.Tensor)), None)
            or torch.get_default_dtype()
        )
        # A number's value says nothing of its size, as in `torch.where(mask, x, torch.inf)`
        count = 1 if func is aten.scalar_tensor.default else count_of(args)
        if func._schema.name in EMPTY and kind.is_floating_point and count > 1:
            return True
        return count > REAL_COUNT or (
            count > SMALL and self.kept + count * kind.itemsize > REAL_BYTES
        )

    def keep(self, result: Any) -> None:
        """Count the large real tensors on the CPU, until they die."""
        if not isinstance(result, torch.Tensor) or result.numel() <= SMALL or result.is_meta:
            return
        storage = result.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.host_blocks:
            return
        self.kept += size

        def gone(_: Any) -> None:
            self.host_blocks.pop(key, None)
            self.kept -= size

        self.host_blocks[key] = weakref.ref(storage, gone)

    def apart(self, tensor: torch.Tensor, side: str = CPU) -> torch.Tensor:
        """Enter a meta tensor as one that is not on the GPU."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if side == CPU else 0
        if key in self.device.elsewhere or key in self.blocks or not storage.nbytes():
            return tensor
        self.device.elsewhere[key] = WHERE[side]
        self.host += size
        self.host_peak = max(self.host_peak, self.host + self.kept)

        def gone(_: Any) -> None:
            self.host_blocks.pop(key, None)
            if self.device.elsewhere.pop(key, None) is not None:
                self.host -= size

        self.host_blocks[key] = weakref.ref(storage, gone)
        return tensor

    def arrive(self, tensor: torch.Tensor, part: Any, where: str) -> None:
        """What was built off the GPU is on it from now on."""
        key = tensor.untyped_storage()._cdata
        if self.device.elsewhere.pop(key, None) is not None:
            self.host_blocks.pop(key, None)
            self.host -= tensor.untyped_storage().nbytes()
        super().arrive(tensor, part, where)


class Offloaded(Sides):
    """FSDP's shards never are on the GPU; what unpacks packed weights is no parameter, and is."""

    def brings(self, count: int) -> bool:
        """Gradients are of their shards' kind."""
        return count == 1

    def too_large(self, func: Any, args: Any, kwargs: Any) -> bool:
        """What stands for a parameter without a part on this rank is of its kind, too."""
        return (func._schema.name in EMPTY and count_of(args) == 0) or super().too_large(
            func, args, kwargs
        )

    def arrive(self, tensor: torch.Tensor, part: Any, where: str) -> None:
        if isinstance(tensor, torch.nn.Parameter):
            self.apart(local(tensor))
        else:
            super().arrive(tensor, part, where)

    def answers(self) -> list[tuple[Any, str, Any]]:
        """FSDP1's flat parameters are moved to the host, where they and their gradients are
        page-locked."""
        from torch.distributed.fsdp._flat_param import FlatParamHandle

        true_to = FlatParamHandle.flat_param_to

        def moved(handle: Any, device: Any, **given: Any) -> None:
            if torch.device(device).type == "cpu":
                self.apart(handle.flat_param)
            else:
                true_to(handle, device, **given)

        return [
            (FlatParamHandle, "flat_param_to", moved),
            (torch.Tensor, "pin_memory", lambda tensor, *_: tensor),
        ]


def together(tensors: list[torch.Tensor], sides: list[str], name: str) -> None:
    """What CUDA says of operands on two devices; numbers without dimensions may come from the
    CPU, not from the GPU."""
    if any(side == CPU and one.dim() for one, side in zip(tensors, sides, strict=True)):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two "
            f"devices, cuda:0 and cpu! (in {name})"
        )


def void_asked() -> bool:
    """Inside `with torch.device("meta")`."""
    from torch.utils import _device

    current = getattr(_device, "CURRENT_DEVICE", None)
    return current is not None and torch.device(current).type == "meta"


def parameter_maker(recorder: Sides) -> Any:
    """`Parameter.__new__` for floats on the CPU: a parameter must be meta from the start, because
    what a real one becomes on the GPU could not take its place (`Module._apply` keeps the object,
    and with it ties, only among tensors of one kind)."""
    original = torch.nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if (
            type(data) is torch.Tensor
            and not data.is_meta
            and data.dtype.is_floating_point
            and not recorder.device.owns(data)
        ):
            with torch._C._DisableTorchDispatch():
                value = torch.empty_strided(
                    data.size(), data.stride(), dtype=data.dtype, device="meta"
                )
            data = recorder.apart(value)
        return original(cls, data, requires_grad)

    return new
