"""Which head a model is used with: its class in transformers, its number of labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memfit.errors import InputError
from memfit.model.classes import CLASSES, is_bare, named_head, unknown_class
from memfit.model.config import Fields
from memfit.model.equivalents import converted
from memfit.model.families import Family, build, find
from memfit.model.families._headless import NONE, headless, source_of
from memfit.model.label_heads import LABELLED, with_labels
from memfit.model.model import Model

CAUSAL = "causal-lm"
BASE = "masked-lm"  # what checkpoints are pre-trained with, and published as


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The family that a config belongs to, where formulas know it."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return None
    try:
        return find(str(converted(config)["model_type"]))
    except InputError:
        return None


def heads_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The heads that formulas know for this encoder, the usual one for training first; none for a
    decoder."""
    known = family_of(config)
    return () if known is None else known.heads


def label_heads_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The heads of labels that formulas know for this decoder."""
    known = family_of(config)
    return () if known is None else tuple(row.head for row in known.label_heads)


def label_head(config: Mapping[str, Any], head: str) -> str:
    """The head of labels that a question about a decoder means; empty where it means none."""
    heads = label_heads_of(config)
    if head == "auto":
        return named_head(config, heads)
    return head if head in heads else ""


def usual_head(config: Mapping[str, Any], heads: tuple[str, ...], task: str) -> str:
    """The head that a question means where it names none: a checkpoint of masked language modelling
    is fine-tuned with the first of these, and one of a bare model runs without a head."""
    named = named_head(config, heads)
    if task == "inference" and is_bare(config):
        return NONE
    if unknown_class(config, heads):
        return "auto"
    if task == "pretrain" and BASE in heads:
        return BASE
    if task == "finetune" and named in ("", BASE):
        return heads[0]
    return named or (BASE if BASE in heads else heads[0])


def with_head(model: Model, head: str, labels: int) -> Model:
    """The model with another head, or another number of labels."""
    if not model.encodes:
        return decoder_with_head(model, head, labels)
    heads = heads_of(model.config)
    if head == NONE:
        return bare(model)
    head = model.graphs.row.alike.get(head, head)
    if not heads or (head in ("auto", model.graphs.head) and not labels):
        return model
    config = dict(model.config)
    if head in heads:
        end = next(end for end, name in CLASSES.items() if name == head)
        config["architectures"] = [end]
    if labels:
        config.pop("id2label", None)
        config["num_labels"] = labels
    return replace(build(config, name=model.name, origin=model.origin), config=model.config)


def bare(model: Model) -> Model:
    """The model without a head; as it is where no captured class has what the bare model has."""
    source = source_of(model)
    if not source or model.graphs.head == NONE:
        return model
    return headless(with_head(model, source, 0))


def decoder_with_head(model: Model, head: str, labels: int) -> Model:
    """A decoder with a head of labels, or with that of words again. Blocks of a quantized file are
    those of the head that it has."""
    own = "auto" if model.labelled is None else model.labelled.task
    if (head in ("auto", own) and not labels) or model.stored:
        return model
    known = family_of(model.config)
    if known is not None and known.alone is not None and head == CAUSAL not in model.heads:
        return replace(known.alone(model), config=model.config)
    named = label_head(model.config, own if head == "auto" else head)
    if model.labelled is not None and head not in ("auto", own):
        bare = {key: one for key, one in model.config.items() if key != "architectures"}
        model = replace(build(bare, name=model.name, origin=model.origin), config=model.config)
    row = next((one for one in known.label_heads if one.head == named), None) if known else None
    if row is None:
        return model
    return with_labels(model, row, Fields(converted(model.config)), labels)


__all__ = [
    "CLASSES",
    "LABELLED",
    "heads_of",
    "label_head",
    "label_heads_of",
    "named_head",
    "usual_head",
    "with_head",
]
