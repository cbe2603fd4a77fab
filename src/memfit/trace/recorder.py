"""A dispatch mode that watches storages: every one that comes to life is an Alloc, every one that
dies a Free.

Floats are meta tensors. Small integer and boolean tensors stay real, because model code branches on
their values.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import torch
from memfit.errors import Problem
from memfit.tape import Alloc, Event, Free, Mark, Part, Phase
from memfit.trace import cuda
from memfit.trace.hidden import HIDDEN, Hidden
from memfit.trace.hidden_cpu import CPU
from memfit.trace.kernels_of import CHOSEN
from memfit.trace.ops import aten, collect
from memfit.trace.paths import is_layer, layer_of, plain
from memfit.trace.rules import RULES
from memfit.trace.shadows import count_of, restored, shadowed
from memfit.trace.shapes import result_of

REAL_LIMIT = 1 << 22  # integers in one tensor; larger ones become meta
REAL_FLOATS = 1024


class Block:
    """One allocation while it is being watched; its part may become known only later."""

    __slots__ = (
        "id",
        "size",
        "part",
        "where",
        "op",
        "formula",
        "born",
        "phase",
        "step",
        "alive",
        "shape",
        "node",
        "value",
        "stream",
        "users",
    )

    def __init__(
        self,
        id: int,
        size: int,
        where: str,
        op: str,
        formula: str,
        shape: tuple[int, ...],
        born: int,
    ) -> None:
        self.id, self.size, self.where, self.op, self.formula, self.shape, self.born = (
            id,
            size,
            where,
            op,
            formula,
            shape,
            born,
        )
        self.part: Part | None = None
        self.phase: Phase = "load"
        self.step, self.alive, self.node = 0, True, 0
        self.stream = 0
        self.users: set[int] = (
            set()
        )  # beside the stream where it was asked for, those that `record_stream` names
        self.value: float | None = (
            None  # of a single number, where the program said it (`torch.full((), 0.0)`)
        )


class Recorder(TorchDispatchMode):
    """Records what the program inside the `with` allocates. `device` is the flavour whose kernels
    it believes to run."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled: without this, torch wraps every dispatch, and imports its
        compiler for that."""
        return False

    def __init__(self, device: cuda.Device, skew: float = 1.0) -> None:
        super().__init__()
        self.device = device
        self.rows = CPU if device.type == "cpu" else HIDDEN
        self.skew, self.real_limit, self.real_floats = skew, REAL_LIMIT, REAL_FLOATS
        # rows that come to this rank's experts over its balanced share, where experts are spread
        self.imbalance = 0.0
        self.decided: dict[
            float, tuple[int, str]
        ] = {}  # threshold -> it is passed once in so many places, and how that is told
        self.events: list[Block | Event] = []
        self.blocks: dict[int, Block] = {}  # storage address -> block
        self.watch: dict[int, weakref.ref[Any]] = {}
        self.modules: list[str] = []
        self.names: dict[int, str] = {}
        self.optimizer: object = None  # held while the tape goes on,
        self.loop: object = None  # like the variables of the loop
        self.made_at: dict[int, str] = {}  # autograd sequence number -> module path
        self.phase: Phase = "load"
        self.step = 0
        self.counter = 0
        self.last_node: tuple[int, str] = (0, "")
        self.node_serial = 0
        self.node_key: Any = None
        self.layer = ""
        self.serving, self.calls = (
            False,
            0,
        )  # inference: each call of the model is a prefill or a token
        self.workspaces: set[str] = set()
        self.parameters = (0, 0)  # of the model, and those that are trained
        self.assumed: dict[str, Problem] = {}
        self.stream, self.sends = 0, True  # whether collectives on a CPU are gloo's
        self.lent: dict[int, int] = {}  # how many freed blocks a stream was still using
        self.origin: Callable[[], Part | None] = lambda: (
            None
        )  # what a block is for, where those who ask for it say so
        self.groups: dict[str, str] = {}  # process group -> what it is for
        self.resizes: dict[int, Part] = {}  # what a storage of no size was before
        self.waiting: dict[
            int, Any
        ] = {}  # result of a collective -> the operands that it holds until it is waited for

    # -- what the program tells us
    # ---------------------------------------------------------------------------------

    def mark(self, phase: Phase, where: str = "", step: int | None = None) -> None:
        self.phase, self.step, self.layer = phase, self.step if step is None else step, where
        self.events.append(Mark(phase, where, self.step))

    def enter(self, module: torch.nn.Module) -> None:
        path = self.names.get(id(module))
        if path is None:
            path = self.modules[-1] if self.modules else ""
        if self.serving and not self.modules:
            self.mark("decode" if self.calls else "prefill", step=self.calls)
            self.calls += 1
        self.modules.append(path)
        if is_layer(path) and path != self.layer:
            self.layer = path
            self.events.append(Mark(self.phase, path, self.step))

    def arrive(self, tensor: torch.Tensor, part: Part, where: str) -> None:
        """A tensor made before the recording, which the program now puts on the GPU."""
        storage = local(tensor).untyped_storage()
        if storage._cdata in self.blocks or storage.nbytes() == 0:
            return
        self.modules.append(plain(where))
        block = self.block(storage.nbytes(), "load", tensor)
        self.modules.pop()
        block.part = part
        self.adopt(storage._cdata, storage, block)

    def assume(self, kind: str, message: str, where: str = "", hint: str = "") -> None:
        """A value that nobody knows is taken to be something; the first of its kind is told."""
        self.assumed.setdefault(
            kind,
            Problem(
                message=message,
                where=where or (self.modules[-1] if self.modules else ""),
                hint=hint,
                level="note",
            ),
        )

    def elements(self, parameter: torch.Tensor) -> int:
        """Of a parameter, of which this rank may hold a part."""
        return parameter.numel()

    def answers(self) -> list[tuple[Any, str, Any]]:
        """(owner, name, value): what the program is answered while it runs."""
        return []

    def rest(self) -> None:
        """Backward is over: no node is being evaluated."""
        self.last_node = (0, "")

    def leave(self) -> None:
        self.modules.pop()
        if not self.modules:
            for block in self.blocks.values():
                if block.part is None and block.phase == self.phase:
                    block.part = (
                        "kv_cache" if self.serving and layer_of(block.where) else "activations"
                    )

    # -- the dispatcher
    # --------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(
            one.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for one in types
        ):
            # a wrapper of tensors: what it does with those inside comes here, too
            return NotImplemented
        composite = COMPOSITES.get(func)
        if composite is None:
            composite = COMPOSITES[func] = composite_of(func)
        if composite:
            with self:
                return composite(*args, **kwargs)
        cuda.INSIDE.depth += 1
        try:
            return self.dispatch(func, args, kwargs)
        finally:
            cuda.INSIDE.depth -= 1

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        rule = RULES.get(func)
        if rule is not None:
            done, result = rule(self, func, args, kwargs)
            if done:
                return self.seen(func, args, kwargs, result, True)
        if func is aten._to_copy.default and self.leaves(args[0], kwargs):
            return self.fetched(args[0], kwargs.get("dtype"))
        on_gpu, args, kwargs, swapped = self.placed(func, args, kwargs)
        result = result_of(func, args, kwargs)
        if swapped:
            result = restored(result, swapped)
        if not on_gpu:
            return result
        return self.seen(func, args, kwargs, result, False)

    def leaves(self, tensor: torch.Tensor, kwargs: Any) -> bool:
        """Whether a copy goes to the host, of a tensor that has no values."""
        target = kwargs.get("device")
        return (
            target is not None
            and torch.device(target).type == "cpu" != self.device.type
            and tensor.is_meta
        )

    def fetched(self, tensor: torch.Tensor, kind: Any) -> torch.Tensor:
        """A copy on the CPU of what was computed on the GPU: its values are assumed, as `.item()`
        assumes them."""
        block = self.owned(tensor)
        value = 1.0 if block is None or block.value is None else block.value
        kind = tensor.dtype if kind is None else kind
        value = value if kind.is_floating_point else 0
        return (
            torch.full(tensor.shape, value, dtype=kind)
            if tensor.numel() <= REAL_LIMIT
            else torch.full((), value, dtype=kind).expand(tensor.shape)
        )

    def placed(
        self, func: Any, args: Any, kwargs: Any
    ) -> tuple[bool, Any, Any, dict[int, torch.Tensor]]:
        """Decide where the op runs: `cuda` is meta for floats and large integers, real for small
        integers."""
        tensors: list[torch.Tensor] = []
        collect(args, tensors)
        if kwargs:
            collect(tuple(kwargs.values()), tensors)
        meta, real = False, False
        for one in tensors:
            if one.is_meta:
                meta = True
            else:
                real = True
        marked = meta or (real and any(self.device.owns(one) for one in tensors))
        device = kwargs.get("device")
        if (
            device is None
            and self.device.type == "cpu"
            and not tensors
            and any(one.name == "device" for one in func._schema.arguments)
        ):
            device = "cpu"
        if device is not None:
            device = torch.device(device)
            if device.type == self.device.type:
                marked, kwargs = (
                    True,
                    {
                        **kwargs,
                        "device": "meta"
                        if meta or not self.stays_real(func, args, kwargs)
                        else "cpu",
                    },
                )
                if kwargs["device"] == "meta":
                    meta = bool(tensors)
            elif device.type == "meta":
                marked = True
            elif device.type == "cpu":
                marked = False
        if not meta or not real:
            return marked, args, kwargs, {}
        swapped: dict[int, torch.Tensor] = {}
        return (
            marked,
            shadowed(args, swapped),
            {key: shadowed(value, swapped) for key, value in kwargs.items()},
            swapped,
        )

    def stays_real(self, func: Any, args: Any, kwargs: Any) -> bool:
        dtype = kwargs.get("dtype")
        name = func._schema.name
        if dtype is None:
            first = next((one for one in args if isinstance(one, torch.Tensor)), None)
            if first is not None:
                dtype = first.dtype
            elif name in ("aten::arange", "aten::full"):
                numbers = [one for one in args if isinstance(one, (int, float))]
                dtype = (
                    torch.int64 if all(isinstance(one, int) for one in numbers) else torch.float32
                )
            elif name in ("aten::randint", "aten::randperm"):
                dtype = torch.int64
            else:
                dtype = torch.get_default_dtype()
        if dtype.is_floating_point or dtype.is_complex:
            return False
        return count_of(args) <= REAL_LIMIT

    def seen(self, func: Any, args: Any, kwargs: Any, result: Any, ruled: bool) -> Any:
        """Record the new storages of a result, and what its kernel allocated unseen."""
        self.follow_node()
        hidden = self.rows.get(func)
        extra: list[Hidden] = hidden(self, args, kwargs, result) if hidden is not None else []
        passing: list[Block] = []
        for one in extra:
            if one.first:
                self.hidden(one, func, passing)
        if isinstance(result, torch.Tensor):
            result = self.tensor(result, func, ruled)
            self.constant(result, func, args, kwargs)
        elif isinstance(result, (tuple, list)):
            result = type(result)(
                self.tensor(one, func, ruled) if isinstance(one, torch.Tensor) else one
                for one in result
            )
        for one in extra:
            if not one.first:
                self.hidden(one, func, passing)
        for block in passing:
            self.free(block)
        return result

    def tensor(self, tensor: torch.Tensor, func: Any, known: bool = False) -> torch.Tensor:
        """Record the storage of a result, if it is new. Real floats of any length become meta,
        unless a rule gave them."""
        if known and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return tensor  # a wrapper: what is inside has been seen
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.blocks:
            return tensor
        if (
            not known
            and not tensor.is_meta
            and (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
            and tensor.numel() > self.real_floats
        ):
            tensor = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
            )
            storage = tensor.untyped_storage()
            key = storage._cdata
        size = storage.nbytes()
        if size == 0:
            return tensor
        block = self.block(size, func.__name__ if hasattr(func, "__name__") else str(func), tensor)
        self.adopt(key, storage, block)
        return tensor

    def constant(self, result: torch.Tensor, func: Any, args: Any, kwargs: Any) -> None:
        """Remember the one value of a tensor that is filled or copied, for the program that reads
        it back; forget it when written to."""
        kind = WRITES.get(func)
        if kind is None:
            kind = WRITES[func] = (
                "fill"
                if func in FILLS
                else "copy"
                if func in COPIES
                else "other"
                if func._schema.is_mutable
                else ""
            )
        if not kind:
            return
        if kind == "fill":
            block = self.owned(result)
            if block is not None:
                block.value = FILLS[func](args)
        elif kind == "copy":
            block, source = self.owned(result), self.owned(args[0])
            if block is not None and source is not block:
                block.value = source.value if source is not None else None
                if source is None and not args[0].is_meta and args[0].numel() == 1:
                    block.value = float(args[0])
        else:
            block = self.owned(result)
            if block is not None:
                block.value = None

    def block(self, size: int, op: str, tensor: torch.Tensor | None, formula: str = "") -> Block:
        self.counter += 1
        shape = () if tensor is None else tensor.shape
        text = formula if formula or tensor is None else written(shape, tensor.dtype)
        where = self.modules[-1] if self.modules else self.last_node[1]
        block = Block(self.counter, size, where, op, text, shape, len(self.events))
        block.phase, block.step, block.node = self.phase, self.step, self.node_serial
        block.stream, block.part = self.stream, self.origin()
        self.events.append(block)
        return block

    def adopt(self, key: int, storage: Any, block: Block) -> None:
        self.blocks[key] = block

        def gone(_: Any, key: int = key) -> None:
            self.watch.pop(key, None)
            self.resizes.pop(key, None)
            self.device.release(key)
            dead = self.blocks.pop(key, None)
            if dead is not None:
                self.free(dead)

        self.watch[key] = weakref.ref(storage, gone)
        if storage.device.type != "meta":
            self.device.claim(key)

    def free(self, block: Block) -> None:
        if block.alive:
            block.alive = False
            self.events.append(Free(block.id, tuple(sorted(block.users))))
            for stream in block.users:
                self.lent[stream] = self.lent.get(stream, 0) + 1

    def hidden(self, one: Hidden, func: Any, passing: list[Block]) -> None:
        """A buffer of a kernel; one that neither stays nor goes at once is put among the
        `passing`."""
        block = self.block(one.size, f"{func.__name__}: {one.name}", None, one.formula)
        block.part = "workspace"
        if one.brief:
            self.free(block)
        elif not one.keep:
            passing.append(block)

    def follow_node(self) -> None:
        """In backward the module is that of the forward op whose gradient is being computed."""
        if self.phase == "backward" and not self.modules:
            node = torch._C._current_autograd_node()
            if node is None:
                return
            number = node._sequence_nr()
            if number != self.last_node[0]:
                self.node_serial += 1
                path = self.made_at.get(number)
                self.last_node = (number, self.last_node[1] if path is None else path)
                layer = layer_of(self.last_node[1])
                if layer and layer != self.layer:
                    self.layer = layer
                    self.events.append(Mark("backward", layer, self.step))
        elif torch.is_grad_enabled():
            self.made_at.setdefault(
                torch._C._autograd._get_sequence_nr() - 1, self.modules[-1] if self.modules else ""
            )

    def resized(self, storage: Any, size: int) -> None:
        """`storage.resize_(size)`, which no dispatcher sees: to nothing is a free, from nothing an
        allocation."""
        key = storage._cdata
        block = self.blocks.get(key)
        if block is not None and block.size == size:
            return
        fresh = None
        if size:
            fresh = self.block(size, "resize_", None)
            fresh.part = fresh.part or self.resizes.get(key)
        if block is not None:
            del self.blocks[key]
            if block.part is not None:
                self.resizes[key] = block.part
            self.free(block)
        if fresh is not None:
            self.adopt(key, storage, fresh)

    def owned(self, tensor: torch.Tensor) -> Block | None:
        return self.blocks.get(cuda.storage_key(tensor))

    def finished(self) -> tuple[Event, ...]:
        """The events with every block's part settled."""
        return tuple(
            Alloc(
                one.id,
                one.size,
                one.part or "temporaries",
                one.where,
                one.op,
                one.formula,
                one.stream,
            )
            if isinstance(one, Block)
            else one
            for one in self.events
        )


