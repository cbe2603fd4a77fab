"""Cuts what a forward pass did into pieces (what comes before the layers, each layer, what follows
them), aligns the same piece of several runs, and writes it as a graph with exact sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memfit.graph import Graph, Op, Value
from memfit.graph.solve import Solver, Unsolved
from memfit.model.families._captured import LATE, PAST
from memfit.model.model import BESIDE
from memfit.trace.capture import Call, Ref, Run
from memfit.trace.paths import beside, layer_of

START, FINAL, TAIL = "start", "final", "tail"
INPUT = "input:"  # begins the title of an argument of the model


class Refused(Exception):
    """The runs cannot be written as one graph; the message says where and why."""


@dataclass(kw_only=True)
class Made:
    """A value of one run while its graph is being written."""

    id: int
    ref: Ref
    of: int | None = None
    until: int | None = None
    gone: str = ""  # the segment in which it was freed


@dataclass(kw_only=True)
class Piece:
    """The calls of one segment, with values numbered from 0 in the order in which they appear."""

    name: str
    calls: list[Call] = field(default_factory=list)
    reads: list[tuple[int | str | None, ...]] = field(default_factory=list)
    makes: list[tuple[int, ...]] = field(default_factory=list)
    values: list[Made] = field(default_factory=list)
    given: dict[str, int] = field(default_factory=dict)  # from outside, by name
    left: dict[str, int] = field(default_factory=dict)  # to the outside, by name
    unread: set[str] = field(default_factory=set)  # of `given`, those that are only let go here

    def root(self, value: int) -> int:
        """The value whose storage a value has."""
        while (of := self.values[value].of) is not None:
            value = of
        return value


def pieces(run: Run, head: str) -> dict[str, Piece]:
    """Every segment of a run by its name: `start`, the layers' paths, `final`, `tail`."""
    names = segment_names(run.log, head)
    builder = Builder(run)
    for one, name in zip(run.log, names, strict=True):
        if isinstance(one, int):
            builder.freed(one)
        else:
            builder.call(one, name)
    builder.keep(run.kept)
    return builder.finished()


def segment_names(log: Sequence[Call | int], head: str) -> list[str]:
    """The segment that each entry lies in. What the loop does between two layers belongs to the one
    before; what follows the head is the tail."""
    last = max(
        (index for index, one in enumerate(log) if isinstance(one, Call) and layer_of(one.where)),
        default=-1,
    )
    found: list[str] = []
    now = START
    for index, one in enumerate(log):
        if isinstance(one, Call):
            if now != TAIL and layer_of(one.where):
                now = layer_of(one.where)
            elif one.name == "linear" and one.where == head:
                now = TAIL
            elif index > last and now != TAIL:
                now = FINAL
        found.append(now)
    return found


