"""Activation offload: what torch's hooks do with each tensor saved for backward, and when backward
reads it again.

`Streams` is OffloadActivations of TRL (trl 1.16 models/activation_offloading.py) and of torchtune
(0.6.1 training/_activation_offloading.py), which copy on a stream of their own; `OnHost` is torch's
own `save_on_cpu` (torch 2.13 autograd/graph.py), which copies on the stream that computes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from memfit.lower import ops
from memfit.lower.attention import sdpa
from memfit.lower.engine import Weights
from memfit.lower.moe.ops import back_grouped
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Back, Hooks, Node, Packed, Storage, Tensor
from memfit.optimizers import OPTIMIZERS
from memfit.tape import Free, Part, Sync, Trim

if TYPE_CHECKING:
    from memfit.lower.body import Body

SMALLEST = 1024  # bytes of a tensor that is worth a copy (min_offload_size)
STASH = 5  # tensors saved since, until what was copied is let go (max_fwd_stash_size)
COMPUTES, COPIES = 0, 1  # streams
# What autograd's own nodes save first: by the names of their operands (torch 2.13
# tools/autograd/gen_variable_type.py), inputs before outputs.
ORDERS: Mapping[Back, tuple[int, ...]] = {
    ops.back_linear: (1,),
    ops.back_matmul: (1,),
    ops.back_mul: (1,),
    sdpa.back_flash: (1, 0, 2, 4),
    sdpa.back_efficient: (1, 0, 2, 4),
    sdpa.back_cudnn: (1, 0, 2, 4),
    ops.back_layer_norm: (2,),
}
# DeepSpeed's own linear layers save weights as they are, and inputs before them.
WHOLE: Mapping[Back, tuple[int, ...]] = {
    back: order for back, order in ORDERS.items() if back is not ops.back_linear
}
EXPERTS: Mapping[Back, int] = {back_grouped: 1}
TURNED: Mapping[Back, int] = {ops.back_linear: 1, ops.back_addmm: 1, **EXPERTS}
Key: TypeAlias = "tuple[int, int, int]"


class Lent(Storage):
    """A block that other streams may still use when it is freed (`record_stream`)."""

    __slots__ = ("users",)

    def __init__(self, id: int, size: int, write: Any) -> None:
        super().__init__(id, size, write)
        self.users: tuple[int, ...] = ()

    def __del__(self) -> None:
        self.write(Free(self.id, self.users))


def size_of(tensor: Tensor) -> int:
    return tensor.count * tensor.format.block_bytes


def brought(r: Recorder, like: Tensor, stream: int, part: Part = "activations") -> Tensor:
    """Its values on the GPU again, in a block of their own."""
    size = size_of(like)
    storage = Lent(r.block(size, "brought_back", part, stream), size, r.write)
    r.comm("to_device", size, 1, "host", stream)
    back = Tensor(like.shape, like.format, storage)
    back.strides = like.strides
    return back


class OnHost(Hooks):
    """All that is saved goes to the host, weights among it, and comes back for the node that asks,
    as it lies without gaps."""

    def __init__(self, r: Recorder, vocabulary: int = 0) -> None:
        self.r, self.vocabulary = r, vocabulary

    def pack(self, tensor: Tensor, turned: bool = False) -> Packed:
        self.r.comm("to_host", size_of(tensor), 1, "host")
        return Packed(self, 0, None, Tensor(tensor.shape, tensor.format, None))

    def unpack(self, packed: Packed, node: Node) -> Tensor:
        logits = packed.like.shape[-1:] == (self.vocabulary,) and not self.r.span
        return brought(self.r, packed.like, COMPUTES, "logits" if logits else "activations")


class Streams(Hooks):
    """TRL knows a tensor that is on its way by where it lies and keeps what is saved of it
    meanwhile, and copies what does not lie in order first; torchtune does neither (`plain`)."""

    spares = True

    def __init__(self, r: Recorder, weights: Weights, *, plain: bool, trims: bool) -> None:
        self.r, self.weights, self.plain = r, weights, plain
        self.orders, self.turned = (WHOLE, EXPERTS) if weights.whole else (ORDERS, TURNED)
        self.model_only = plain  # its recipes run the model within, TRL its whole step
        self.number = 0
        self.leaving: dict[int, Tensor] = {}  # fwd_stash
        self.known: dict[Key, int] = {}  # storage_to_tensor_id
        self.keys: dict[int, Key] = {}
        self.back: dict[int, Tensor] = {}  # bwd_tensor_stash
        self.current: Node | None = (
            # that runs, or ran last: TRL holds on to it, and it to the leaves that it gave
            # gradients to
            None
        )
        self.trims = trims

    def begin(self) -> None:
        self.number = 0
        if self.trims:
            self.r.write(Trim())

    def pack(self, tensor: Tensor, turned: bool = False) -> Packed:
        self.number = number = self.number + 1
        assert tensor.storage is not None
        ours = id(tensor) in self.weights.leaves  # many may lie in one block
        key = (tensor.storage.id, id(tensor) if ours else tensor.offset, tensor.format.block_bytes)
        if not self.plain and key in self.known:
            self.track(key, number)
            return Packed(self, number, tensor, tensor)
        turned = turned and id(tensor) not in self.weights.straight
        known = tensor.storage.id in self.weights.blocks or (
            id(tensor) in self.weights.parameters and not turned
        )
        if size_of(tensor) < SMALLEST or known:
            return Packed(self, number, tensor, tensor)
        if not self.plain and (ours or turned or tensor.strides is not None or tensor.offset):
            tensor = self.r.tensor(tensor.shape, tensor.format, "contiguous")
        for one in [one for one in self.leaving if one <= number - STASH]:
            self.let_go(one)
        self.r.write(Sync(COPIES, COMPUTES))
        self.r.comm("to_host", size_of(tensor), 1, "host", COPIES)
        self.leaving[number] = tensor
        self.track(key, number)
        like = Tensor(tensor.shape, tensor.format, None)
        like.strides = tensor.strides
        return Packed(self, number, None, like)

    def unpack(self, packed: Packed, node: Node) -> Tensor:
        number, kept = packed.number, packed.kept
        if kept is not None:
            packed.kept = None
            self.forget(number)
            return kept
        former: list[int] = []
        if self.r.depth == 1 and self.current is not node:
            self.current, former = node, list(self.back)
        away = number not in self.leaving
        if away:
            self.back[number] = brought(self.r, packed.like, COPIES)
            self.r.write(Sync(COMPUTES, COPIES))
        found = self.back[number] if away else self.leaving[number]
        node.acts = (*node.acts, partial(self.ran, number, away, former))
        self.forget(number)
        return found.detach()

    def ran(self, number: int, away: bool, former: list[int]) -> None:
        """The node is done: what came for it goes behind the next one; what others still refer to
        is theirs, and the allocator is told so."""
        if away and number in self.back:
            storage = self.back[number].storage
            assert isinstance(storage, Lent)
            if (
                sys.getrefcount(storage) > 3
            ):  # this variable, the tensor that is kept, getrefcount's argument
                storage.users = (COMPUTES,)
                del self.back[number]
            del storage
        for one in list(self.leaving):
            self.let_go(one)
        for one in former:
            if one in self.back:
                self.r.write(Sync(COPIES, COMPUTES))
                del self.back[one]

    def over(self) -> None:
        """The backward is over, and then the step: both streams are waited for."""
        for one in list(self.back):
            self.r.write(Sync(COPIES, COMPUTES))
            del self.back[one]
        if self.plain:
            return
        self.r.write(Sync(COPIES, COMPUTES))
        self.r.write(Sync(COMPUTES, COPIES))
        self.leaving.clear()
        self.known.clear()
        self.keys.clear()

    def let_go(self, number: int) -> None:
        self.r.write(Sync(COMPUTES, COPIES))
        del self.leaving[number]
        self.forget(number)

    def track(self, key: Key, number: int) -> None:
        self.known[key], self.keys[number] = number, key

    def forget(self, number: int) -> None:
        key = self.keys.pop(number, None)
        if key is not None and self.known.get(key) == number:
            del self.known[key]


def around_steps(body: Body) -> Hooks | None:
    """What stands around every micro-batch. With bitsandbytes at hand TRL empties the allocator's
    cache before each (`__enter__`)."""
    job, r = body.program.job, body.r
    if job.activation_offload == "all":
        return OnHost(r, body.model.vocab)
    if job.activation_offload != "streams":
        return None
    own = job.framework == "torchtune"
    packed = job.quantization != "none" or "bitsandbytes" in OPTIMIZERS[job.optimizer].cite
    return Streams(r, body.engine.weights(body), plain=own, trims=packed and not own)


__all__ = ["OnHost", "Streams", "around_steps"]
