"""What joins GPUs: NVLink, PCIe, XGMI inside a node, InfiniBand, RoCE, EFA, Ethernet between nodes.
Rows of links.toml."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from memfit.hardware.tables import figure, table
from memfit.lazy_dataclass import dataclass
from memfit.registry import Registry

Measured: TypeAlias = "Mapping[str, Mapping[int, tuple[tuple[int, float], ...]]]"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Bandwidths are bytes/s one way: `bandwidth` of one GPU (or port) with all of its peers at
    once, `peer` between two GPUs.

    `measured[collective][gpus]` are (bytes, seconds) of calls on one node, in rising order
    (collectives.json). None: unknown.
    """

    name: str
    kind: str
    generation: int | None = None
    bandwidth: float | None = None
    peer: float | None = None
    latency: float | None = None
    copy: float | None = None
    measured: Measured = field(default_factory=dict, hash=False)
    status: Mapping[str, str] = field(default_factory=dict, hash=False)
    cites: Mapping[str, str] = field(default_factory=dict, hash=False)
    note: str = ""


def _link(name: str, row: Mapping[str, Any], sources: Mapping[str, str]) -> Link:
    figures = {
        key: figure(row[key], sources)
        for key in ("bandwidth", "peer", "latency", "copy")
        if key in row
    }
    measured = _calls().get(name, {})
    status = {key: one.status for key, one in figures.items()}
    cites = {key: one.cite for key, one in figures.items()}
    if measured:
        status["measured"], cites["measured"] = "repo", _collectives()["source"]
    return Link(
        name=name,
        kind=row["kind"],
        generation=int(row["generation"]) if "generation" in row else None,
        measured=measured,
        status=status,
        cites=cites,
        note=row.get("note", ""),
        **{key: float(one.value) for key, one in figures.items()},
    )


@cache
def _collectives() -> dict[str, Any]:
    """collectives.json, as tools/rates.py wrote it."""
    with (Path(__file__).parent / "collectives.json").open("rb") as file:
        found: dict[str, Any] = json.load(file)
        return found


@cache
def _calls() -> dict[str, Measured]:
    sizes = _collectives()["bytes"]
    return {
        link: {
            op: {
                int(gpus): tuple(zip(sizes, seconds, strict=True)) for gpus, seconds in row.items()
            }
            for op, row in ops.items()
        }
        for link, ops in _collectives()["seconds"].items()
    }


@cache
def links() -> Registry[Link]:
    """Every link by name and alias."""
    rows = dict(table("links"))
    sources = rows.pop("sources")
    known: Registry[Link] = Registry("link", where="cluster.network")
    for name, row in rows.items():
        known.add(name, _link(name, row, sources), *row.get("aliases", ()))
    return known


def find_link(name: str, *, where: str = "cluster.network") -> Link:
    """`nvlink4`, `infiniband-ndr`, `ndr`, …; unknown: an `InputError` that offers the nearest."""
    return links().find(name, where=where)
