"""The graphs of layers, one a kind: which values go from piece to piece, and how graphs name
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.graph import Graph
from memfit.graph.solve import Solver
from memfit.model.families._captured import LATE, PAST
from memfit.trace.segments import (
    FINAL,
    INPUT,
    START,
    TAIL,
    Piece,
    Refused,
    graph_from,
    shape_of,
)

# By their names in a graph
ARGUMENTS = {"input_ids": "ids", "attention_mask": "mask", "position_ids": "positions"}


def layer_graphs(
    cut: Sequence[Mapping[str, Piece]],
    prefix: str,
    kinds: Sequence[str],
    solver: Solver,
    dtype: str,
) -> tuple[dict[str, Graph], str]:
    """One graph a kind, and which value of the start the first layer takes as its input."""
    layers = [f"{prefix}.{number}" for number in range(len(kinds))]
    for name in layers:
        if any(name not in run for run in cut):
            raise Refused(f"`{name}` does not run")
    used = [set(run) - {START, FINAL, TAIL, *layers} for run in cut]
    if any(used):
        raise Refused(f"layers beside those of the config run: {sorted(used[0])[:3]}")
    carried = carried_from_start(cut[0], layers)
    shared = shared_names(cut[0][START], carried)
    found: dict[str, Graph] = {}
    shapes: dict[str, tuple[str, Any]] = {}
    for number, (name, kind) in enumerate(zip(layers, kinds, strict=True)):
        before = layers[number - 1] if number else START
        after = layers[number + 1] if number + 1 < len(layers) else FINAL
        roles = roles_of(cut[0][name], before, carried, number) | shared
        leaving = leaving_of(cut[0], name, after)
        shape = (
            shape_of(cut[0][name], name),
            tuple(roles.get(one, one) for one in cut[0][name].given),
        )
        if kind in shapes:
            if shapes[kind][1] != shape:
                raise Refused(f"`{name}` differs from `{shapes[kind][0]}`, both of kind `{kind}`")
            continue
        shapes[kind] = name, shape
        found[kind] = graph_from([run[name] for run in cut], name, solver, dtype, roles, leaving)
    return found, carried


def roles_of(piece: Piece, before: str, carried: str, number: int) -> dict[str, str]:
    roles: dict[str, str] = {}
    for title in piece.given:
        origin = title.rpartition(":")[0]
        if title == carried or (number and origin == before):
            roles[title] = "x"
        elif title.startswith(INPUT):
            if title.startswith(INPUT + PAST) and title.split(".")[1] != f"{number}":
                raise Refused(f"`{piece.name}` reads the cache of layer {title.split('.')[1]}")
            roles[title] = argument(title)
        elif origin != START:
            raise Refused(f"`{piece.name}` reads what `{origin}` made")
    if list(roles.values()).count("x") != 1:
        raise Refused(f"`{piece.name}` takes {len(roles)} values of the layer before")
    return roles


def leaving_of(run: Mapping[str, Piece], name: str, after: str) -> dict[str, str]:
    past = {title: of_cache(title) for title in run[name].left if title.startswith(PAST)}
    others = {one for one in run[name].left if not one.startswith((PAST, LATE))}
    found = {title: "x" for title in others if title in run[after].given}
    if len(found) != 1 or len(others) != 1:
        raise Refused(f"`{name}` leaves {len(others)} values to others")
    return found | past


def carried_from_start(run: Mapping[str, Piece], layers: Sequence[str]) -> str:
    """The value of the start that the first layer reads and no other one, with the shape of what
    that layer hands on."""
    first = [title for title in run[layers[0]].given if title.startswith(f"{START}:")]
    last = run[layers[0]]
    shapes = {
        last.values[one].ref.shape
        for name, one in last.left.items()
        if not name.startswith((PAST, LATE))
    }
    others = {title for name in (*layers[1:], FINAL) if name in run for title in run[name].given}
    own = [title for title in first if title not in others]
    own = [one for one in own if run[START].values[run[START].left[one]].ref.shape in shapes]
    if len(own) != 1:
        raise Refused(f"the first layer takes {len(own)} values that no other layer reads")
    return own[0]


def shared_names(start: Piece, carried: str) -> dict[str, str]:
    """Names for what every layer may read, the same whatever comes before them."""
    others = [title for title in start.left if title != carried]
    others.sort(key=lambda title: start.left[title])
    return {title: f"shared{number}" for number, title in enumerate(others)}


def argument(title: str) -> str:
    """What graphs call an argument of the model."""
    name = title.removeprefix(INPUT)
    return of_cache(name) if name.startswith(PAST) else ARGUMENTS.get(name, name)


def of_cache(name: str) -> str:
    """`past.keys` of `past.3.keys`: what a layer's graph calls a tensor of its own cache."""
    return PAST + name.removeprefix(PAST).partition(".")[2]


__all__ = ["argument", "layer_graphs", "shared_names"]
