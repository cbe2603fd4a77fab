"""The TOML tables of this folder: read once, on first use; a field is one string, `value status
source`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
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


class Sections(Mapping[str, Any]):
    """The tables of a file, each parsed on first use: one answer needs two of a hundred."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts
        self.parsed: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.parsed:
            self.parsed[name] = tomllib.loads(self.texts[name])
        return self.parsed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)

    def __len__(self) -> int:
        return len(self.texts)


def sections(text: str) -> Mapping[str, Any]:
    """The parsed text; section by section where it has nothing but plain ones."""
    head, *parts = re.split(r"^\[([\w-]+)\]$", text, flags=re.MULTILINE)
    texts = dict(zip(parts[::2], parts[1::2], strict=True))
    plain = all(line.startswith("#") or not line.strip() for line in head.splitlines())
    nested = re.search(r"^\s*\[", "".join(texts.values()), re.MULTILINE)
    if plain and not nested and len(texts) == len(parts) // 2:
        return Sections(texts)
    return tomllib.loads(text)


@cache
def table(name: str) -> Mapping[str, Any]:
    """The parsed file. Callers must not change it."""
    return sections((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))


def columns(name: str, *fields: str) -> Mapping[str, Mapping[str, Any]]:
    """Of every section but `sources` these fields alone, each of one line: names are looked up in a
    quarter of the time that it takes to parse the whole table."""
    found = table(name)
    if not isinstance(found, Sections):
        return {key: row for key, row in found.items() if key != "sources"}
    lines: list[str] = []
    for key, text in found.texts.items():
        if key != "sources":
            lines += [f"[{key}]", *(one for one in text.splitlines() if one.startswith(fields))]
    return tomllib.loads("\n".join(lines))


def figure(text: str, sources: Mapping[str, str]) -> Figure:
    """`'1008e9 repo ada'`: the source is a key of `sources` or free text."""
    value, status, source = text.split(" ", 2)
    return Figure(value=value, status=status, cite=sources.get(source, source))


def span(text: str) -> tuple[int, int, str, str]:
    """`'low high status source'` -> (low, high, status, source)."""
    low, high, status, source = text.split(" ", 3)
    return int(low), int(high), status, source