class Builder:
    """Numbers values, follows storages through views and in-place writes, and knows which segment
    made each."""

    def __init__(self, run: Run, ends: frozenset[str] = frozenset()) -> None:
        self.run = run
        self.ends = ends  # segments that say when they let go what others made
        self.done: dict[str, Piece] = {}
        self.order: list[str] = []
        self.latest: dict[tuple[Any, ...], tuple[str, int]] = {}  # a tensor -> (segment, value)
        self.root: dict[int, tuple[str, int]] = {}  # a block -> (segment, value)
        self.outside: dict[tuple[str, str, int], int] = {}  # imported values of a segment
        self.now = ""

    def piece(self, name: str) -> Piece:
        if name not in self.done:
            self.done[name] = Piece(name=name)
            self.order.append(name)
        return self.done[name]

    def call(self, call: Call, name: str) -> None:
        self.now = name
        piece = self.piece(name)
        reads = tuple(self.read(one, piece) for one in call.inputs)
        writes = call.name.partition(".")[0].endswith("_")
        makes = tuple(self.make(one, piece, writes=writes) for one in call.outputs)
        if call.name == "aten::copy_" and isinstance(reads[0], int):
            base = self.written_base(reads[0], piece)
            if base is not None:
                reads, makes = (*reads, base), (*makes, self.make(piece.values[base].ref, piece))
        piece.calls.append(call)
        piece.reads.append(reads)
        piece.makes.append(makes)

    def written_base(self, view: int, piece: Piece) -> int | None:
        """The tensor whose part is written: what reads it later sees another version of it."""
        root = piece.values[view]
        if root.of is None:
            return None
        while root.of is not None:
            root = piece.values[root.of]
        place = self.latest.get(key(root.ref))
        return place[1] if place is not None and place[0] == piece.name else root.id

    def read(self, ref: Ref | None, piece: Piece) -> int | str | None:
        if ref is None:
            return None
        if ref.block in self.run.names and ref.block not in self.root:
            return "$" + self.run.names[ref.block]
        place = self.latest.get(key(ref)) or self.root.get(ref.block)
        if place is None:
            return self.brought(ref, piece)
        if place[0] == piece.name:
            return place[1]
        return (
            self.brought(ref, piece) if self.is_argument(place) else self.bring(place, ref, piece)
        )

    def is_argument(self, place: tuple[str, int]) -> bool:
        """Whether a layer's value is an argument of the model, or shows all of one as it is, which
        the next layer reads from the model again."""
        piece, number = self.done[place[0]], place[1]
        root = piece.root(number)
        if key(piece.values[root].ref) == key(piece.values[number].ref):
            number = root
        titles = [name for name, one in piece.given.items() if one == number]
        arguments = [one for one in titles if one.startswith(INPUT)]
        return place[0] != START and any(not one.startswith(INPUT + PAST) for one in arguments)

    def brought(self, ref: Ref, piece: Piece) -> int:
        """A tensor made before the forward pass began: one of the model's inputs."""
        made = Made(id=len(piece.values), ref=ref)
        piece.values.append(made)
        piece.given[f"{INPUT}{self.run.given.get(ref.block, len(piece.given))}"] = made.id
        self.root[ref.block] = (piece.name, made.id)
        self.latest[key(ref)] = (piece.name, made.id)
        return made.id

    def bring(self, place: tuple[str, int], ref: Ref, piece: Piece) -> int:
        """A value of another segment becomes an input of this one."""
        known = self.outside.get((piece.name, *place))
        if known is not None:
            piece.unread.discard(f"{place[0]}:{place[1]}")
            return known
        source = self.done[place[0]].values[place[1]]
        made = Made(id=len(piece.values), ref=source.ref)
        piece.values.append(made)
        title = f"{place[0]}:{place[1]}"
        piece.given[title] = made.id
        self.done[place[0]].left[title] = place[1]
        self.outside[(piece.name, *place)] = made.id
        return made.id

    def seen(self, root: tuple[str, int], piece: Piece) -> tuple[str, int]:
        """The view by which a chain's piece already has another one's storage, else its root."""
        if not self.ends or (piece.name, *root) in self.outside:
            return root
        maker = self.done[root[0]]
        own = (at for name, place, at in self.outside if (name, place) == (piece.name, root[0]))
        views = (number for number in own if maker.root(number) == root[1])
        return root[0], next(views, root[1])

    def make(self, ref: Ref, piece: Piece, *, writes: bool = True) -> int:
        """A result. Of a chain, a view that shows all of what another piece made as it is does not
        stand for it: others read it from there (BROS)."""
        of: int | None = None
        known = self.latest.get(key(ref))
        if ref.block in self.root:
            place = self.latest.get(key(ref)) or self.root[ref.block]
            root = self.root[ref.block]
            own = root[0] == piece.name
            of = root[1] if own else self.bring(self.seen(root, piece), ref, piece)
            del place
        made = Made(id=len(piece.values), ref=ref, of=of)
        piece.values.append(made)
        whole = known is not None and self.done[known[0]].values[known[1]].of is None
        if (
            writes
            or not self.ends
            or known is None
            or known[0] == piece.name
            or of is None
            or not whole
        ):
            self.latest[key(ref)] = (piece.name, made.id)
        if of is None:
            self.root[ref.block] = (piece.name, made.id)
        return made.id

    def freed(self, block: int) -> None:
        place = self.root.pop(block, None)
        if place is None:
            return
        piece = self.done[place[0]]
        value = piece.values[place[1]]
        value.gone = self.now
        if place[0] == self.now:
            value.until = len(piece.calls)
        elif self.now in self.ends:
            self.let_go(place, value)
        self.latest = {known: at for known, at in self.latest.items() if known[0] != block}

    def let_go(self, place: tuple[str, int], value: Made) -> None:
        """This segment holds the last reference to what another one made."""
        piece = self.piece(self.now)
        place = self.seen(place, piece)
        if (piece.name, *place) not in self.outside:
            piece.unread.add(f"{place[0]}:{place[1]}")
        own = piece.values[self.bring(place, value.ref, piece)]
        own.until = len(piece.calls)

    def keep(self, kept: Mapping[str, Ref]) -> None:
        """What a cache has when the pass is over leaves the segments that made or changed it. So
        does what a layer returns and no other one reads, until the next layer has returned."""
        for name, ref in kept.items():
            place = self.latest.get(key(ref)) or self.root.get(ref.block)
            if place is not None:
                self.done[place[0]].left[name] = place[1]
        for piece in self.done.values():
            known = {piece.root(one) for one in (*piece.left.values(), *piece.given.values())}
            for value in piece.values if kept and layer_of(piece.name) else ():
                late = value.of is None and value.gone not in ("", piece.name)
                if late and value.id not in known:
                    piece.left[f"{LATE}{value.id}"] = value.id

    def finished(self) -> dict[str, Piece]:
        return {name: self.done[name] for name in self.order}


def key(ref: Ref) -> tuple[Any, ...]:
    return ref.block, ref.shape, ref.strides, ref.offset, ref.format


