"""What joins GPUs: NVLink, PCIe, XGMI inside a node, InfiniBand, RoCE, EFA, Ethernet between nodes. Rows of links.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from memfit.hardware.tables import figure, table
from memfit.registry import Registry

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Bandwidths are bytes/s one way: `bandwidth` of one GPU (or port) with all of its peers at once, `peer` between two GPUs.

    `measured[collective][gpus]` is (seconds of a 512-byte call, bus bandwidth at 512 MiB) on one node. None: unknown.
    """

    name: str
    kind: str
    generation: int | None = None
    bandwidth: float | None = None
    peer: float | None = None
    latency: float | None = None
    copy: float | None = None
    measured: Mapping[str, Mapping[int, tuple[float, float]]] = field(default_factory=dict, hash=False)
    status: Mapping[str, str] = field(default_factory=dict, hash=False)
    cites: Mapping[str, str] = field(default_factory=dict, hash=False)
    note: str = ""


def _triples(text: str) -> dict[int, tuple[float, float]]:
    cells = (cell.split() for cell in text.split(", "))
    return {int(gpus): (float(seconds), float(rate)) for gpus, seconds, rate in cells}


def _link(name: str, row: Mapping[str, Any], sources: Mapping[str, str]) -> Link:
    figures = {key: figure(row[key], sources) for key in ("bandwidth", "peer", "latency", "copy") if key in row}
    measured = {key: _triples(row[key]) for key in COLLECTIVES if key in row}
    status = {key: one.status for key, one in figures.items()}
    cites = {key: one.cite for key, one in figures.items()}
    if measured:
        status["measured"], source = row["measured"].split(" ", 1)
        cites["measured"] = sources[source]
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
