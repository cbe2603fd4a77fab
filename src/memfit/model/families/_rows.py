"""Families of encoders whose row is data: a file that `memfit new-family` writes says which fields
of a config are sizes, and which ones the captured code depends on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from memfit.model.config import Fields
from memfit.model.families._captured import TRACE, Dims, ratio, variants
from memfit.model.families._chains import CHAINS, ChainRow, chained

ROWS = "libraries/transformers/rows"


def load(model_type: str) -> bool:
    """Register the family of this type; whether a row describes it."""
    if model_type in CHAINS or model_type not in names():
        return False
    place = folder().joinpath(f"{model_type}.json")
    chained(row_of(json.loads(place.read_text(encoding="utf-8"))))
    return True


def load_all() -> None:
    """Register every family that has such a row."""
    for name in names():
        load(name)


def names() -> Iterable[str]:
    """The types of models that have one."""
    ends = (one.name.rpartition(".") for one in folder().iterdir())
    return sorted(name for name, _, end in ends if end == "json")


def folder() -> Traversable:
    return files("memfit").joinpath(ROWS)


def row_of(data: Mapping[str, Any]) -> ChainRow:
    """The row that such a file describes."""
    name = data["type"]
    return ChainRow(
        name=name,
        dims=dims_of(data),
        kinds=kinds_of(data["layers"], data["kinds"]),
        examples=variants({"model_type": name, **data["base"]}, data["sizes"]),
        heads=tuple(data["heads"]),
        rates=data["rates"],
        checkpoints=data["checkpoints"],
        silent=tuple(data["silent"]),
        absent=tuple(data["absent"]),
        positions=data["positions"],
        limited=data["limited"],
        before=data["before"],
        depth=data["layers"],
        refused=tuple(data["refused"]),
        defaults=data["defaults"],
    )


def dims_of(data: Mapping[str, Any]) -> Callable[[Fields], Dims]:
    """`dims` names the field of each size; `ratios` are sizes of which one divides the other, and
    `equal` are fields that repeat a size, and `unlike` are sizes that must differ. `fixed`: fields
    with other than plain values."""

    def dims(fields: Fields) -> Dims:
        found = {name: fields.count(key) for name, key in data["dims"].items()}
        for large, small in data["ratios"]:
            ratio(fields, found, large, small)
        for key, name in data["equal"].items():
            given = fields.count(key, default=found[name])
            if given != found[name]:
                message = f"no captured graph of `{data['type']}` with another `{key}`"
                fields.blame(key, message, TRACE, of=(given, found[name]))
        for one, other in data["unlike"]:
            if found[one] == found[other]:
                message = f"no captured graph of `{data['type']}` with a `{other}` like `{one}`"
                fields.blame(data["dims"][other], message, TRACE, of=(found[one], found[other]))
        for key, value in data["fixed"].items():
            if fields.config.get(key, value) != value:
                message = f"no captured graph of `{data['type']}` with this `{key}`"
                fields.blame(key, message, TRACE)
        return found

    return dims


def kinds_of(layers: str, kinds: Sequence[str]) -> Callable[[Fields], list[str]]:
    """The kinds of the first layers, of which the last one is that of all others, too."""

    def listed(fields: Fields) -> list[str]:
        count = fields.layers(layers)
        return [*kinds, *[kinds[-1]] * (count - len(kinds))][:count]

    return listed


__all__ = ["load", "load_all", "names", "row_of"]