# ----------------------------------------------------------------------------------------- aligning
def shape_of(piece: Piece, prefix: str) -> tuple[Any, ...]:
    """What two pieces must have in common to be one graph: operations, modules, and who reads
    what."""
    return (
        tuple((call.name, relative(call.where, prefix)) for call in piece.calls),
        tuple(tuple(relative_weight(one, prefix) for one in reads) for reads in piece.reads),
        tuple(piece.makes),
        tuple((one.of, one.until, one.ref.format, len(one.ref.shape)) for one in piece.values),
    )


def relative(where: str, prefix: str) -> str:
    """The name within a layer; that of the same number in a list beside it begins with a mark."""
    layer = layer_of(where)
    if prefix and layer and beside(layer, prefix):
        return BESIDE + layer.split(".")[-2] + where[len(layer) :]
    return where[len(prefix) :].removeprefix(".") if prefix and where.startswith(prefix) else where


def relative_weight(one: int | str | None, prefix: str) -> int | str | None:
    return "$" + relative(one[1:], prefix) if isinstance(one, str) else one


def graph_from(
    runs: Sequence[Piece],
    prefix: str,
    solver: Solver,
    dtype: str,
    roles: Mapping[str, str],
    leaving: Mapping[str, str],
) -> Graph:
    """One graph of the same piece in several runs. `roles` names its inputs, `leaving` its
    outputs."""
    first = runs[0]
    for other in runs[1:]:
        differs = first_difference(first, other, prefix)
        if differs:
            raise Refused(f"`{first.name}`: {differs}")
    past = {one for name, one in first.given.items() if name.startswith(INPUT + PAST)}
    values, outside = [], set(first.given.values()) - past
    for place in past:
        if first.values[place].until is None and first.values[place].gone:
            raise Refused(f"`{first.name}` leaves it to another piece to free what a cache had")
    for place, made in enumerate(first.values):
        refs = [one.values[place].ref for one in runs]
        try:
            values.append(value_from(made, refs, solver, dtype, place in outside))
        except Unsolved as bad:
            maker = next(
                (call for call, out in zip(first.calls, first.makes, strict=True) if place in out),
                None,
            )
            where = "an input" if maker is None else f"{maker.name} in {maker.where}"
            raise Refused(f"`{first.name}`: {where}: {bad}") from None
    ops = [
        Op(
            name=call.name.removeprefix("aten::"),
            inputs=tuple(relative_weight(one, prefix) for one in reads),
            outputs=makes,
            where=relative(call.where, prefix),
            attrs=call.attrs,
        )
        for call, reads, makes in zip(first.calls, first.reads, first.makes, strict=True)
    ]
    return Graph(
        inputs={roles.get(name, name): one for name, one in first.given.items()},
        values=tuple(values),
        ops=tuple(ops),
        outputs={leaving.get(name, name): one for name, one in first.left.items()},
    )


def value_from(made: Made, refs: Sequence[Ref], solver: Solver, dtype: str, outside: bool) -> Value:
    shape = tuple(solver.solved(sizes) for sizes in zip(*(ref.shape for ref in refs), strict=True))
    strides = None
    if not all(dense(ref) for ref in refs):
        strides = tuple(
            step_of(solver, steps, sizes)
            for steps, sizes in zip(
                zip(*(ref.strides for ref in refs), strict=True),
                zip(*(ref.shape for ref in refs), strict=True),
                strict=True,
            )
        )
    format = "model" if refs[0].format == dtype else refs[0].format
    until = None if outside else made.until
    return Value(id=made.id, shape=shape, format=format, strides=strides, of=made.of, until=until)


def step_of(solver: Solver, steps: Sequence[int], sizes: Sequence[int]) -> str | int:
    """The stride of one axis; that of a single place says nothing, and need not be solved."""
    try:
        return solver.solved(steps)
    except Unsolved:
        if set(sizes) != {1}:
            raise
        return 1


def dense(ref: Ref) -> bool:
    """Whether it lies contiguously; strides of dimensions of one say nothing."""
    step = 1
    for size, stride in zip(reversed(ref.shape), reversed(ref.strides), strict=True):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def first_difference(one: Piece, other: Piece, prefix: str) -> str:
    """Where two runs part ways, in a sentence; empty where they do not."""
    if shape_of(one, prefix) == shape_of(other, prefix):
        return ""
    for number, (a, b) in enumerate(zip(one.calls, other.calls, strict=False)):
        if (a.name, a.where) != (b.name, b.where):
            return f"operation {number} is {a.name} in {a.where} or {b.name} in {b.where}"
    if len(one.calls) != len(other.calls):
        return f"{len(one.calls)} or {len(other.calls)} operations, by the sizes"
    for number, (own, others) in enumerate(zip(one.reads, other.reads, strict=True)):
        if own != others:
            return f"operation {number}, {one.calls[number].name}, reads {own} or {others}"
    for left, right in zip(one.values, other.values, strict=True):
        if (left.of, left.until) != (right.of, right.until):
            return f"value {left.id} lives until operation {left.until} or {right.until}"
    return "values differ in format"


__all__ = [
    "FINAL",
    "INPUT",
    "START",
    "TAIL",
    "Piece",
    "Refused",
    "graph_from",
    "pieces",
    "relative",
    "shape_of",
]
