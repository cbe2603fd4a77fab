"""Makes the files of a family: its row as data, its graphs, and what the comparison with the real
code found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memfit.graph.solve import Unsolved
from memfit.model.families import _captured, _chains, forget
from memfit.model.families._chains import runs_of
from memfit.model.families._rows import row_of
from memfit.trace.chain_files import chain_file, setting
from memfit.trace.composite_files import composed, made_composite
from memfit.trace.decoder_files import decodes, made_decoder
from memfit.trace.family_check import (
    INFERENCE,
    PRECISIONS,
    head_fault,
    infers_otherwise,
    refused_by_heads,
)
from memfit.trace.new_family import refuse, row_data
from memfit.trace.segments import Refused

SHOWN = 3  # examples that are captured


@dataclass(frozen=True, kw_only=True)
class Made:
    """A family. `graphs`: its files by setting. `left_out`: heads that it does not have, and
    why."""

    row: Mapping[str, Any]
    graphs: Mapping[str, Any]
    left_out: Mapping[str, str]


def made(kind: str, given: Mapping[str, Any] | None = None) -> Made:
    """The family of a type of models; raises InputError where none of its heads can be written and
    agrees with the real code."""
    if composed(kind):
        return Made(row=made_composite(kind, given or {}), graphs={}, left_out={})
    if decodes(kind):
        row, files = made_decoder(kind, given)
        return Made(row=row, graphs=files, left_out={})
    data, left_out = row_data(kind, given)
    last = {key: values[SHOWN] for key, values in data["sizes"].items()}
    data["sizes"] = {key: values[:SHOWN] for key, values in data["sizes"].items()}
    data, more = capturable(data)
    left_out |= more
    while data["heads"]:
        graphs = registered(data)
        refused = refused_by_heads(row_of(data), last)
        if len(refused) == len(PRECISIONS):
            raise refuse(kind, "its peaks are not the trace's in any precision")
        data = {**data, "refused": list(refused)}
        if infers_otherwise(row_of(data), last):
            data["refused"].append(INFERENCE["task"])
        registered(data, graphs)
        faults = {head: head_fault(row_of(data), last, head) for head in data["heads"]}
        faults = {head: why for head, why in faults.items() if why}
        left_out |= faults
        if not faults:
            return Made(row=data, graphs={"": graphs}, left_out=left_out)
        data = {**data, "heads": [one for one in data["heads"] if one not in faults]}
    raise refuse(kind, "; ".join(f"{head}: {why}" for head, why in left_out.items()))


def capturable(data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """With the heads whose graphs can be written, and the kinds of layers that there are."""
    left_out: dict[str, str] = {}
    for kinds in (["layer"], ["first", "layer"]):
        left_out = {}
        for head in data["heads"]:
            row = row_of({**data, **layer_kinds(data, kinds), "heads": [head]})
            try:
                for run, _ in runs_of(row):
                    setting(row, run, masked=False, alone=False)
            except (Refused, Unsolved) as bad:
                left_out[head] = str(bad)
        if len(left_out) < len(data["heads"]):
            break
    heads = [one for one in data["heads"] if one not in left_out]
    return {**data, **layer_kinds(data, kinds), "heads": heads}, left_out


def layer_kinds(data: Mapping[str, Any], kinds: list[str]) -> dict[str, Any]:
    """The kinds of the first layers, for each stack where there are two."""
    found: dict[str, Any] = {"kinds": kinds}
    if "stacks" in data:
        names = ("encoder", "decoder")
        found["stacks"] = [
            [keys, [name if one == "layer" else f"{name}_{one}" for one in kinds]]
            for name, (keys, _) in zip(names, data["stacks"], strict=True)
        ]
    return found


def registered(
    data: Mapping[str, Any], graphs: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """The graphs of a row, which is known in this process from now on."""
    row = row_of(data)
    if graphs is None:
        graphs = json.loads(json.dumps(chain_file(row)))
    _captured.MADE[row.name, ""] = graphs
    _captured.stored.cache_clear()
    _chains.graphs_of.cache_clear()
    forget(row.name)
    _chains.chained(row)
    return graphs


__all__ = ["Made", "made"]
