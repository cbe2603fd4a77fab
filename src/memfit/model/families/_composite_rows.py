"""Language models with towers beside them whose row is data: a file that `memfit new-family` writes
says how the idle weights follow from a config, and which family the language model is one of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from memfit.graph import evaluated
from memfit.model.config import LARGEST_LAYERS, Fields
from memfit.model.families import family
from memfit.model.families._captured import TRACE
from memfit.model.families._composite import composite, text_of
from memfit.model.model import Model
from memfit.model.modules import Attention, Block, Layer, Weight

TEXT = "text:"  # begins the names of sizes of the language model
PER = "//"  # how often one size goes into another one


def composed(data: Mapping[str, Any]) -> None:
    """Register the family that a row describes."""

    def build(fields: Fields) -> Model:
        return composite_model(data, fields)

    alone = partial(text_alone, data) if data.get("alone") else None
    family(data["type"], examples=(data["example"],), graphs=True, alone=alone)(build)


def text_alone(data: Mapping[str, Any], model: Model) -> Model:
    """The language model alone, for which transformers has a class."""
    text = data["text"]
    given = {**text["defaults"], **model.config.get("text_config", {})}
    config = {**model.config, "text_config": given}
    return text_of(replace(model, config=config), text["family"])


def composite_model(data: Mapping[str, Any], fields: Fields) -> Model:
    text, name = data["text"], data["type"]
    for section in ("text_config", *data["needed"]):
        if not fields.mapping(section):
            fields.value(section)
    inner = fields.section("text_config")
    kind = inner.text("model_type", default=text["kind"])
    if kind != text["kind"]:
        message = f"not supported yet: the language model `{kind[:40]}`"
        inner.blame("model_type", message, TRACE)
    if inner.config:
        inner.complete(**text["defaults"])
    given = {**inner.config, "model_type": text["family"]}
    fields.config = {**fields.config, "text_config": given}
    inner = fields.section("text_config")
    places = Places(data, fields)
    behind: list[Weight] = []

    def towers(_: Model) -> tuple[Weight, ...]:
        if fields.problems:
            return ()
        dims = places.sizes | {f"{TEXT}{key}": inner.count(key) for key in text["sizes"]}
        behind.extend(places.weights(data["behind"], dims))
        return (*places.weights(data["ahead"], dims), *behind)

    model = composite(
        fields,
        name,
        text["family"],
        towers,
        tied=data["ties"],
        hands_on_cache=data["hands_on_cache"],
        names=(text["old"], text["new"]),
        heads=tuple(data["heads"]),
        own_positions=text["own_positions"],
        last=data["last"],
        own_loss=data.get("own_loss", False),
        checkpoints=data.get("checkpoints", True),
        whole_prompt=data.get("whole_prompt", False),
    )
    layers = model.layers if data.get("flash", True) else tuple(map(without_flash, model.layers))
    head = replace(model.head, name=text["head"])
    return replace(model, head=head, layers=layers, behind=len(behind))


def without_flash(layer: Layer) -> Layer:
    """The same layer of a class that does not support flash-attention."""
    return replace(layer, blocks=tuple(map(without_flash_attention, layer.blocks)))


def without_flash_attention(block: Block) -> Block:
    mixer = block.mixer
    if not isinstance(mixer, Attention):
        return block
    kernels = tuple(one for one in mixer.kernels if one != "flash")
    return replace(block, mixer=replace(mixer, kernels=kernels))


class Places:
    """The fields that the idle weights depend on; a field has its sections before its name."""

    def __init__(self, data: Mapping[str, Any], fields: Fields) -> None:
        self.fields = fields
        self.sizes: dict[str, int] = {}
        self.flags: dict[str, bool] = {}
        for path, default in data["sizes"].items():
            place, key = self.at(path)
            known = {} if default is None else {"default": default}
            self.sizes[path] = place.count(key, **known)
        for path, default in data["flags"].items():
            place, key = self.at(path)
            self.flags[path] = place.flag(key, default=default)
        for path, other in data["equal"].items():
            place, key = self.at(path)
            if place.count(key, default=self.sizes[other]) != self.sizes[other]:
                place.blame(key, f"`{key}` must be {self.sizes[other]}", of=(self.sizes[other],))
        for large, small, default in data["ratios"]:
            place, key = self.at(small)
            what = f"`{large.rpartition('.')[2]}`"
            place.divides(place.count(key, default=default), self.sizes[large], key, what)
        for path, known in data["fixed"].items():
            place, key = self.at(path)
            value = place.config.get(key, known)
            if value != known or isinstance(value, bool) != isinstance(known, bool):
                message = f"not supported yet: `{data['type']}` with this `{key}`"
                place.blame(key, message, TRACE)
        for path in data["numbers"]:
            place, key = self.at(path)
            # Layers are counted from the end, too.
            place.count(key, default=1, low=-LARGEST_LAYERS if "layer" in key else 0)

    def at(self, path: str) -> tuple[Fields, str]:
        *sections, key = path.split(".")
        place = self.fields
        for one in sections:
            place = place.section(one)
        return place, key

    def weights(self, rows: Sequence[Any], dims: Mapping[str, int]) -> Iterator[Weight]:
        for row in rows:
            if isinstance(row, Mapping):
                kinds = row["kinds"]
                for number in range(self.sizes[row["layers"]]):
                    yield from self.some(kinds[number % len(kinds)], dims, number)
            else:
                yield from self.some([row], dims, 0)

    def some(
        self, rows: Sequence[Sequence[Any]], dims: Mapping[str, int], number: int
    ) -> Iterator[Weight]:
        for name, shape, role, form, *condition in rows:
            if not condition or self.flags[condition[0]] == condition[1]:
                sizes = tuple(size_of(one, dims) for one in shape)
                yield Weight(name=name.format(number), shape=sizes, role=role, format=form)


def size_of(text: str | int, dims: Mapping[str, int]) -> int:
    """The value of an expression, in which one size may go into another one several times."""
    return evaluated(text, Quotients(dims))


class Quotients(dict[str, int]):
    """Sizes by name, and by `one//other` how often the other one goes into the first."""

    def __missing__(self, name: str) -> int:
        one, _, other = name.partition(PER)
        return self[one] // self[other]


__all__ = ["PER", "TEXT", "composed", "size_of"]
