"""Without gradients, layers of one kind do the same. The first one runs; for the others its events
are written again, with other block numbers and paths.

Layers are alike where they run one graph on weights of the same shapes and formats, and are given
tensors of the same shapes that equally many refer to: then the same blocks end at the same places.
What keeps a block that it does not return (a workspace) is not repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from memfit.formats import Format
from memfit.lower.compact import StandIn
from memfit.lower.strides import Strides
from memfit.lower.tensors import Shape, Storage, Tensor
from memfit.tape import Alloc, Comm, Compute, Event, Free

if TYPE_CHECKING:
    from memfit.lower.bound import Bound
    from memfit.lower.captured.run import Evaluation
    from memfit.lower.context import Context
    from memfit.model.modules import Captured

Signature: TypeAlias = tuple[Any, ...]
Given: TypeAlias = dict[str, Tensor]
# A kind of event, the number of its block, its path, and the rest of it.
Step: TypeAlias = tuple[type, int, int, tuple[Any, ...]]
NAMED = {Alloc: 3, Compute: 4, Comm: 4}  # where an event has its path


class Made(NamedTuple):
    """A tensor that a layer returns, and where its storage is from: a block that the layer made, by
    its number among those, or what it was given, by name. `base` is what it is a view of, by
    a number, or by the name of a given tensor that is a view of the same."""

    shape: Shape
    format: Format
    strides: Strides
    offset: int
    source: int | str | None
    base: int | str | None = None


class Told(NamedTuple):
    """A layer's events: `paths` behind its own, `sizes` of the blocks that it returns, and what of
    the tensors that it was given it frees."""

    steps: tuple[Step, ...]
    paths: tuple[str, ...]
    sizes: Mapping[int, int]
    freed: tuple[str, ...]


class Script(NamedTuple):
    """What a layer did. `run` is held, so that no other graph gets its number; `taken` is what its
    caller holds no more; `bases` are what its results are views of."""

    run: Evaluation
    told: Told
    numbers: int  # of blocks that it took
    taken: tuple[str, ...]
    where: str
    returned: Mapping[str, Made]
    crossing: Mapping[str, Made]
    bases: tuple[Made, ...]
    whole: bool  # whether all that it returns can be made again


def run_layer(
    run: Evaluation, given: Given, ctx: Context, bound: Bound, piece: Captured
) -> dict[str, Tensor]:
    """What a layer's graph returns; `given` loses what the layer lets go."""
    key = signature(run, given, ctx, bound)
    if key is None:
        return run.run(given, ctx, bound, piece.by_name, given)
    script = ctx.scripts.get(key)
    if script is not None:
        return play(script, given, ctx, bound)
    before = Before(given, ctx)
    found = run.run(given, ctx, bound, piece.by_name, given)
    script = before.script(run, found, given, ctx, bound)
    if script is not None and script.whole:
        ctx.scripts[key] = script
    return found


def signature(run: Evaluation, given: Given, ctx: Context, bound: Bound) -> Signature | None:
    """What makes two layers alike; None where one may do what its events do not say."""
    r, program = ctx.r, ctx.program
    if r.grad or r.frame is not None or r.hooks is not None or program.strategy or program.adapter:
        return None
    places: dict[int, int] = {}
    inputs = []
    for name, one in given.items():
        storage = one.storage
        if storage is not None and type(storage) not in (Storage, StandIn):
            return None
        alike = -1 if storage is None else places.setdefault(storage.id, len(places))
        holders = 0 if storage is None else sys.getrefcount(storage)
        whole = one.base is None
        lying = one.shape, one.strides, one.offset, whole
        inputs.append((name, one.format.name, lying, alike, holders))
    return id(run), weights_of(bound), r.part, r.thread, tuple(inputs)


def weights_of(bound: Bound) -> Signature:
    """The weights of a layer, by name, shape and format."""
    packed = ((name, one.weight) for name, one in bound.packed.items())
    return tuple(
        (name, one.shape, one.format.name) for name, one in (*bound.tensors.items(), *packed)
    )


