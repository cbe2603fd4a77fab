"""The backward of checkpointed layers that are alike is walked once. For the others its events are
written again, with other block numbers and paths.

Layers are alike where they have equal weights and code, and their backward begins alike: gradients
of the same shapes, held by equally many, go to as many inputs and parameters, which have as many
gradients so far. Then the same blocks end at the same places. What keeps a block that is no
gradient (a workspace), or ends one of another layer, is not repeated.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable, Sequence
from heapq import heapify, heappush
from typing import TYPE_CHECKING, Any, NamedTuple

from memfit.lower.body import Again
from memfit.lower.captured.again import Told, add_events, silent, told_of
from memfit.lower.compact import StandIn
from memfit.lower.tensors import Node, Storage, Tensor, key_of

if TYPE_CHECKING:
    from memfit.lower.recorder import Recorder

Waiting = dict[Any, int]
Buffers = dict[Any, Tensor]
Ready = list[tuple[int, Node]]


class Target(NamedTuple):
    """What a layer's backward hands a gradient to: a leaf, or one output of an earlier node."""

    to: Node | Tensor
    slot: int

    @property
    def key(self) -> Any:
        return self.to if isinstance(self.to, Tensor) else key_of(self.to, self.slot)


class Begun(NamedTuple):
    """A layer's backward as it begins. No tensor and no frame is held, which would live longer."""

    key: Hashable
    prefix: str
    sequence: int  # of its first node in the forward
    handed: tuple[Any, ...]  # where the gradients wait that it begins with
    inner: tuple[Node, ...]
    targets: tuple[Target, ...]
    before: tuple[tuple[int, int], ...]  # of each target: waits for so many, and has this block
    outside: dict[int, str]  # blocks that it may end, by number
    event: int
    block: int
    mark: int


class Given(NamedTuple):
    """What a target gets: a block that the layer made, by its number among those, or one that it
    was handed, by its name; without a tensor nothing."""

    less: int  # gradients that it waits for no more
    source: int | str
    like: Tensor | None


class Script(NamedTuple):
    told: Told
    numbers: int  # of blocks that it took
    given: tuple[Given, ...]


class Repeated:
    """What layers did in the backward of one walk."""

    def __init__(self, r: Recorder) -> None:
        self.r = r
        self.scripts: dict[Hashable, Script] = {}
        self.begun: Begun | None = None

    def played(self, node: Node, waiting: Waiting, buffers: Buffers, ready: Ready) -> bool:
        """Whether a layer whose first node is about to run did what one before it did."""
        begun = begin(self.r, node, waiting, buffers, ready)
        if begun is None:
            return False
        script = self.scripts.get(begun.key)
        if script is None:
            self.begun = begun
            return False
        self.play(script, begun, node, waiting, buffers, ready)
        return True

    def ended(self, sequence: int, waiting: Waiting, buffers: Buffers) -> None:
        """A node of this number is next: the layer that was walked is over if it is no more its
        own."""
        begun = self.begun
        if begun is None or self.r.depth > 1 or sequence >= begun.sequence:
            return
        self.begun = None
        script = written(self.r, begun, waiting, buffers)
        if script is not None:
            self.scripts[begun.key] = script

    def play(
        self,
        script: Script,
        begun: Begun,
        node: Node,
        waiting: Waiting,
        buffers: Buffers,
        ready: Ready,
    ) -> None:
        r, frame = self.r, node.frame
        assert frame is not None
        first = r.reserve(script.numbers)
        held: list[Any] = [frame.given, *(buffers.pop(key) for key in begun.handed)]
        storages: dict[int | str, Storage] = {
            begun.outside[one.storage.id]: one.storage for one in held
        }
        gone = [storages[name] for name in script.told.freed]
        add_events(script.told, first, begun.prefix, [one.id for one in gone], r.events)
        for storage in gone:
            storage.write = silent
        held.clear()
        for number, size in script.told.sizes.items():
            storages[number] = Storage(first + number, size, r.write)
        for inner in begun.inner:
            inner.saved, inner.frame = (), None
        frame.done, frame.again, frame.given = True, None, None
        frame.nodes = []
        own = set(begun.inner)
        ready[:] = [one for one in ready if one[1] not in own]
        heapify(ready)
        for target, found in zip(begun.targets, script.given, strict=True):
            waiting[target.to] -= found.less
            if found.like is not None:
                made = again(found.like, storages[found.source])
                if isinstance(target.to, Tensor):
                    target.to.grad = made
                else:
                    buffers[target.key] = made
            if (
                isinstance(target.to, Node)
                and not waiting[target.to]
                and (target.to.outputs > 1 or target.to in buffers)
            ):
                heappush(ready, (-target.to.seq, target.to))


def again(like: Tensor, storage: Storage | None) -> Tensor:
    """A tensor of this make."""
    made = Tensor(like.shape, like.format, storage)
    made.strides, made.offset = like.strides, like.offset
    return made


def weights_of(piece: Again) -> Hashable:
    """What the layer's code and weights are, adapters among them."""
    bound = piece.bound
    tensors = [
        *bound.tensors.items(),
        *((name, one.weight) for name, one in bound.packed.items()),
        *(
            (f"{name}.{which}", getattr(one.adapter, which))
            for name, one in bound.linears.items()
            if one.adapter is not None
            for which in ("a", "b")
        ),
        *(
            (f"{name}.{which}", getattr(one, which))
            for name, one in bound.stacks.items()
            for which in ("a", "b")
        ),
    ]
    return piece.entry.layer, tuple(
        [(name, one.shape, one.format.name, one.needs) for name, one in tensors]
    )


