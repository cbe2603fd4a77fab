"""The bundled configs: hundreds of models known without a network, each with where its config came
from and how far it is checked.

`models.jsonl` has a line per model, name first and config last, written by
`tools/build_catalog.py`. Looking up a name splits the file into lines and parses one of them;
nothing else is parsed. The few configs beyond 128 KiB lie in `wide/`, named by their line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import field
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path
from typing import Any

from memfit import registry
from memfit.errors import InputError
from memfit.lazy_dataclass import dataclass

DATA = Path(__file__).with_name("models.jsonl")
TYPO = 0.75  # likeness from which another name could be meant
_START = b'{"name":"'
# within a JSON string its quotes would be escaped, so the first match is the key itself
_CONFIG = b',"config":'


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Entry:
    """One model. `parameters` was counted on the meta device with `built_with`; `published` is what
    its page or checkpoint says."""

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

    def __repr__(self) -> str:
        return f"<Entry {self.name}>"

    def config(self) -> dict[str, Any]:
        """The config, parsed anew at each call, so that callers may keep or change it."""
        found = json.loads(self.raw)
        if isinstance(found, str):
            found = json.loads(DATA.with_name("wide").joinpath(Path(found).name).read_bytes())
        config: dict[str, Any] = found
        return config

    @property
    def provenance(self) -> str:
        """A phrase for people: where the config came from, and what speaks for it."""
        if self.verbatim:
            return (
                "copy of config.json, with keys merged in or left out"
                if self.altered
                else "verbatim copy of config.json"
            )
        return (
            "assembled from published hyper-parameters, "
            + {
                True: "parameter count equal to the published one",
                False: "parameter count differs from the published one for a known reason",
                None: "no published parameter count to compare with",
            }[self.agree]
        )


class Catalog:
    """Lines of `models.jsonl`, found by name."""

    def __init__(self, data: bytes) -> None:
        start = len(_START)
        self.lines = {
            line[start : line.index(b'"', start)].decode(): line
            for line in data.split(b"\n")
            if line
        }
        self._keys: dict[str, tuple[str, ...]] = {}

    @property
    def keys(self) -> dict[str, tuple[str, ...]]:
        """Folded id or short name → the ids it may mean."""
        if not self._keys:
            for name in self.lines:
                folded = _fold(name)
                for key in {folded, folded.rpartition("/")[2]}:
                    self._keys[key] = (*self._keys.get(key, ()), name)
        return self._keys

    def find(self, name: str) -> str | None:
        if name in self.lines:
            return name
        folded = _fold(name)
        meant = self.keys.get(folded) or self.keys.get(_renamed(folded), ())
        return meant[0] if len(meant) == 1 else None

    def candidates(self, name: str) -> list[str]:
        folded = _fold(name)
        return (
            [one for one in self.lines if f"-{folded}" in "-" + _fold(one).replace("/", "-")]
            if len(folded) > 2
            else []
        )

    def nearest(self, name: str) -> list[str]:
        if "/" in name:
            return registry.nearest(name, self.lines)
        return [
            one
            for key in registry.nearest(name, [key for key in self.keys if "/" not in key])
            for one in self.keys[key]
        ]


def _fold(name: str) -> str:
    """Case and the kind of separator do not count; where one stands does (`1.5-7B` is not
    `1.57B`)."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def _renamed(folded: str) -> str:
    """The name under which Meta published what is now `meta-llama/Llama-3.1-8B-Instruct`; the hub
    has both."""
    return f"meta-llama/meta-{folded.removeprefix('meta-llama/')}"


@lru_cache(maxsize=1)
def _bundled() -> Catalog:
    return Catalog(DATA.read_bytes())


def names() -> tuple[str, ...]:
    """All ids, sorted."""
    return tuple(_bundled().lines)


def find(name: str) -> str | None:
    """The one id that `name` means: exact, in another case, or its part after the slash if only one
    has that."""
    return _bundled().find(name)


def candidates(name: str) -> list[str]:
    """All ids that `name` is a part of, from the start of a word on."""
    return _bundled().candidates(name)


def nearest(name: str) -> list[str]:
    """The ids most like `name`; a name without organisation is compared with names without it."""
    return _bundled().nearest(name)


def alike(name: str) -> list[str]:
    """Of the nearest ids, those that a typo away from `name` could mean."""

    def plain(text: str) -> str:
        return "".join(letter for letter in text.lower() if letter.isalnum())

    def likeness(one: str) -> float:
        short = one if "/" in name else one.rpartition("/")[2]
        return SequenceMatcher(None, plain(name[:200]), plain(short)).ratio()

    return [one for one in nearest(name) if likeness(one) >= TYPO]


def family(name: str) -> str:
    """The letters that `name` begins with, where they begin models of the catalog; else empty."""
    letters = re.match(r"[a-z]{3,}(?=[-_.]?[0-9])", name.lower())
    shorts = (one.rpartition("/")[2].lower() for one in names())
    return letters[0] if letters and any(one.startswith(letters[0]) for one in shorts) else ""


def entry(name: str) -> Entry:
    """The entry called `name`, or an error with the nearest names."""
    key = find(name)
    if key is None:
        close = ", ".join(f"`{one}`" for one in nearest(name))
        raise InputError.one(
            f"the catalog has no model `{name[:80]}`",
            where="model",
            hint=f"did you mean {close}?" if close else "",
        )
    return _entry(_bundled().lines[key])


def entries() -> Iterator[Entry]:
    """All entries, for lists; configs stay unparsed."""
    return map(_entry, _bundled().lines.values())


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
