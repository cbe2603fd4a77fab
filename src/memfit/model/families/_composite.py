"""A language model with a vision tower; text runs only the language model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from memfit.model.config import Fields
from memfit.model.families import build, find
from memfit.model.families._captured import graphs_of
from memfit.model.model import Model
from memfit.model.modules import Captured, Embedding, Loose, Module, Weight

TIE = "tie_word_embeddings"
SAID = (None, False, True)
NAMES = ("model.", "model.language_model.")
Ties: TypeAlias = Sequence[Sequence[bool]]


def rooted(model: Model, old: str, new: str) -> Model:
    """The same model with its parts under another name."""

    def module(one: Module) -> Module:
        named = replace(one, name=one.name.replace(old, new, 1))
        if isinstance(named, Captured):
            return replace(named, parts=tuple(map(module, named.parts)))
        if isinstance(named, Loose):
            return replace(named, held=tuple(map(weight, named.held)))
        return named

    def weight(one: Weight) -> Weight:
        return replace(one, name=one.name.replace(old, new, 1))

    graphs = model.graphs
    if graphs is not None:
        first, second = graphs.root  # where it is not as captured already
        root = (first, second.replace(old, new, 1)) if first else (old, new)
        graphs = replace(graphs, graphs=graphs_of(graphs.family, root=root), root=root)
    return replace(
        model,
        prefix=model.prefix.replace(old, new, 1),
        embed=tuple(map(module, model.embed)),
        final=tuple(map(module, model.final)),
        buffers=tuple(map(weight, model.buffers)),
        graphs=graphs,
    )


def text_of(model: Model, kind: str = "") -> Model:
    """The language model alone, which transformers builds of its part of the config (5.23
    auto_factory.py `get_text_config`)."""
    outer = model.config
    text = {"model_type": f"{outer['model_type']}_text", **outer["text_config"]}
    text |= {"model_type": kind} if kind else {}
    dtype = outer.get("dtype", outer.get("torch_dtype"))
    if dtype is not None and not {"dtype", "torch_dtype"} & text.keys():
        text["dtype"] = dtype
    return build(text, name=model.name, origin=model.origin)


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


def said_of(fields: Fields) -> bool | None:
    """What a config says of its head; None where it says nothing."""
    return None if fields.config.get(TIE) is None else fields.flag(TIE, default=False)


def composite(
    fields: Fields,
    name: str,
    kind: str,
    towers: Callable[[Model], Iterable[Weight]],
    *,
    tied: bool | Ties = False,
    tied_by_either: bool = False,
    hands_on_cache: bool = False,
    names: tuple[str, str] = NAMES,
    **changes: Any,
) -> Model:
    """The model of class `name` whose language model is one of type `kind`. `tied`: the class's
    default, or whether a head is tied where the whole config says nothing, no or yes, and the
    language model's part then. `tied_by_either`: it is, too, where only `text_config` says so.
    `hands_on_cache`: its code hands `use_cache` on to the language model, which otherwise asks its
    own config. `names`: what they begin with in the language model alone, and here."""
    text = text_fields(fields)
    if isinstance(tied, bool):
        shared = fields.flag(TIE, default=tied)
        shared |= tied_by_either and bool(said_of(text))
    else:
        whole, inner = (said_of(one) for one in (fields, text))
        shared = tied[SAID.index(whole)][SAID.index(inner)]
        fields.taken |= {TIE: shared} if whole is inner is None else {}
    text.config = {**text.config, TIE: shared}
    model = rooted(find(kind).build(text), *names)
    # The outer dtype holds for both parts.
    said = fields.value("dtype", "torch_dtype", default=None) is not None
    return replace(
        model,
        family=name,
        tied=shared,
        embed=tuple(map(holding, model.embed)),
        towers=tuple(towers(model)),
        **{"heads": ("image-text",), **changes},
        caching=not hands_on_cache and text.flag("use_cache", default=True),
        dtype=fields.dtype() if said else model.dtype,
    )


def holding(module: Module) -> Module:
    """The same embedding, whose output the class around the model still holds where that multiplies
    it."""
    if isinstance(module, Embedding) and module.outside:
        return replace(module, kept=True)
    return module


__all__ = ["composite", "kind_of", "rooted", "text_fields", "text_of"]
