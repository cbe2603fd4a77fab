"""A shape-level autograd: tensors that are only a shape and a life. Programs of `lower` run on them
and leave a Tape.

Backward follows torch's engine (torch/csrc/autograd/engine.cpp, input_buffer.cpp,
accumulate_grad.h, torch 2.13): ready nodes run latest first, saved tensors go after their node ran,
a second gradient is added in place where torch may do so.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from memfit.formats import Format
from memfit.lower.lifetimes import Unwinding
from memfit.lower.strides import kept
from memfit.lower.tensors import (
    Back,
    Bundle,
    Choices,
    Elastic,
    Frame,
    Grads,
    Hooks,
    Node,
    Packed,
    Shape,
    Storage,
    Tensor,
    unpacked,
)
from memfit.tape import Alloc, Comm, Compute, Event, Mark, Part, Phase

if TYPE_CHECKING:
    from memfit.lower.compact import Notes


class Standing(NamedTuple):
    """What was made where it was first needed, and stays: workspaces by thread, blocks by what they
    are for."""

    workspaces: dict[str, Storage | None]
    blocks: dict[tuple[str, Shape], Tensor]

    @property
    def name(self) -> Hashable:
        return frozenset(self.workspaces), frozenset(self.blocks)


class StopRecompute(Unwinding):
    """Everything that backward needs is there again: torch stops the recomputation early."""


class Recorder:
    """Writes events; holds what the program is doing (`where`, `phase`) and whether it records
    gradients (`grad`)."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.marks: list[int] = []  # where the Marks stand
        self.write = self.events.append
        self.where, self.grad = "", True
        self.phase: Phase = "load"
        self.part: Part = "activations"
        self._next_id = 0
        self._next_seq = 0
        self.thread = "forward"  # backward runs on a thread of its own
        self.cublas, self._cublas_of = 0, dict[str, Storage | None]()
        self.sums: Callable[[int, int], tuple[int, ...]] = (
            lambda rows, columns: ()
        )  # buffers of a sum over the rows of a matrix
        self._standing: dict[tuple[str, Shape], Tensor] = {}
        self.frame: Frame | None = None
        self.shared: set[str] = (
            set()
        )  # names of leaves that get several gradients, which are added into another tensor
        self.span, self.at = "", 0  # the layer that is running, and the step
        self.adds = (
            False  # the gradients of parameters go as they come: something adds them up elsewhere
        )
        self.kept: list[
            tuple[str, Any]
        ] = []  # by graph nodes as plain attributes, and the layer of each,
        self.former: list[
            tuple[str, Any]
        ] = []  # and those of the graph before, whose outputs a loop still holds
        self.ready: Callable[[Tensor], None] | None = (
            None  # told of every parameter whose gradient has come,
        )
        self.over: Callable[[], None] = lambda: None  # and when all have
        self.marked: list[int] = []  # the next block's number at each mark
        self.once: list[
            int
        ] = []  # blocks that are made where they are first needed, for all layers
        self.notes: Notes | None = None  # where a layer stands for many
        self.hooks: Hooks | None = None  # on what nodes save
        self.depth = 0  # of backwards within one another
        self.passes = 0  # of a generation that are written at most; 0: as many as usual

    # -------------------------------------------------------------------------------- what happens
    def mark(self, phase: Phase, where: str = "", step: int = 0) -> None:
        self.phase, self.where, self.span, self.at = phase, where, where, step
        self.part = "temporaries" if phase in ("backward", "step") else "activations"
        self.marks.append(len(self.events))
        self.marked.append(self._next_id)
        self.write(Mark(phase, where, step))

    def leave(self) -> None:
        """What follows is no layer's."""
        if self.span:
            self.mark(self.phase, "", self.at)

    def tensor(self, shape: Shape, format: Format, op: str, part: Part | None = None) -> Tensor:
        """A new block. An empty tensor has none."""
        total = prod(shape)
        size = format.bytes(total) if format.block > 1 else total * format.block_bytes
        if size == 0:
            return Tensor(shape, format, None)
        id = self._next_id
        self._next_id = id + 1
        self.write(
            tuple.__new__(
                Alloc,
                (id, size, part or self.part, self.where, op, (*shape, format.block_bytes), 0),
            )
        )
        return Tensor(shape, format, Storage(id, size, self.write))

    def like(self, tensor: Tensor, op: str, part: Part | None = None) -> Tensor:
        """`empty_like`: the same shape, and the same layout without gaps."""
        out = self.tensor(tensor.shape, tensor.format, op, part)
        if tensor.strides is not None:
            out.strides = kept(tensor.shape, tensor.strides)
        return out

    def chosen(self, op: str) -> bool:
        """Whether a selective checkpoint keeps what `op` puts out; asked once for every operation
        that it may keep."""
        return self.frame is not None and self.frame.keeps is not None and self.frame.keeps(op)

    @property
    def replaying(self) -> bool:
        """Whether a checkpoint is being run again."""
        return self.frame is not None and self.frame.replaying

    @property
    def watched(self) -> bool:
        """Whether a selective checkpoint looks on: composites then copy where they would write in
        place (torch 2.13 ATen/TensorSubclassLikeUtils.h areAnyTensorSubclassLike)."""
        return self.frame is not None and self.frame.keeps is not None

    def put_out(self, make: Callable[[], Tensor], chosen: bool) -> Tensor:
        """A result that a selective checkpoint keeps, or takes from what it kept."""
        frame = self.frame
        if not chosen or frame is None:
            return make()
        if frame.replaying:
            out = frame.kept.pop(0)
            frame.taken = -1 if out.storage is None else out.storage.id
            return out
        out = make()
        frame.kept.append(out.detach())
        return out

    def scratch(
        self, size: int, op: str, part: Part = "workspace", stream: int = 0
    ) -> Storage | None:
        """Bytes that a kernel takes for itself; they live while the caller keeps what is
        returned."""
        return Storage(self.block(size, op, part, stream), size, self.write) if size > 0 else None

    def block(self, size: int, op: str, part: Part, stream: int = 0) -> int:
        """A block that the caller frees."""
        id = self._next_id
        self._next_id = id + 1
        self.write(Alloc(id, size, part, self.where, op, (size,), stream))
        return id

    def elastic(self, size: int, op: str, part: Part, stream: int = 0) -> Elastic:
        """A storage without a block so far."""
        return Elastic(size, lambda: self.block(size, op, part, stream), self.write)

    @property
    def next_id(self) -> int:
        return self._next_id

    def only(self, tensor: Tensor) -> Tensor:
        """It is made where it is first needed, and then there for all layers."""
        if tensor.storage is not None:
            self.once.append(tensor.storage.id)
        return tensor

    def standing(self, shape: Shape, format: Format, op: str, part: Part) -> None:
        """A block of this shape, made where it is first needed, that stays."""
        if (op, shape) not in self._standing:
            self._standing[op, shape] = self.only(self.tensor(shape, format, op, part))

    @property
    def standing_now(self) -> Standing:
        return Standing(dict(self._cublas_of), dict(self._standing))

    def stand(self, what: Standing) -> None:
        """What stood at the end of another's walk stands here, too."""
        self._cublas_of, self._standing = dict(what.workspaces), dict(what.blocks)

    def beside(self) -> Recorder:
        """Another recorder, for which what stands here stands, too."""
        other = Recorder()
        other.cublas, other.sums = self.cublas, self.sums
        other.stand(self.standing_now)
        return other

    def reserve(self, count: int) -> int:
        """The first of so many numbers of blocks."""
        self._next_id += count
        return self._next_id - count

    def number(self) -> int:
        """For what is no block and yet told apart."""
        self._next_id += 1
        return self._next_id - 1

    def adopt(self, id: int, tensor: Tensor) -> Storage:
        """A storage for a block whose `Alloc` is written already."""
        return Storage(id, tensor.format.bytes(tensor.count), self.write)

    def compute(
        self, op: str, flops: int, bytes: int, math: str, *, kept: bool = False, kernels: int = 1
    ) -> None:
        """`kept`: a selective checkpoint has the result, so a recomputation runs no kernel for it.
        `kernels`: that share all this."""
        if kept and self.replaying:
            return
        if self.thread not in self._cublas_of and op in ("linear", "matmul"):
            self._cublas_of[self.thread] = workspace = self.scratch(self.cublas, "cublas")
            self.once += [] if workspace is None else [workspace.id]
        self.write(Compute(op, flops, bytes, math, self.where, 0, kernels))

    def comm(self, op: str, size: int, ranks: int, group: str, stream: int = 0) -> None:
        self.write(Comm(op, size, ranks, group, self.where, stream))

    # ----------------------------------------------------------------------------------- the graph
    def leaf(self, shape: Shape, format: Format, name: str, part: Part, needs: bool) -> Tensor:
        """A parameter or buffer. A packed weight is as many blocks as its library keeps tensors."""
        if format.apart:
            tensor = self.packed_leaf(shape, format, part)
        else:
            tensor = self.tensor(shape, format, "parameter", part)
        tensor.needs, tensor.name = needs, name
        return tensor

    def packed_leaf(self, shape: Shape, format: Format, part: Part) -> Tensor:
        """Scales, zero points and indices live as long as the values that they belong to."""
        sizes = format.tensors(prod(shape), shape[-1])
        blocks = [self.block(size, "parameter", part) for size in sizes]
        return Tensor(shape, format, Bundle(blocks, sum(sizes), self.write))

    def node(
        self,
        op: str,
        out: Tensor,
        inputs: tuple[Tensor, ...],
        back: Back,
        saved: tuple[Any, ...] = (),
        extra: Any = None,
    ) -> Tensor:
        """Hang `out` into the graph if an input needs a gradient; otherwise nothing is saved."""
        if not self.grad:
            return out
        edges: list[Node | Tensor | None] = []
        slots: list[int] = []
        needed = False
        for one in inputs:
            if one.needs:
                needed = True
                edges.append(one.node if one.node is not None else one)
            else:
                edges.append(None)
            slots.append(one.slot)
        if needed:
            seq = self._next_seq
            self._next_seq = seq + 1
            node = Node(seq, op, self.where, back, tuple(edges), tuple(slots))
            node.saved, node.extra, node.span = saved, extra, self.span
            if self.hooks is not None and self.frame is None:
                node.saved, node.packed = self.hooks.packed(saved, back), True
            out.node, out.needs = node, True
            if self.frame is not None and any(one is not None for one in saved):
                self._framed(node, out)
        return out

    def _framed(self, node: Node, out: Tensor) -> None:
        """A node inside a checkpoint saves nothing; its double of the recomputation does, and the
        last one ends it. What a node saves of its inputs is saved before its kernel runs, so the
        last one does not run and its output never comes to be."""
        frame = self.frame
        assert frame is not None
        if not frame.replaying:
            node.saved, node.frame = (), frame
            frame.nodes.append(weakref.ref(node))
            return
        known = frame.nodes[len(frame.fresh)]()
        wanted = known is not None and known.frame is frame
        frame.fresh.append(node if wanted else None)
        if len(frame.fresh) == len(frame.nodes) and not frame.whole:
            if out.storage is not None and out.storage.id == frame.taken:
                frame.kept.append(
                    out.detach()
                )  # nobody has come to take it: it goes with the frame
            elif out.storage is not None and newest(node.saved) < out.storage.id:
                self._unwrite(out.storage)
            raise StopRecompute
        if not wanted:
            frame.spent.append(weakref.ref(node))

    def _unwrite(self, storage: Storage) -> None:
        for index in range(len(self.events) - 1, max(-1, len(self.events) - 6), -1):
            event = self.events[index]
            if type(event) is Alloc and event.id == storage.id:
                self.events[index:] = [
                    event for event in self.events[index + 1 :] if type(event) is not Compute
                ]
                storage.write = lambda event: None
                return

    def checkpoint(
        self,
        run: Callable[[Tensor], Tensor],
        given: Tensor,
        choices: Choices | None = None,
        whole: bool = False,
    ) -> Tensor:
        """Run a piece of the forward so that it keeps its input and nothing else
        (use_reentrant=False), or what is chosen."""
        if not self.grad or self.frame is not None:
            return run(given)
        frame = Frame(
            run, given if self.hooks is None else self.hooks.packed_input(given), choices, whole
        )
        self.frame = frame
        out = run(given)
        self.frame = None
        if not frame.nodes:
            frame.again = frame.given = None
        return out

    def reentrant(
        self, run: Callable[[Tensor], Tensor], given: Tensor, beside: list[Tensor]
    ) -> Tensor:
        """The older way: forward without a graph; its backward runs the piece again and a backward
        of its own inside (torch/utils/checkpoint.py CheckpointFunction). `beside` is what the piece
        returns beside its output: a Function's outputs all get a gradient, zeros where there is
        none."""
        if not self.grad or not given.needs:
            return run(given)
        self.grad = False
        out = run(given).detach()
        self.grad = True
        shapes = [(one.shape, one.format) for one in beside]

        def back(r: Recorder, node: Node, g: Tensor) -> Grads:
            zeros = [r.tensor(*shape, "zeros") for shape in shapes]
            fresh = node.saved[0].detach()
            fresh.needs = True
            part, r.part = r.part, "activations"
            before = len(r.kept)
            again = run(fresh)
            r.part = part
            r.backward(again, g, *zip(beside, zeros, strict=True))
            beside.clear()
            del r.kept[before:]
            return (fresh.grad,)

        return self.node("checkpoint", out, (given,), back, (given,))

    def keep(self, tensor: Tensor) -> Tensor | None:
        """A node's context holds the tensor as a plain attribute: until its graph goes, with or
        without a checkpoint around it. The double of a recomputation goes with its own extras, for
        which the tensor is returned."""
        if self.replaying:
            return tensor
        if self.grad:
            self.kept.append((self.span, tensor))
        return None

    def let_go(self, kept: list[tuple[str, Tensor]]) -> None:
        """A graph goes after backward, or with the outputs that a loop holds, and with it what its
        nodes' contexts hold, each layer's in its own span."""
        while kept:
            span, _ = kept[-1]
            if span != self.span:
                self.mark(self.phase, span, self.at)
            kept.pop()

    @contextmanager
    def hooked(self, hooks: Hooks | None) -> Iterator[None]:
        before, self.hooks = self.hooks, hooks
        try:
            yield
        finally:
            self.hooks = before

    def _recompute(self, frame: Frame, node: Node) -> None:
        self.run_again(frame, node)
        for known, double in zip(frame.nodes, frame.fresh, strict=True):
            own = known()
            if own is not None and double is not None:
                own.saved = double.saved
                if not double.stays:
                    double.saved = ()
        frame.nodes, frame.fresh, frame.spent = [], [], []

    def outlive(self, tensor: Tensor) -> None:
        """Others refer to what a recomputation made, until backward is over: its operations keep
        what they saved, though their originals have taken it (torch 2.13 utils/checkpoint.py
        _recomputation_hook)."""
        frame, waiting = self.frame, [tensor.node]
        while waiting and frame is not None:
            node = waiting.pop()
            if node is not None and not node.stays:
                # None of them ever runs: it needs no backward and nothing before the piece.
                own = [one for one in node.inputs if isinstance(one, Node)]
                node.inputs = tuple(one for one in own if one.seq >= frame.first)
                node.stays, node.back = True, never
                waiting += [one for one in own if one.seq >= frame.first]

    def run_again(self, frame: Frame, node: Node) -> None:
        assert frame.again is not None
        assert frame.given is not None
        given = frame.given
        if isinstance(given, Packed):
            like, given = given.like, given.hooks.unpack(given, node)
            given.node, given.slot, given.needs = like.node, like.slot, like.needs
        frame.replaying = frame.done = True
        frame.first = self._next_seq
        frame.keeps = None if frame.choices is None else frame.choices()
        self.frame = frame
        phase_part, self.part, thread = self.part, "activations", self.thread
        try:
            frame.again(given)
        except StopRecompute as stopped:
            stopped.unwind()
        finally:
            self.frame, self.part, self.thread = None, phase_part, thread

    def backward(self, root: Tensor, gradient: Tensor, *others: tuple[Tensor, Tensor]) -> None:
        """Run the graph of `root`, and of `others` with their gradients. The caller's references to
        gradients count, as in torch."""
        if root.node is None:
            raise ValueError("backward from a tensor without a graph")
        roots = [root.node, *(one.node for one, _ in others if one.node is not None)]
        waiting = _dependencies(roots)
        buffers: dict[Any, Tensor] = {key_of(root.node, root.slot): gradient}
        buffers.update(
            (key_of(one.node, one.slot), given) for one, given in others if one.node is not None
        )
        ready = [(-node.seq, node) for node in dict.fromkeys(roots) if not waiting.get(node)]
        heapify(ready)
        del root, gradient, roots, others
        self.depth += 1
        while ready:
            self._run(heappop(ready)[1], waiting, buffers, ready)
        self.depth -= 1

    def _run(
        self,
        node: Node,
        waiting: dict[Any, int],
        buffers: dict[Any, Tensor],
        ready: list[tuple[int, Node]],
    ) -> None:
        if node.span != self.span:
            self.mark(self.phase, node.span, self.at)
            if self.notes is not None:
                self.notes.cross(len(self.marks) - 1, buffers)
        if node.frame is not None and not node.frame.done:
            self._recompute(node.frame, node)
        self.where = node.where
        if node.packed:
            node.saved = unpacked(node.saved, node)
        results = list(
            node.back(
                self, node, buffers.pop(node) if node.outputs == 1 else gathered(node, buffers)
            )
        )
        node.saved, node.frame = (), None
        for act in node.acts:
            act()
        node.acts = ()
        for index, target in enumerate(node.inputs):
            if target is None:
                continue
            result, results[index] = results[index], None
            if result is not None:
                key = target if isinstance(target, Tensor) else key_of(target, node.slots[index])
                old = buffers.pop(key, None)
                buffers[key] = (
                    result
                    if old is None
                    else self._sum(
                        old,
                        result,
                        "gradients" if isinstance(target, Tensor) and target.name else None,
                    )
                )
                del old
            del result
            waiting[target] -= 1
            if waiting[target] == 0:
                if isinstance(target, Tensor):
                    self._accumulate(target, buffers)
                elif target.outputs > 1 or target in buffers:
                    heappush(ready, (-target.seq, target))

    def _sum(self, old: Tensor, new: Tensor, part: Part | None) -> Tensor:
        """InputBuffer::add: a second gradient is added into the first where nobody else holds that
        one (torch 2.13 input_buffer.cpp; only the older of the two is ever reused)."""
        # Three references (this variable, the caller's, getrefcount's argument) mean that nobody
        # else holds it; so does a storage that one tensor holds.
        if sys.getrefcount(old) == 3 and sys.getrefcount(old.storage) == 2:
            return old
        return self.like(old, "accumulate", part)

    def _accumulate(self, leaf: Tensor, buffers: dict[Any, Tensor]) -> None:
        """AccumulateGrad: the first gradient is kept as it is, later ones are added into it."""
        new = buffers.pop(leaf, None)
        if new is not None and leaf.grad is None and not (self.adds and leaf.name):
            leaf.grad = new.detach()
            if leaf.name and new.storage is not None:
                self._named(new.storage.id)
        if self.ready is not None and leaf.name and new is not None:
            del new
            self.ready(leaf)

    def _named(self, id: int) -> None:
        """What became a parameter's gradient is one, whatever it was made as; it was made not long
        ago."""
        for index in range(len(self.events) - 1, -1, -1):
            event = self.events[index]
            if type(event) is Alloc and event[0] <= id:
                if event[0] == id:
                    self.events[index] = Alloc(
                        id,
                        event.size,
                        "gradients",
                        event.where,
                        event.op,
                        event.formula,
                        event.stream,
                    )
                return


