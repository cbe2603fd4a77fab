"""Families whose row is data: a file that `memfit new-family` writes says which fields
of a config are sizes, and which ones the captured code depends on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from memfit.graph import evaluated
from memfit.model.config import Fields
from memfit.model.families import known
from memfit.model.families._captured import (
    PER,
    TRACE,
    Dims,
    Row,
    captured,
    ratio,
    variants,
)
from memfit.model.families._chains import ChainRow, chained
from memfit.model.families._composite_rows import composed
from memfit.model.label_heads import LabelRow

HERE = "libraries/transformers/rows"


def load(model_type: str) -> bool:
    """Register the family of this type; whether a row describes it."""
    if known(model_type) or model_type not in names():
        return False
    place = folder().joinpath(f"{model_type}.json")
    register(json.loads(place.read_text(encoding="utf-8")))
    return True


def register(data: Mapping[str, Any]) -> None:
    """Register the family that a row describes."""
    if data.get("composite"):
        composed(data)
    elif data.get("decoder"):
        captured(decoder_row(data))
    else:
        chained(row_of(data))


def load_all() -> None:
    """Register every family that has such a row."""
    for name in names():
        load(name)


def parts() -> Counter[str]:
    """How many rows of other models each family is the language model of."""
    whole = (json.loads(folder().joinpath(f"{one}.json").read_bytes()) for one in names())
    return Counter(one["text"]["family"] for one in whole if one.get("composite"))


def names() -> Iterable[str]:
    """The types of models that have one."""
    ends = (one.name.rpartition(".") for one in folder().iterdir())
    return sorted(name for name, _, end in ends if end == "json")


def folder() -> Traversable:
    return files("memfit").joinpath(HERE)


def row_of(data: Mapping[str, Any]) -> ChainRow:
    """The row that such a file describes."""
    name = data["type"]
    return ChainRow(
        name=name,
        dims=dims_of(data),
        kinds=stacked(data["stacks"])
        if data.get("pairs")
        else kinds_of(data["layers"], data["kinds"]),
        examples=variants({"model_type": name, **data["base"]}, data["sizes"]),
        heads=tuple(data["heads"]),
        rates=data["rates"],
        pairs=data.get("pairs", False),
        stack=data.get("stack", {}),
        hears=data.get("hears", False),
        tied=data.get("tied", True),
        unties=data.get("unties", True),
        checkpoints=data["checkpoints"],
        silent=tuple(data["silent"]),
        absent=tuple(data["absent"]),
        positions=data["positions"],
        limited=data["limited"],
        longest=data.get("longest", 0),
        endless=tuple(data.get("endless", ())),
        before=data["before"],
        depth=data["layers"],
        depths=tuple(keys[0] for keys, _ in data.get("stacks", ())),
        refused=tuple(data["refused"]),
        casting=tuple(data.get("casting", ())),
        others=tuple(data.get("others", ())),
        bare=data.get("bare", ""),
        pooler=data.get("pooler", ""),
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
            if data.get("pairs"):  # which has heads of two sizes
                found[f"{large}{PER}{small}"] = found.pop(f"{large}_each")
        for name, (one, other) in data.get("sums", {}).items():
            found[name] = found[one] + found[other]
        for key, name in data["equal"].items():
            given = fields.count(key, default=found[name])
            if given != found[name]:
                message = f"no captured graph of `{data['type']}` with another `{key}`"
                fields.blame(key, message, TRACE, of=(given, found[name]))
        for one, other in data["unlike"]:
            if found[one] == evaluated(other, found):
                message = f"no captured graph of `{data['type']}` with a `{one}` like `{other}`"
                fields.blame(data["dims"][one], message, TRACE, of=(found[one],))
        for large, small in data.get("least", ()):
            if found[large] < found[small]:
                message = f"must not be less than `{data['dims'][small]}`"
                fields.blame(data["dims"][large], message, of=(found[large], found[small]))
        for key, value in data["fixed"].items():
            given = fields.config.get(key, value)
            if given != value and not turned_alike(given, value):
                message = f"no captured graph of `{data['type']}` with this `{key}`"
                fields.blame(key, message, TRACE)
        return found

    return dims


def turned_alike(given: Any, value: Any) -> bool:
    """Rotary positions of one kind run the same operations, whatever their numbers are."""
    some = [one for one in (given, value) if isinstance(one, Mapping) and "rope_theta" in one]
    kinds = {one.get("rope_type", one.get("type", "default")) for one in some}
    return len(some) == 2 and len(kinds) == 1


def decoder_row(data: Mapping[str, Any]) -> Row:
    """The same of a decoder."""
    name, active = data["type"], data["experts"]
    sizes, defaults = dims_of(data), data["defaults"]
    told = {key: value for key, value in defaults.items() if key in data["dims"].values()}

    def dims(fields: Fields) -> Dims:
        fields.complete(**told)
        fields.assume(**defaults)
        follow(fields, data["follows"])
        ropes(fields, data)
        return sizes(fields)

    return Row(
        name=name,
        dims=dims,
        kinds=layer_kinds(data["layers"], data["kinds"], name),
        examples=variants({"model_type": name, **data["base"]}, data["sizes"]),
        active=(lambda fields: (fields.count(active[0]), fields.count(active[1])))
        if active
        else None,
        tied=data["tied"],
        scaled=data["scaled"],
        softcap=data["softcap"],
        silent=tuple(data["silent"]),
        absent=tuple(data["absent"]),
        packs=data["packs"],
        checkpoints=data.get("checkpoints", True),
        positions=data["positions"],
        window=data["window"],
        heads=tuple(data.get("heads", ())),
        derived={f"{one}_picked": (one, "seq", "min") for one in data.get("caps", ())},
        label_heads=tuple(
            LabelRow(**{**one, "rates": tuple(one["rates"])}) for one in data["label_heads"]
        ),
    )


def follow(fields: Fields, sizes: Mapping[str, Sequence[str]]) -> None:
    """What the class derives from other sizes where a config does not say: one of them, or the
    quotient of two."""
    for key, names in sizes.items():
        if fields.config.get(key) is None:
            first, *second = (fields.count(name) for name in names)
            value = first // second[0] if second else first
            fields.config = {**fields.config, key: value}
            fields.taken[key] = value


def ropes(fields: Fields, data: Mapping[str, Any]) -> None:
    """Rotary positions of a kind that runs other operations than the captured ones. The class
    reads `rope_scaling` first (transformers 5.23 modeling_rope_utils.py)."""
    keys = ("rope_scaling", "rope_parameters")
    key = next((one for one in keys if fields.config.get(one)), keys[1])
    given = fields.config.get(key) or data["defaults"].get(key)  # that of a class not captured
    if not isinstance(given, Mapping):
        return
    for one in [one for one in given.values() if isinstance(one, Mapping)] or [given]:
        kind = one.get("rope_type", one.get("type", "default"))
        if kind not in data["ropes"]:
            positions = f"rotary positions `{str(kind)[:40]}`"
            message = f"no captured graph of `{data['type']}` with {positions}"
            fields.blame(key, message, TRACE)


def layer_kinds(layers: str, data: Mapping[str, Any], name: str) -> Callable[[Fields], list[str]]:
    """What lists of the config call each layer, joined; or `first` for as many layers as a field
    says; `layer` where all are alike."""
    lists, front, odd = data["lists"], data["first"], data.get("odd", ())

    def listed(fields: Fields) -> list[str]:
        count = fields.layers(layers)
        ahead = min(count, fields.count(front, low=0)) if front else 0
        rows = [listing(fields, key, count, lists[key]) for key in lists]
        kinds = ["_".join(map(str, one)) for one in zip(*rows, strict=True)] or ["layer"] * count
        kinds = [
            (f"first_{one}" if lists else "first") if number < ahead else one
            for number, one in enumerate(kinds)
        ]
        for place, end in ((0, "first"), (count - 1, "last")):
            if end in odd:
                kinds[place] = f"{end}_{kinds[place]}"
        return kinds

    def listing(fields: Fields, key: str, count: int, default: Any) -> list[Any]:
        if fields.config.get(key) is not None:
            return fields.listing(key, count, ["layer"] * count)
        usual = data["deciding"]
        odd = any(fields.config.get(one, usual[one]) != usual[one] for one in usual)
        if default is None or odd:
            fields.blame(key, f"no captured graph of `{name}` without `{key}`", TRACE)
            return ["layer"] * count
        start, again = default
        return [*start, *again * count][:count]

    return listed


def stacked(stacks: Sequence[Any]) -> Callable[[Fields], list[str]]:
    """The kinds of an encoder's layers, then a decoder's."""
    lists = [kinds_of(keys, kinds) for keys, kinds in stacks]
    return lambda fields: [one for listed in lists for one in listed(fields)]


def kinds_of(layers: str | Sequence[str], kinds: Sequence[str]) -> Callable[[Fields], list[str]]:
    """The kinds of the first layers, of which the last one is that of all others, too. `layers`:
    the field that counts them, and others that stand for it."""
    keys = (layers,) if isinstance(layers, str) else tuple(layers)

    def listed(fields: Fields) -> list[str]:
        count = fields.layers(*keys)
        return [*kinds, *[kinds[-1]] * (count - len(kinds))][:count]

    return listed


__all__ = ["load", "load_all", "names", "row_of"]
