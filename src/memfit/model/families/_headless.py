"""Encoders without a head, which make embeddings: what is left of a captured class once its head is
gone.

A class with a head runs the bare model first. So its last graph begins with the operations of the
bare model (a last norm, a pooler), and what follows them is the head's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from memfit.model.model import Model
from memfit.model.modules import Captured, Linear, Module

if TYPE_CHECKING:
    from memfit.graph import Graph, Value

NONE = "none"
USUAL = "classification"  # its class has a pooler where the bare model has one
POOLER = "pooler.dense"  # of BERT's kind: one linear layer on the first token
LABELS = ("labels", "start_positions", "end_positions")
HIDDEN, POOLED = "x", "pooled"  # what the bare model returns


def source_of(model: Model) -> str:
    """The head whose class has the weights of the bare model; empty where no captured one has."""
    row = model.graphs.row
    if row.pairs or row.hears or row.tower is not None or row.bare == NONE:
        return ""
    return str(row.bare or (USUAL if USUAL in row.heads else row.heads[0]))


def headless(model: Model) -> Model:
    """The bare model of a class with a head."""
    graphs = model.graphs
    base = model.prefix.partition(".")[0]
    first, start = model.embed
    (final,) = model.final
    assert isinstance(start, Captured)
    assert isinstance(final, Captured)
    before, parts = within(base, (first, *start.parts)), within(base, final.parts)
    if graphs.row.pooler:
        width, name = model.width, f"{base}.{graphs.row.pooler}"
        parts = (*parts, Linear(name=name, inputs=width, outputs=width, bias=True))
    return replace(
        model,
        embed=(before[0], replace(start, parts=before[1:])),
        final=(replace(final, parts=parts),),
        head=Linear(name="", inputs=1, outputs=1),
        whole=(),
        graphs=replace(graphs, head=NONE, base=base),
    )


def within(base: str, parts: Iterable[Module]) -> tuple[Module, ...]:
    """Those that are the bare model's."""
    return tuple(part for part in parts if f"{part.name}.".startswith(f"{base}."))


def without_head(graph: Graph, base: str) -> Graph:
    """The operations before the first one that is not the bare model's. What they leave, and what
    they were given, stays until the end, if the code of the bare model does not let it go."""
    own = f"{base}."
    count = next(
        (at for at, op in enumerate(graph.ops) if not f"{op.where}.".startswith(own)),
        len(graph.ops),
    )
    ops = graph.ops[:count]
    values = {value.id: value for value in graph.values}
    made = {one for op in ops for one in op.outputs}
    last = ops[-1].outputs[0] if ops else graph.inputs[HIDDEN]
    given = values[graph.inputs[HIDDEN]]
    kept = given.until is None or given.until > count
    outputs: Mapping[str, int] = (
        {HIDDEN: given.id, POOLED: last} if kept and ops else {HIDDEN: last}
    )

    def lives(value: Value) -> Value:
        gone = value.until is not None and value.until <= count
        return value if gone and value.id not in outputs.values() else replace(value, until=None)

    inputs = {name: one for name, one in graph.inputs.items() if name not in LABELS}
    held = {*made, *inputs.values()}
    return replace(
        graph,
        ops=ops,
        inputs=inputs,
        outputs=outputs,
        values=tuple(lives(value) for value in graph.values if value.id in held),
        loops=tuple(loop for loop in graph.loops if loop.start < count),
    )


__all__ = ["HIDDEN", "LABELS", "NONE", "POOLED", "POOLER", "headless", "source_of", "without_head"]
