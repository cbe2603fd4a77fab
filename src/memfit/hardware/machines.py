"""Cloud machines by the provider's own name: rows of machines.toml."""

from __future__ import annotations

import re
from functools import cache

from memfit.hardware.tables import table
from memfit.lazy_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One instance type: how many of which GPU, and how that is known."""

    name: str
    cloud: str
    count: int
    gpu: str
    status: str
    cite: str


def fold(name: str) -> str:
    """The name without case and separators; Azure's `Standard_` may be left out."""
    return re.sub(r"[^a-z0-9]", "", name[:200].lower()).removeprefix("standard")


@cache
def machines() -> dict[str, Machine]:
    """Every machine by its folded name."""
    tables = table("machines")
    found: dict[str, Machine] = {}
    for cloud in ("aws", "gcp", "azure"):
        for name, text in tables[cloud].items():
            count, gpu, status, source = text.split(" ", 3)
            found[fold(name)] = Machine(
                name=name,
                cloud=cloud,
                count=int(count),
                gpu=gpu,
                status=status,
                cite=tables["sources"].get(source, source),
            )
    return found


def find_machine(name: str) -> Machine | None:
    """The machine called `name`, or None."""
    return machines().get(fold(name))