def begin(
    r: Recorder, node: Node, waiting: Waiting, buffers: Buffers, ready: Ready
) -> Begun | None:
    """None where a layer may do what its events do not say."""
    frame = node.frame
    assert frame is not None
    x, layer = frame.given, frame.again
    if not isinstance(layer, Again) or not isinstance(x, Tensor) or frame.choices is not None:
        return None
    if r.depth != 1 or r.hooks is not None or r.ready is not None:
        return None
    if takes_along(layer):
        return None
    # Nodes behind those that save something may have run: what they handed on waits in the layer.
    handed = [
        key for key in buffers if not isinstance(key, Tensor) and maker(key).seq >= frame.begin
    ]
    handed.sort(key=lambda key: (-maker(key).seq, isinstance(key, tuple) and key[1]))
    inner, targets = reached([node, *map(maker, handed)], frame.begin)
    places = {one: place for place, one in enumerate(inner)}
    if any(one.acts or one.packed or one.stays for one in inner):
        return None
    outside: dict[int, str] = {}
    given = [x, *(buffers[key] for key in handed)]
    for place, one in enumerate(given):
        if one.storage is None or type(one.storage) not in PLAIN:
            return None
        outside.setdefault(one.storage.id, str(place))
    edges = Counter(one for node in inner for one in node.inputs)
    state = [
        (isinstance(one.to, Tensor), waiting[one.to] > edges[one.to], lying(held_by(one, buffers)))
        for one in targets
    ]
    came = [
        (places[maker(key)], isinstance(key, tuple) and key[1], outside[block_of(buffers[key])])
        for key in handed
    ]
    ran = tuple(sorted(places[one] for _, one in ready if one in places))
    code = tuple([(one.op, one.outputs) for one in inner])
    key = weights_of(layer), r.part, r.thread, tuple(came), code, tuple(state), ran
    return Begun(
        key=(*key, tuple([lying(one) for one in given])),
        prefix=layer.bound.prefix,
        sequence=frame.begin,
        handed=tuple(handed),
        inner=inner,
        targets=targets,
        before=tuple([(waiting[one.to], block_of(held_by(one, buffers))) for one in targets]),
        outside=outside,
        event=len(r.events),
        block=r.next_id,
        mark=len(r.marks),
    )


def maker(key: Any) -> Node:
    """The node whose output's gradient is collected under a key."""
    found: Node = key[0] if isinstance(key, tuple) else key
    return found


PLAIN = (Storage, StandIn)
ALONE = 3  # references to a tensor that nobody else holds: of its holder, here, and as an argument
VIEWED = 2  # references of a tensor to its storage: its own, and that of what it is a view of


def takes_along(layer: Again) -> bool:
    """Whether what all layers read may go with this one, the last that reads it."""
    shared = list(layer.own.shared.values())
    counts = Counter(id(one.storage) for one in shared)
    return any(
        sys.getrefcount(one) <= ALONE + 1
        and sys.getrefcount(one.storage) <= VIEWED * counts[id(one.storage)] + 1
        for one in shared
    )


def held_by(target: Target, buffers: Buffers) -> Tensor | None:
    """The gradient that a target has so far."""
    return target.to.grad if isinstance(target.to, Tensor) else buffers.get(target.key)


def block_of(one: Tensor | None) -> int:
    return -1 if one is None or one.storage is None else one.storage.id


def lying(one: Tensor | None) -> Hashable:
    """A tensor's make, and how many refer to it."""
    if one is None:
        return None
    make = one.shape, one.format.name, one.strides, one.offset, one.base is None, one.needs
    return *make, sys.getrefcount(one), sys.getrefcount(one.storage), type(one.storage)


def reached(roots: Sequence[Node], begin: int) -> tuple[tuple[Node, ...], tuple[Target, ...]]:
    """The nodes of a checkpointed piece, and what lies outside of it, in the order of their
    edges."""
    inner, targets = dict.fromkeys(roots), dict[Target, None]()
    waiting = [*inner]
    while waiting:
        one = waiting.pop()
        for target, slot in zip(one.inputs, one.slots, strict=True):
            if target is None:
                continue
            if isinstance(target, Node) and target.seq >= begin:
                if target not in inner:
                    inner[target] = None
                    waiting.append(target)
            else:
                targets[Target(target, slot)] = None
    return tuple(inner), tuple(targets)


def written(r: Recorder, begun: Begun, waiting: Waiting, buffers: Buffers) -> Script | None:
    """What the layer did; None where its events do not say all of it."""
    told = told_of(r.events[begun.event :], begun.block, begun.prefix, begun.outside)
    if told is None or len(r.marks) != begun.mark:
        return None
    given: list[Given] = []
    for target, (count, held) in zip(begun.targets, begun.before, strict=True):
        less, found = count - waiting[target.to], held_by(target, buffers)
        if isinstance(target.to, Tensor) and (waiting[target.to] or found is None):
            return None
        if block_of(found) == held:
            given.append(Given(less, -1, None))
            continue
        if found is None or found.storage is None or found.base is not None or held >= 0:
            return None
        number = found.storage.id
        source = begun.outside.get(number, number - begun.block)
        given.append(Given(less, source, again(found, None)))
    made = {one.source for one in given if one.like is not None and isinstance(one.source, int)}
    if made != told.sizes.keys():
        return None
    return Script(told, r.next_id - begun.block, tuple(given))


__all__ = ["Repeated"]
