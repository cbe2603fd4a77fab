"""The graphs of layers, one a kind: which values go from piece to piece, and how graphs name
them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from memfit.graph import Graph
from memfit.graph.solve import Solver
from memfit.model.families._captured import CROSSING, LATE, PAST
from memfit.trace.samples import trained_titles
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


def alike_in_number(
    run: Mapping[str, Piece], prefix: str, own: Sequence[str], kinds: Sequence[str]
) -> dict[str, Piece]:
    """The pieces of a run whose layers are of the kinds `own` under the names that they have in
    one of the kinds `kinds`: the first layer of a kind stands for each of them."""
    if own == kinds:
        return dict(run)
    layers = {f"{prefix}.{number}" for number in range(len(own))}
    if unknown := sorted(layers ^ (set(run) - {START, FINAL, TAIL})):
        raise Refused(f"`{unknown[0]}` does not run, or runs beside those of the config")
    found = {name: piece for name, piece in run.items() if name not in layers}
    for name, source in stand_ins(prefix, own, kinds).items():
        found[name] = renamed(run[source], source, name)
    return found


def stand_ins(prefix: str, own: Sequence[str], kinds: Sequence[str]) -> dict[str, str]:
    """The layer in `own` that stands for each layer in `kinds`: the first one of the same kind."""
    if unknown := sorted(set(own) ^ set(kinds)):
        raise Refused(f"not every example has layers of kind `{unknown[0]}`")
    return {
        f"{prefix}.{number}": f"{prefix}.{own.index(kind)}" for number, kind in enumerate(kinds)
    }


def renamed(piece: Piece, old: str, new: str) -> Piece:
    """The piece as if its layer lay at another place."""

    def moved(name: str) -> str:
        return new + name[len(old) :] if f"{name}.".startswith(f"{old}.") else name

    return replace(
        piece,
        name=new,
        calls=[replace(call, where=moved(call.where)) for call in piece.calls],
        reads=[
            tuple("$" + moved(one[1:]) if isinstance(one, str) else one for one in reads)
            for reads in piece.reads
        ],
    )


def layer_graphs(
    cut: Sequence[Mapping[str, Piece]],
    prefix: str,
    kinds: Sequence[str],
    solver: Solver,
    dtype: str,
) -> tuple[dict[str, Graph], dict[str, str]]:
    """One graph a kind, and the values of the start that the first layer alone takes, by their
    names in its graph."""
    layers = [f"{prefix}.{number}" for number in range(len(kinds))]
    for name in layers:
        if any(name not in run for run in cut):
            raise Refused(f"`{name}` does not run")
    used = [set(run) - {START, FINAL, TAIL, *layers} for run in cut]
    if any(used):
        raise Refused(f"layers beside those of the config run: {sorted(used[0])[:3]}")
    handed = handed_values(cut[0], layers)
    crossing = crossing_names(cut[0], layers, kinds, handed)
    shared = shared_names(cut[0][START], handed[layers[0]])
    found: dict[str, Graph] = {}
    shapes: dict[str, tuple[str, Any]] = {}
    for number, (name, kind) in enumerate(zip(layers, kinds, strict=True)):
        after = layers[number + 1] if number + 1 < len(layers) else FINAL
        roles = roles_of(cut[0][name], number, handed[name] | shared | crossing)
        leaving = leaving_of(cut[0][name], crossing | handed[after])
        shape = (
            shape_of(cut[0][name], name),
            tuple(roles.get(one, one) for one in cut[0][name].given),
            sorted(
                (one, leaving[title])
                for title, one in cut[0][name].left.items()
                if title in leaving
            ),
        )
        if kind in shapes:
            if shapes[kind][1] != shape:
                raise Refused(f"`{name}` differs from `{shapes[kind][0]}`, both of kind `{kind}`")
            continue
        shapes[kind] = name, shape
        found[kind] = graph_from([run[name] for run in cut], name, solver, dtype, roles, leaving)
    return found, handed[layers[0]]


def handed_values(run: Mapping[str, Piece], layers: Sequence[str]) -> dict[str, dict[str, str]]:
    """For each layer and what follows the last one, the values that the piece before made for it
    alone: `x`, which it reads first, then `x1` and so on."""
    readers = readers_of(run)
    found: dict[str, dict[str, str]] = {}
    for before, name in pairwise((*layers, FINAL)):
        own = [title for title in run[name].given if origin_of(title) == before]
        own = [title for title in own if readers[title] == [name]]
        found[name] = {title: handed_name(place) for place, title in enumerate(own)}
        if "x" not in found[name].values():
            raise Refused(f"`{name}` takes 0 values of the layer before")
    counts = {len(found[name]) for name in layers[1:]} | {1}
    if len(counts) > 2 or len(found[FINAL]) != 1:
        raise Refused(f"layers take {' or '.join(map(str, sorted(counts)))} values of those before")
    return {layers[0]: handed_from_start(run, layers, found[(*layers, FINAL)[1]]), **found}


def handed_name(place: int) -> str:
    return f"x{place or ''}"


def readers_of(run: Mapping[str, Piece]) -> dict[str, list[str]]:
    """The pieces that read each value of another one."""
    found: dict[str, list[str]] = {}
    for name, piece in run.items():
        for title in piece.given:
            found.setdefault(title, []).append(name)
    return found


def origin_of(title: str) -> str:
    """The piece that made a value."""
    return title.rpartition(":")[0]


def handed_from_start(
    run: Mapping[str, Piece], layers: Sequence[str], following: Mapping[str, str]
) -> dict[str, str]:
    """The values of the start that the first layer reads and no other one, each with the shape of
    what that layer hands on under the same name."""
    first, readers = run[layers[0]], readers_of(run)
    own = [title for title in first.given if readers[title] == [layers[0]]]
    own = [title for title in own if origin_of(title) == START]
    found: dict[str, str] = {}
    for title, name in following.items():
        shape = first.values[first.left[title]].ref.shape
        some = [one for one in own if run[START].values[run[START].left[one]].ref.shape == shape]
        if len(some) != 1:
            raise Refused(f"the first layer takes {len(some)} values that no other layer reads")
        found[some[0]] = name
    return found


def crossing_names(
    run: Mapping[str, Piece],
    layers: Sequence[str],
    kinds: Sequence[str],
    handed: Mapping[str, Mapping[str, str]],
) -> dict[str, str]:
    """Names for what a layer makes and later ones read. One of several layers alike makes none: it
    would not be clear whose value is read."""
    names = {title for some in handed.values() for title in some}
    found: dict[str, str] = {}
    for name, kind in zip(layers, kinds, strict=True):
        for title in sorted(run[name].left, key=run[name].left.__getitem__):
            if title in names or title.startswith((PAST, LATE)):
                continue
            if list(kinds).count(kind) > 1:
                raise Refused(
                    f"`{name}`, one of several layers alike, makes values that others read"
                )
            start = f"{CROSSING}{kind}_"
            found[title] = f"{start}{sum(one.startswith(start) for one in found.values())}"
    return found


def passing_of(
    graphs: Mapping[str, Graph], run: Mapping[str, Piece], prefix: str, kinds: Sequence[str]
) -> dict[str, frozenset[str]]:
    """For each kind, the inputs that a gradient goes to when all weights are trained."""
    trained = trained_titles(graphs[START], run[START], frozenset())
    found: dict[str, frozenset[str]] = {}
    for number, kind in enumerate(kinds):
        piece, names = run[f"{prefix}.{number}"], graphs[kind].inputs
        own = frozenset(
            name
            for title in piece.given
            if title in trained
            for name, one in names.items()
            if one == piece.given[title]
        )
        found[kind] = found.get(kind, frozenset()) | own | {"x"}
        trained |= trained_titles(graphs[kind], piece, found[kind])
    return found


def roles_of(piece: Piece, number: int, names: Mapping[str, str]) -> dict[str, str]:
    roles: dict[str, str] = {}
    for title in piece.given:
        if title.startswith(INPUT):
            if title.startswith(INPUT + PAST) and title.split(".")[1] != f"{number}":
                raise Refused(f"`{piece.name}` reads the cache of layer {title.split('.')[1]}")
            roles[title] = argument(title)
        elif title in names:
            roles[title] = names[title]
        else:
            raise Refused(f"`{piece.name}` reads what `{origin_of(title)}` made")
    return roles


def leaving_of(piece: Piece, names: Mapping[str, str]) -> dict[str, str]:
    """What leaves a layer, by the names under which others read it, and what its cache has."""
    return {
        title: of_cache(title) if title.startswith(PAST) else names[title]
        for title in piece.left
        if not title.startswith(LATE)
    }


def shared_names(start: Piece, handed: Collection[str]) -> dict[str, str]:
    """Names for what every layer may read, the same whatever comes before them."""
    others = [title for title in start.left if title not in handed]
    others.sort(key=lambda title: start.left[title])
    return {title: f"shared{number}" for number, title in enumerate(others)}


def argument(title: str) -> str:
    """What graphs call an argument of the model."""
    name = title.removeprefix(INPUT)
    return of_cache(name) if name.startswith(PAST) else ARGUMENTS.get(name, name)


def of_cache(name: str) -> str:
    """The name of a cached tensor in its layer's graph: `past.keys` for `past.3.keys`."""
    return PAST + name.removeprefix(PAST).partition(".")[2]


__all__ = ["alike_in_number", "argument", "layer_graphs", "passing_of", "shared_names", "stand_ins"]
