"""Notices to an engine while one micro-batch is walked for many: they are recorded between the
events, and the engine acts on them when the events are written out."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from memfit.tape import Event

Place: TypeAlias = (
    "tuple[str, int] | None"  # of a parameter: its layer's path, and which of that layer's it is
)


class Notice(NamedTuple):
    """`act` is what happens; `name` the unit or `leaves` the parameters that it happens to, `block`
    a gradient that has come."""

    act: str
    where: str
    name: str = ""
    leaves: tuple[Place, ...] = ()
    block: int = -1


Line: TypeAlias = "Event | Notice"

__all__ = ["Line", "Place", "Notice"]
