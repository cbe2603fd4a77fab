"""What a program of `lower` holds: tensors that are only a shape and a life, the steps of their
backward, pieces that run again.

A storage lives as long as something refers to its Python object, as in torch itself; its end writes
the `Free`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from memfit.formats import Format
from memfit.lower.strides import Strides
from memfit.tape import Event, Free

if TYPE_CHECKING:
    from memfit.lower.recorder import Recorder

Shape: TypeAlias = tuple[int, ...]
Grads: TypeAlias = "Sequence[Tensor | None]"
# the gradient; for a node of several outputs, a dict of them
Back: TypeAlias = "Callable[[Recorder, Node, Any], Grads]"
Choices: TypeAlias = (
    "Callable[[], Callable[[str], bool]]"  # a policy for each run of a selective checkpoint
)


class Dim(int):
    """A size that remembers its letter, so that a formula can be shown with its numbers put in."""

    letter: str

    def __new__(cls, value: int, letter: str) -> Dim:
        self = super().__new__(cls, value)
        self.letter = letter
        return self


class Storage:
    """A block. Its size is what the program asks for; `Free` is written when the last reference
    goes."""

    __slots__ = ("id", "size", "write")

    def __init__(self, id: int, size: int, write: Callable[[Event], None]) -> None:
        self.id, self.size, self.write = id, size, write

    def __del__(self) -> None:
        try:
            write = self.write
        except AttributeError:  # Ctrl-C came before it had one
            return
        write(tuple.__new__(Free, (self.id, ())))


class Bundle(Storage):
    """Several blocks that come and go together: the first one's id stands for all."""

    __slots__ = ("others",)

    def __init__(self, ids: Sequence[int], size: int, write: Callable[[Event], None]) -> None:
        super().__init__(ids[0], size, write)
        self.others = tuple(ids[1:])

    def __del__(self) -> None:
        for id in getattr(self, "others", ()):
            self.write(tuple.__new__(Free, (id, ())))
        super().__del__()


class Elastic(Storage):
    """A storage whose block is given back and taken anew while tensors refer to it, as `resize_`
    has it: a new block each time."""

    __slots__ = ("take_block",)

    def __init__(
        self, size: int, take_block: Callable[[], int], write: Callable[[Event], None]
    ) -> None:
        super().__init__(-1, size, write)
        self.take_block = take_block

    def take(self) -> None:
        if self.id < 0:
            self.id = self.take_block()

    def drop(self) -> None:
        if self.id >= 0:
            self.write(Free(self.id))
            self.id = -1

    def part(self) -> Storage:
        """The block that it has, for someone who keeps it longer."""
        block, self.id = Storage(self.id, self.size, self.write), -1
        return block

    def join(self, block: Storage) -> None:
        """The block is its own again."""
        self.id, block.write = block.id, lambda event: None

    def __del__(self) -> None:
        if hasattr(self, "write"):
            self.drop()


class Tensor:
    """A view of a storage. `node` made it (None: a leaf or no gradient); `slot` is which of the
    node's outputs it is. `strides` are None where it is contiguous, `offset` is where it begins;
    `base` is what it is a view of, where torch's own tensor would hold that."""

    __slots__ = (
        "shape",
        "format",
        "storage",
        "node",
        "slot",
        "needs",
        "grad",
        "name",
        "strides",
        "base",
        "offset",
    )

    def __init__(
        self,
        shape: Shape,
        format: Format,
        storage: Storage | None,
        node: Node | None = None,
        needs: bool = False,
    ) -> None:
        self.shape, self.format, self.storage, self.node, self.needs = (
            shape,
            format,
            storage,
            node,
            needs,
        )
        self.slot = self.offset = 0
        self.grad: Tensor | None = None
        self.name = ""
        self.strides: Strides = None
        self.base: Tensor | None = None

    def view(self, *shape: int) -> Tensor:
        """The same storage in another shape; gradients pass through unchanged. For contiguous
        tensors; `views` has the rest."""
        view = Tensor(shape or self.shape, self.format, self.storage, self.node, self.needs)
        view.slot, view.offset = self.slot, self.offset
        if view.shape == self.shape:
            view.strides, view.base = self.strides, self.base
        return view

    def detach(self) -> Tensor:
        alias = Tensor(self.shape, self.format, self.storage)
        alias.strides, alias.offset = self.strides, self.offset
        return alias

    def moved(self) -> Tensor:
        """The same tensor without its place in a backward, which this name refers to no more."""
        alias, self.storage = self.detach(), None
        return alias

    @property
    def count(self) -> int:
        return prod(self.shape)