def never(r: Recorder, node: Node, g: Tensor) -> Grads:
    """The backward of an operation whose original runs in its place."""
    raise AssertionError(f"the double of `{node.op}` has no backward")


def newest(saved: Sequence[Any]) -> int:
    """The last block among what is saved: one that came with the output, or after it, is saved when
    the kernel has run."""
    storages = [
        one.storage if isinstance(one, Tensor) else one
        for one in saved
        if not isinstance(one, tuple)
    ]
    return max(
        [storage.id for storage in storages if storage is not None]
        + [newest(one) for one in saved if isinstance(one, tuple)],
        default=-1,
    )


def key_of(node: Node, slot: int) -> Any:
    """Where the gradient of one of a node's outputs is collected."""
    return node if node.outputs == 1 else (node, slot)


def gathered(node: Node, buffers: dict[Any, Tensor]) -> dict[int, Tensor]:
    """What arrived for a node of several outputs."""
    return {
        slot: buffers.pop((node, slot)) for slot in range(node.outputs) if (node, slot) in buffers
    }


def _dependencies(roots: list[Node]) -> dict[Any, int]:
    """How many gradients each node or leaf waits for."""
    waiting: dict[Any, int] = {}
    seen, stack = set(roots), list(roots)
    while stack:
        for target in stack.pop().inputs:
            if target is None:
                continue
            waiting[target] = waiting.get(target, 0) + 1
            if not isinstance(target, Tensor) and target not in seen:
                seen.add(target)
                stack.append(target)
    return waiting
