"""The types of a layer's graph, its JSON, and the check that defines a legal one.

A lifetime is data: `until` counts the operations that have run when the last Python reference to a
value is gone. What autograd saves lives longer, and an operation says what that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from memfit.errors import Problem
from memfit.graph.dims import names_in

Size: TypeAlias = str | int
FORMATS = frozenset(
    {
        "model",  # the dtype of the weights
        "float32",
        "float64",
        "bfloat16",
        "float16",
        "complex64",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A tensor. `of` is the value whose storage it is a view of; `until` is the number of
    operations after which nothing refers to its storage any more, None where it leaves the
    graph."""

    id: int
    shape: tuple[Size, ...]
    format: str
    strides: tuple[Size, ...] | None = None
    of: int | None = None
    until: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """What autograd does with one operation: `saves` names operands as `i0`, results as `o0`, its
    own blocks as `n0`; `forward` and `backward` list allocations and frees; `gradients` says which
    block is each operand's gradient (`g`: the one that came)."""

    saves: tuple[str, ...] = ()
    forward: tuple[tuple[Any, ...], ...] = ()
    backward: tuple[tuple[Any, ...], ...] = ()
    gradients: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One operation: `inputs` are ids of values, names of weights (`$name`), or None."""

    name: str
    inputs: tuple[int | str | None, ...]
    outputs: tuple[int, ...]
    where: str = ""
    attrs: Mapping[str, Any] = field(default_factory=dict)
    templates: Mapping[str, Template] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """`period` operations from `start` on, of which three iterations stand in the graph for
    `count`."""

    start: int
    period: int
    count: Size


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """`inputs` are the values that come from outside, by name; `outputs` those that leave."""

    inputs: Mapping[str, int]
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    outputs: Mapping[str, int]
    loops: tuple[Loop, ...] = ()
    origin: Mapping[str, str] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------- check
def check(graph: Graph, dims: Iterable[str]) -> list[Problem]:
    """Every way in which a graph is not a legal one; `dims` are the dimensions that it may name."""
    return [Problem(message=message, where=where) for where, message in _faults(graph, set(dims))]


def _faults(graph: Graph, dims: set[str]) -> Iterator[tuple[str, str]]:
    values = {value.id: value for value in graph.values}
    if len(values) != len(graph.values):
        yield "values", "an id is given twice"
    made = {**dict.fromkeys(graph.inputs.values(), -1)}
    for number, op in enumerate(graph.ops):
        where = f"ops.{number}"
        for one in op.inputs:
            if isinstance(one, int) and one not in made:
                yield where, f"`{op.name}` reads value {one} before it is made"
        for one in op.outputs:
            if one not in values:
                yield where, f"`{op.name}` makes value {one}, which is not declared"
            elif one in made:
                yield where, f"value {one} is made twice"
            made[one] = number
    for value in graph.values:
        yield from _value_faults(value, values, made, graph, dims)
    used = _last_reads(graph)
    for name, one in graph.outputs.items():
        if one not in made:
            yield f"outputs.{name}", f"value {one} is never made"
    for one, last in used.items():
        root = _root(one, values)
        until = values[root].until if root in values else None
        if until is not None and until <= last:
            yield f"values.{one}", f"it is read by operation {last} after its last use {until}"


def _value_faults(
    value: Value,
    values: Mapping[int, Value],
    made: Mapping[int, int],
    graph: Graph,
    dims: set[str],
) -> Iterator[tuple[str, str]]:
    where = f"values.{value.id}"
    if value.format not in FORMATS:
        yield where, f"unknown format `{value.format}`"
    unknown = {name for size in value.shape for name in names_in(size)} - dims
    if unknown:
        yield where, f"unknown dimensions {', '.join(f'`{one}`' for one in sorted(unknown))}"
    if value.id not in made:
        yield where, "nothing makes it"
    if value.of is not None and value.of not in values:
        yield where, f"it is a view of value {value.of}, which is not declared"
    if value.until is not None and not 0 <= value.until <= len(graph.ops):
        yield where, f"its last use {value.until} is no operation of this graph"
    if value.strides is not None and len(value.strides) != len(value.shape):
        yield where, "its strides are not as many as its dimensions"


def _root(one: int, values: Mapping[int, Value]) -> int:
    while one in values and (of := values[one].of) is not None:
        one = of
    return one


def _last_reads(graph: Graph) -> dict[int, int]:
    return {
        one: number for number, op in enumerate(graph.ops) for one in op.inputs if type(one) is int
    }


# -------------------------------------------------------------------------------------------- JSON
def json_of(graph: Graph) -> dict[str, Any]:
    """Short lists instead of objects: a file of some families has thousands of operations."""
    values = [
        [one.id, list(one.shape), one.format, one.of, one.until]
        + ([list(one.strides)] if one.strides is not None else [])
        for one in graph.values
    ]
    ops = [
        [one.name, list(one.inputs), list(one.outputs), one.where]
        + ([dict(one.attrs)] if one.attrs or one.templates else [])
        + ([{key: _template_json(t) for key, t in one.templates.items()}] if one.templates else [])
        for one in graph.ops
    ]
    return {
        "inputs": dict(graph.inputs),
        "outputs": dict(graph.outputs),
        "values": values,
        "ops": ops,
        "loops": [[one.start, one.period, one.count] for one in graph.loops],
    }


def _template_json(one: Template) -> list[Any]:
    return [list(one.saves), one.forward, one.backward, list(one.gradients)]


def graph_of(data: Mapping[str, Any], origin: Mapping[str, str] | None = None) -> Graph:
    """The graph of such JSON."""
    values = tuple(
        Value(
            id=one[0],
            shape=tuple(one[1]),
            format=one[2],
            of=one[3],
            until=one[4],
            strides=tuple(one[5]) if len(one) > 5 else None,
        )
        for one in data["values"]
    )
    ops = tuple(
        Op(
            name=one[0],
            inputs=tuple(one[1]),
            outputs=tuple(one[2]),
            where=one[3],
            attrs=one[4] if len(one) > 4 else {},
            templates={key: _template(t) for key, t in one[5].items()} if len(one) > 5 else {},
        )
        for one in data["ops"]
    )
    return Graph(
        inputs=data["inputs"],
        values=values,
        ops=ops,
        outputs=data["outputs"],
        loops=tuple(Loop(start=a, period=b, count=c) for a, b, c in data.get("loops", ())),
        origin=origin or {},
    )


def _template(data: list[Any]) -> Template:
    saves, forward, backward, gradients = data
    return Template(
        saves=tuple(saves),
        forward=tuple(map(tuple, forward)),
        backward=tuple(map(tuple, backward)),
        gradients=tuple(gradients),
    )
