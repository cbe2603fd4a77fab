"""The bundled configs: hundreds of models known without a network, each with where its config came from and how far it is checked.

`models.jsonl` has a line per model, name first and config last, written by `tools/build_catalog.py`. Looking up a name splits the file
into lines and parses one of them; nothing else is parsed. The few configs beyond 128 KiB lie in `wide/`, named by their line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from memfit import registry
from memfit.errors import InputError

DATA = Path(__file__).with_name("models.jsonl")
_START = b'{"name":"'
_CONFIG = b',"config":'  # within a JSON string its quotes would be escaped, so the first match is the key itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One model. `parameters` was counted on the meta device with `built_with`; `published` is what its page or checkpoint says."""

    name: str
    model_type: str
    verbatim: bool  # a copy of config.json, or assembled from hyper-parameters published elsewhere
    altered: bool  # a copy with keys merged in or left out; `notes` says which
    source: str
    parameters: int | None
    built_with: str | None
    published: int | None
    published_source: str | None
    agree: bool | None  # None where one of the two counts is unknown
    checked_against: tuple[str, ...]
    notes: str | None
    raw: bytes = field(repr=False, compare=False)

    def config(self) -> dict[str, Any]:
        """The config, parsed anew at each call, so that callers may keep or change it."""
        config: dict[str, Any] | str = json.loads(self.raw)
        if isinstance(config, str):
            config = json.loads(DATA.with_name("wide").joinpath(Path(config).name).read_bytes())
        assert isinstance(config, dict)
        return config

    @property
    def provenance(self) -> str:
        """A phrase for people: where the config came from, and what speaks for it."""
        if self.verbatim:
            return "copy of config.json, with keys merged in or left out" if self.altered else "verbatim copy of config.json"
        return (
            "assembled from published hyper-parameters, "
            + {
                True: "parameter count equal to the published one",
                False: "parameter count differs from the published one for a known reason",
                None: "no published parameter count to compare with",
            }[self.agree]
        )


@lru_cache(maxsize=1)
def _lines() -> dict[str, bytes]:
    """Name → its line."""
    start = len(_START)
    return {line[start : line.index(b'"', start)].decode(): line for line in DATA.read_bytes().split(b"\n") if line}


@lru_cache(maxsize=1)
def _keys() -> dict[str, tuple[str, ...]]:
    """Folded id or short name → the names it may mean."""
    keys: dict[str, tuple[str, ...]] = {}
    for name in _lines():
        folded = _fold(name)
        for key in {folded, folded.rpartition("/")[2]}:
            keys[key] = (*keys.get(key, ()), name)
    return keys


def _fold(name: str) -> str:
    """Case and the kind of separator do not count; where one stands does (`1.5-7B` is not `1.57B`)."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def names() -> tuple[str, ...]:
    """All ids, sorted."""
    return tuple(_lines())


def find(name: str) -> str | None:
    """The one id that `name` means: exact, in another case, or its part after the slash if only one has that."""
    lines = _lines()
    if name in lines:
        return name
    meant = _keys().get(_fold(name), ())
    return meant[0] if len(meant) == 1 else None


def candidates(name: str) -> list[str]:
    """All ids that `name` is a part of."""
    folded = _fold(name)
    return [one for one in _lines() if folded in _fold(one)] if len(folded) > 2 else []


def nearest(name: str) -> list[str]:
    """The ids most like `name`; a name without organisation is compared with names without it."""
    if "/" in name:
        return registry.nearest(name, _lines())
    return [one for key in registry.nearest(name, [key for key in _keys() if "/" not in key]) for one in _keys()[key]]


def entry(name: str) -> Entry:
    """The entry called `name`, or an error with the nearest names."""
    key = find(name)
    if key is None:
        close = ", ".join(f"`{one}`" for one in nearest(name))
        raise InputError.one(f"no model `{name[:80]}` in the catalog", where="model", hint=f"did you mean {close}?" if close else "")
    return _entry(_lines()[key])


def entries() -> Iterator[Entry]:
    """All entries, for lists; configs stay unparsed."""
    return map(_entry, _lines().values())


def _entry(line: bytes) -> Entry:
    head, _, tail = line.partition(_CONFIG)
    row = json.loads(head + b"}")
    return Entry(
        name=row["name"],
        model_type=row["model_type"],
        verbatim=row["verbatim"],
        altered=row.get("altered", False),
        source=row["source"],
        parameters=row.get("parameters"),
        built_with=row.get("built_with"),
        published=row.get("published"),
        published_source=row.get("published_source"),
        agree=row.get("agree"),
        checked_against=tuple(row.get("checked_against", ())),
        notes=row.get("notes"),
        raw=tail[:-1],
    )
