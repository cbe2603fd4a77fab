"""Which head an encoder, or an encoder with a decoder, is used with: its class in transformers, its
number of labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memfit.errors import InputError
from memfit.model.equivalents import converted
from memfit.model.families import build, find
from memfit.model.modules import Model

# Ends of the names of transformers' classes, and the head that each has.
CLASSES = {
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "masked-lm",
    "ForConditionalGeneration": "seq2seq-lm",
}
OLD = {"WithLMHeadModel": "seq2seq-lm"}  # T5's name before transformers 3
BARE = ("Model", "ForPreTraining")  # of checkpoints that any head is put on
OTHERS = ("EncoderModel", "HeadModel", "HeadsModel")
LABELLED = ("classification", "token-classification")
BASE = "masked-lm"  # what checkpoints are pre-trained with, and published as


def heads_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The heads that formulas know for this type of model, the usual one for training first; none
    for a language model."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return ()
    try:
        return find(str(converted(config)["model_type"])).heads
    except InputError:
        return ()


def named_head(config: Mapping[str, Any], heads: tuple[str, ...]) -> str:
    """The head that the config's `architectures` name; empty where they name none of these."""
    for name in classes_of(config):
        for end, head in (CLASSES | OLD).items():
            if name.endswith(end) and head in heads:
                return head
    return ""


def classes_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The classes that `architectures` name."""
    given = config.get("architectures")
    return tuple(map(str, given)) if isinstance(given, (list, tuple)) else ()


def unknown_class(config: Mapping[str, Any], heads: tuple[str, ...]) -> str:
    """A class that `architectures` name and that is no bare model, where none has one of these
    heads."""
    if named_head(config, heads):
        return ""
    bare = [one for one in classes_of(config) if one.endswith(BARE) and not one.endswith(OTHERS)]
    return next((one for one in classes_of(config) if one not in bare), "")


def usual_head(config: Mapping[str, Any], heads: tuple[str, ...], task: str) -> str:
    """The head that a question means where it names none: a checkpoint of masked language modelling
    is fine-tuned with the first of these."""
    named = named_head(config, heads)
    if unknown_class(config, heads):
        return "auto"
    if task == "pretrain" and BASE in heads:
        return BASE
    if task == "finetune" and named in ("", BASE):
        return heads[0]
    return named or (BASE if BASE in heads else heads[0])


def with_head(model: Model, head: str, labels: int) -> Model:
    """The model with another head, or another number of labels."""
    heads = heads_of(model.config)
    if model.graphs is None or not heads or (head in ("auto", model.graphs.head) and not labels):
        return model
    config = dict(model.config)
    if head in heads:
        end = next(end for end, name in CLASSES.items() if name == head)
        config["architectures"] = [end]
    if labels:
        config.pop("id2label", None)
        config["num_labels"] = labels
    return replace(build(config, name=model.name, origin=model.origin), config=model.config)


__all__ = ["CLASSES", "LABELLED", "heads_of", "named_head", "usual_head", "with_head"]