@functools.cache
def written(shape: torch.Size, kind: torch.dtype) -> str:
    return f"{list(shape)} {str(kind)[6:]}"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own part of a distributed tensor."""
    return getattr(tensor, "_local_tensor", tensor)


FILLS: dict[Any, Callable[[Any], float]] = {
    aten.full.default: lambda args: float(args[1]),
    aten.full_like.default: lambda args: float(args[1]),
    aten.new_full.default: lambda args: float(args[2]),
    aten.fill_.Scalar: lambda args: float(args[1]),
    aten.scalar_tensor.default: lambda args: float(args[0]),
    **dict.fromkeys(
        (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.zero_.default),
        lambda args: 0.0,
    ),
    **dict.fromkeys(
        (aten.ones.default, aten.ones_like.default, aten.new_ones.default), lambda args: 1.0
    ),
}
COPIES = {aten._to_copy.default, aten.clone.default}
WRITES: dict[Any, str] = {}  # how an operator sets the values of its result


COMPOSITES: dict[Any, Any] = {}


def composite_of(func: Any) -> Any:
    """What an op that arrives whole (under inference_mode) is made of, or False."""
    if func in CHOSEN:
        return CHOSEN[func]
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    if (
        func not in RULES
        and known(func.name(), "CompositeImplicitAutograd")
        and not known(func.name(), "CPU")
    ):
        return func.decompose
    return False
