"""The TOML tables of this folder: read once, on first use; a field is one string, `value status
source`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from memfit.lazy_dataclass import dataclass

STATUSES = (
    "log",
    "repo",
    "derived",
    "label",
)  # printed on a real host; read in the named place; arithmetic; unchecked


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A figure as the table spells it, with how it is known and from where."""

    value: str
    status: str
    cite: str


@cache
def table(name: str) -> dict[str, Any]:
    """The parsed file; whoever reads it leaves it as it is."""
    with (Path(__file__).parent / f"{name}.toml").open("rb") as file:
        return tomllib.load(file)


def figure(text: str, sources: Mapping[str, str]) -> Figure:
    """`'1008e9 repo ada'`: the source may be a key of `sources` or words of its own."""
    value, status, source = text.split(" ", 2)
    return Figure(value=value, status=status, cite=sources.get(source, source))


def span(text: str) -> tuple[int, int, str, str]:
    """`'low high status source'` -> (low, high, status, source)."""
    low, high, status, source = text.split(" ", 3)
    return int(low), int(high), status, source