class Node:
    """One step of the backward graph; `inputs` are the nodes or leaves its results go to."""

    __slots__ = (
        "seq",
        "back",
        "saved",
        "inputs",
        "slots",
        "where",
        "span",
        "op",
        "extra",
        "frame",
        "outputs",
        "packed",
        "acts",
        "spare",
        "stays",
        "__weakref__",
    )

    def __init__(
        self,
        seq: int,
        op: str,
        where: str,
        back: Back,
        inputs: tuple[Node | Tensor | None, ...],
        slots: tuple[int, ...],
    ) -> None:
        self.seq, self.op, self.where, self.back, self.inputs, self.slots = (
            seq,
            op,
            where,
            back,
            inputs,
            slots,
        )
        self.span, self.outputs, self.packed = "", 1, False
        self.stays = False  # a double of a recomputation that others refer to
        self.saved: tuple[Any, ...] = ()
        self.extra: Any = None
        self.frame: Frame | None = None
        self.acts: tuple[Callable[[], None], ...] = ()  # what is done when it has run
        self.spare: list[
            tuple[Any, ...]
        ] = []  # what recomputations made for it that other nodes asked for


class Hooks:
    """What is done to a tensor that a node saves, and when the node asks for it
    (torch.autograd.graph.saved_tensors_hooks). `spares`: not to those of the head; `model_only`:
    nor to those of the loss."""

    spares = model_only = False
    orders: Mapping[
        Back, tuple[int, ...]
    ] = {}  # the places of what is saved first, where that is not as they stand
    turned: Mapping[Back, int] = {}  # the place of what is saved as its own transpose

    def pack(self, tensor: Tensor, turned: bool = False) -> Packed:
        raise NotImplementedError

    def unpack(self, packed: Packed, node: Node) -> Tensor:
        raise NotImplementedError

    def begin(self) -> None:
        """A micro-batch begins."""

    def over(self) -> None:
        """The backward is over."""

    def packed_input(self, given: Tensor) -> Packed:
        """A checkpoint saves what it was given, which knows its place in the graph
        (torch/utils/checkpoint.py _NoopSaveInputs)."""
        found = self.pack(given)
        found.like.node, found.like.slot, found.like.needs = given.node, given.slot, given.needs
        return found

    def packed(self, saved: tuple[Any, ...], back: Back | None = None) -> tuple[Any, ...]:
        found = list(saved)
        order, turned = (
            (self.orders.get(back, ()), self.turned.get(back)) if back is not None else ((), None)
        )
        for place in (*order, *(place for place in range(len(saved)) if place not in order)):
            one = saved[place]
            if isinstance(one, tuple):
                found[place] = self.packed(one)
            elif isinstance(one, Tensor) and one.storage is not None:
                found[place] = self.pack(one, place == turned)
        return tuple(found)


class Packed:
    """What a node has in place of a tensor: `kept` where it stays what it is, else what it is
    `like`."""

    __slots__ = ("hooks", "number", "kept", "like")

    def __init__(self, hooks: Hooks, number: int, kept: Tensor | None, like: Tensor) -> None:
        self.hooks, self.number, self.kept = hooks, number, kept
        self.like = Tensor(like.shape, like.format, None)
        self.like.strides = like.strides


def unpacked(saved: tuple[Any, ...], node: Node) -> tuple[Any, ...]:
    return tuple(
        unpacked(one, node)
        if isinstance(one, tuple)
        else one.hooks.unpack(one, node)
        if isinstance(one, Packed)
        else one
        for one in saved
    )


class Frame:
    """A checkpointed piece of the forward: `again` runs it anew on a detached input. `nodes` are
    those that save something; while it is `replaying`, `fresh` collects their doubles, None for
    those whose graph nothing refers to any more. The last of the nodes to run lets go of the frame,
    and so of the input and all else it was given, masks among it (torch/utils/checkpoint.py,
    use_reentrant=False).

    Selective: `choices` makes the policy of a run, which says of each operation in turn whether its
    results are kept; `kept` holds them until the recomputation takes them
    (create_selective_checkpoint_contexts). `whole`: it is not stopped early."""

    __slots__ = (
        "again",
        "given",
        "nodes",
        "fresh",
        "spent",
        "replaying",
        "done",
        "choices",
        "keeps",
        "kept",
        "taken",
        "whole",
        "first",
    )

    def __init__(
        self,
        again: Callable[[Tensor], Any],
        given: Tensor | Packed,
        choices: Choices | None = None,
        whole: bool = False,
    ) -> None:
        self.again: Callable[[Tensor], Any] | None = again
        self.given: Tensor | Packed | None = given
        self.nodes: list[weakref.ref[Node]] = []
        self.fresh: list[Node | None] = []
        self.spent: list[weakref.ref[Node]] = []  # doubles of nodes that are done or gone
        self.replaying = self.done = False
        self.first = 0  # of the nodes that the recomputation makes
        self.choices, self.whole = choices, whole
        self.keeps = None if choices is None else choices()
        self.kept: list[Tensor] = []
        self.taken = -1  # the block of the last of them that the recomputation took
