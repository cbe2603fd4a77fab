"""A language model with a vision tower; text runs only the language model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from memfit.model.config import Fields
from memfit.model.families import find
from memfit.model.modules import Model, Module, Weight

PREFIX = "model.language_model."


def rooted(model: Model, old: str, new: str) -> Model:
    """The same model with its parts under another name."""

    def module(one: Module) -> Module:
        return replace(one, name=one.name.replace(old, new, 1))

    def weight(one: Weight) -> Weight:
        return replace(one, name=one.name.replace(old, new, 1))

    return replace(
        model,
        prefix=model.prefix.replace(old, new, 1),
        embed=tuple(map(module, model.embed)),
        final=tuple(map(module, model.final)),
        buffers=tuple(map(weight, model.buffers)),
    )


def text_fields(fields: Fields) -> Fields:
    """The language model's part of a config; older ones have it on their first level."""
    return fields.section("text_config") if fields.mapping("text_config") else fields


def kind_of(fields: Fields, kinds: tuple[str, ...]) -> str:
    """The type of the language model, one of these; the first is the class default."""
    text = text_fields(fields)
    kind = text.text("model_type", default=kinds[0])
    if kind not in kinds:
        message = f"not supported yet: the language model `{kind[:40]}`"
        text.blame("model_type", message, "`--by trace` runs the real code instead")
    return kind if kind in kinds else kinds[0]


def composite(
    fields: Fields,
    name: str,
    kind: str,
    towers: Callable[[Model], Iterable[Weight]],
    *,
    tied: bool = False,
    tied_by_either: bool = False,
    hands_on_cache: bool = False,
    prefix: str = PREFIX,
    **changes: Any,
) -> Model:
    """The model of class `name` whose language model is one of type `kind`. `hands_on_cache`: its
    code hands `use_cache` on to the language model, which otherwise asks its own config.
    `tied_by_either`: a head is tied, too, where only `text_config` says so."""
    text = text_fields(fields)
    shared = fields.flag("tie_word_embeddings", default=tied)
    if tied_by_either and text.config.get("tie_word_embeddings") is not None:
        shared |= text.flag("tie_word_embeddings", default=tied)
    text.config = {**text.config, "tie_word_embeddings": shared}
    model = rooted(find(kind).build(text), "model.", prefix)
    # The outer dtype holds for both parts.
    said = fields.value("dtype", "torch_dtype", default=None) is not None
    return replace(
        model,
        family=name,
        tied=shared,
        towers=tuple(towers(model)),
        heads=("image-text",),
        caching=not hands_on_cache and text.flag("use_cache", default=True),
        dtype=fields.dtype() if said else model.dtype,
        **changes,
    )


__all__ = ["composite", "kind_of", "rooted", "text_fields"]
