"""Names of transformers' classes, and the head that each has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# Ends of the names of transformers' classes, and the head that each has.
CLASSES = {
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "masked-lm",
    "ForConditionalGeneration": "seq2seq-lm",
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
}
# T5's name before transformers 3, and XLM's of the one without beams.
OLD = {"WithLMHeadModel": "seq2seq-lm", "ForQuestionAnsweringSimple": "question-answering"}
BARE = ("Model", "ForPreTraining")  # of checkpoints that any head is put on
OTHERS = ("EncoderModel", "HeadModel", "HeadsModel")
# What follows `For` in the names of language models; those of others end in their own purpose.
WORDS = ("CausalLM", "ConditionalGeneration", "PreTraining", "Vision2Seq", "ImageTextToText")


def named_head(config: Mapping[str, Any], heads: Iterable[str]) -> str:
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


def is_bare(config: Mapping[str, Any]) -> bool:
    """Whether the config names models without a head alone: checkpoints that make embeddings."""
    names = classes_of(config)
    return bool(names) and all(
        one.endswith("Model") and not one.endswith((*OTHERS, *CLASSES, *OLD)) for one in names
    )


def unknown_class(config: Mapping[str, Any], heads: tuple[str, ...]) -> str:
    """A class that `architectures` name and that is no bare model, where none has one of these
    heads."""
    if named_head(config, heads):
        return ""
    bare = [one for one in classes_of(config) if one.endswith(BARE) and not one.endswith(OTHERS)]
    return next((one for one in classes_of(config) if one not in bare), "")


def wordless_class(config: Mapping[str, Any]) -> str:
    """A class that `architectures` name and that has another head than one of words, where no class
    there has that one: a classifier, a reward model."""
    names = classes_of(config)
    ends = [name.partition("For")[2] for name in names]
    wordless = [bool(end) and not end.startswith(WORDS) for end in ends]
    return names[0] if names and all(wordless) else ""


__all__ = ["CLASSES", "classes_of", "is_bare", "named_head", "unknown_class", "wordless_class"]