class Before:
    """How things stand before a layer runs."""

    def __init__(self, given: Given, ctx: Context) -> None:
        r = ctx.r
        self.begin, self.first, self.marks = len(r.events), r.next_id, len(r.marks)
        self.names = {
            one.storage.id: name for name, one in given.items() if one.storage is not None
        }
        self.given = tuple(given)
        self.bases: dict[int, str] = {
            id(one.base): name for name, one in given.items() if one.base is not None
        }
        self.own: dict[int, tuple[int, Made]] = {}  # by identity, what this layer took views of
        self.crossing = {name: id(one) for name, one in ctx.crossing.items()}

    def script(
        self, run: Evaluation, found: Given, given: Given, ctx: Context, bound: Bound
    ) -> Script | None:
        """What the layer did; None where its events do not say all of it."""
        r = ctx.r
        new = {
            name: one for name, one in ctx.crossing.items() if self.crossing.get(name) != id(one)
        }
        returned = {name: self.made(one) for name, one in found.items()}
        crossing = {name: self.made(one) for name, one in new.items()}
        told = self.steps(r.events[self.begin :], bound.prefix)
        made = [*returned.values(), *crossing.values()]
        if told is None or len(r.marks) != self.marks or not r.where.startswith(bound.prefix):
            return None
        if {one.source for one in made if one and isinstance(one.source, int)} != told.sizes.keys():
            return None
        return Script(
            run=run,
            told=told,
            numbers=r.next_id - self.first,
            taken=tuple(name for name in self.given if name not in given),
            where=r.where[len(bound.prefix) :],
            returned={name: one for name, one in returned.items() if one is not None},
            crossing={name: one for name, one in crossing.items() if one is not None},
            bases=tuple(one for _, one in self.own.values()),
            whole=None not in made,
        )

    def steps(self, events: Sequence[Any], prefix: str) -> Told | None:
        """The events without this layer's path and its numbers of blocks."""
        paths: dict[str, int] = {}
        steps: list[Step] = []
        freed: list[str] = []
        sizes: dict[int, int] = {}  # of what is alive
        for event in events:
            kind = type(event)
            if kind is Free:
                number = event[0] - self.first
                if number < 0:
                    freed.append(self.names.get(event[0], ""))
                    number = -len(freed)
                elif sizes.pop(number, None) is None:
                    return None
                steps.append((Free, number, -1, event[1:]))
                continue
            at = NAMED.get(kind)
            if at is None or not event[at].startswith(prefix):
                return None
            path = paths.setdefault(event[at][len(prefix) :], len(paths))
            if kind is Alloc:
                sizes[event[0] - self.first] = event[1]
                steps.append((kind, event[0] - self.first, path, (*event[1:at], *event[at + 1 :])))
            else:
                steps.append((kind, -1, path, (*event[:at], *event[at + 1 :])))
        return None if "" in freed else Told(tuple(steps), tuple(paths), sizes, tuple(freed))

    def made(self, one: Tensor) -> Made | None:
        """How to make this tensor again; None where a script cannot."""
        if one.needs or one.node is not None or one.slot:
            return None
        source: int | str | None = None
        if one.storage is not None:
            number = one.storage.id - self.first
            source = number if number >= 0 else self.names.get(one.storage.id, "")
            if source == "" or type(one.storage) not in (Storage, StandIn):
                return None
        made = Made(one.shape, one.format, one.strides, one.offset, source)
        return made if one.base is None else self.viewed(made, one.base)

    def viewed(self, made: Made, base: Tensor) -> Made | None:
        """The same as a view of `base`, which lies in the same block."""
        name = self.bases.get(id(base))
        if name is not None and isinstance(made.source, str):
            return made._replace(base=name)
        if id(base) not in self.own:
            whole = self.made(base)
            if whole is None or whole.source != made.source or whole.base is not None:
                return None
            self.own[id(base)] = len(self.own), whole
        return made._replace(base=self.own[id(base)][0])


def play(script: Script, given: Given, ctx: Context, bound: Bound) -> dict[str, Tensor]:
    """What another layer did, done by this one."""
    r, told = ctx.r, script.told
    first = r.reserve(script.numbers)
    storages: dict[int | str, Storage] = {
        number: Storage(first + number, size, r.write) for number, size in told.sizes.items()
    }
    storages |= {name: one.storage for name, one in given.items() if one.storage is not None}
    gone = [storages[name] for name in told.freed]
    for storage in gone:
        storage.write = silent
    add_events(told, first, bound.prefix, [one.id for one in gone], r.events)

    def tensor(made: Made) -> Tensor:
        storage = None if made.source is None else storages[made.source]
        one = Tensor(made.shape, made.format, storage)
        one.strides, one.offset = made.strides, made.offset
        if made.base is not None:
            one.base = bases[made.base] if isinstance(made.base, int) else given[made.base].base
        return one

    bases: list[Tensor] = [tensor(made) for made in script.bases]
    for name, made in script.crossing.items():
        ctx.crossing[name] = tensor(made)
    found = {name: tensor(made) for name, made in script.returned.items()}
    for name in script.taken:
        del given[name]
    r.where = bound.prefix + script.where
    return found


def add_events(told: Told, first: int, prefix: str, freed: list[int], events: list[Event]) -> None:
    """The events, with numbers from `first` on, under this path."""
    new: Any = tuple.__new__
    add = events.append
    paths = [prefix + path for path in told.paths]
    for kind, number, path, rest in told.steps:
        if kind is Free:
            add(new(Free, (first + number if number >= 0 else freed[-1 - number], *rest)))
        elif kind is Alloc:
            size, part, op, formula, stream = rest
            add(new(Alloc, (first + number, size, part, paths[path], op, formula, stream)))
        else:
            at = NAMED[kind]
            add(new(kind, (*rest[:at], paths[path], *rest[at:])))


def silent(event: Event) -> None:
    """In place of `Recorder.write`: the end of the block is written already."""


__all__ = ["run_layer"]
