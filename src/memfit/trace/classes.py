"""Which class of transformers a configuration is run as: the one that its `architectures` name, the
one asked for, or the usual one."""

from __future__ import annotations

from typing import Any

import transformers

from memfit.errors import InputError
from memfit.job import HEADS
from memfit.model.classes import wordless_class

# The classes that build each kind of model; older versions of transformers lack some.
BUILDERS: dict[str, tuple[str, ...]] = {
    "causal-lm": ("AutoModelForCausalLM",),
    "image-text": ("AutoModelForImageTextToText", "AutoModelForVision2Seq"),
    "seq2seq-lm": ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"),
    "masked-lm": ("AutoModelForMaskedLM",),
    "classification": ("AutoModelForSequenceClassification",),
    "token-classification": ("AutoModelForTokenClassification",),
    "question-answering": ("AutoModelForQuestionAnswering",),
    "none": ("AutoModel",),
}
assert {"auto", *BUILDERS} == set(HEADS)
SILENT = (
    "masked-lm",
    "classification",
    "token-classification",
    "question-answering",
    "none",
)  # heads that generate nothing


def chosen(config: Any, head: str) -> tuple[str, Any]:
    """The kind of model and its builder."""
    if head == "none" and getattr(config, "is_encoder_decoder", False):
        raise InputError.one(
            f"`{config.model_type}` has a decoder, which is given nothing without a head",
            where="job.head",
            hint="use its own head: leave out `--head`",
        )
    known = {kind: found for kind in BUILDERS if (found := builder(kind, config)) is not None}
    if head != "auto":
        if head not in known:
            hint = "it has " + ", ".join(f"`{kind}`" for kind in known) if known else ""
            raise InputError.one(
                f"transformers has no `{head}` class for `{config.model_type}`",
                where="job.head",
                hint=hint,
            )
        return head, known[head]
    known.pop("none", None)  # a bare model has no loss
    for wanted in config.architectures or ():
        for kind, found in known.items():
            if wanted in names(found, config):
                return kind, found
    other = wordless_class({"architectures": list(config.architectures or ())})
    if other:
        raise InputError.one(
            f"no trace of the class `{other[:60]}`",
            where="config.architectures",
            hint="choose a class with `--head`: " + ", ".join(f"`{kind}`" for kind in known),
        )
    likely = usual(config, known)
    if likely is None:
        message = (
            f"transformers has no language model, encoder or classifier for `{config.model_type}`"
        )
        raise InputError.one(message, where="config.model_type")
    return likely, known[likely]


def usual(config: Any, known: dict[str, Any]) -> str | None:
    """Where nothing is named: encoders predict masked tokens, composites see, and everything else
    goes on with a text."""
    order = ["causal-lm", "image-text", "seq2seq-lm", *SILENT]
    if getattr(config, "vision_config", None) is not None:
        order.insert(0, "image-text")
    elif getattr(config, "is_encoder_decoder", False):
        order.insert(0, "seq2seq-lm")
    elif not getattr(config, "is_decoder", False):
        order.insert(0, "masked-lm")
    return next((kind for kind in order if kind in known), None)


def builder(kind: str, config: Any) -> Any:
    for name in BUILDERS[kind]:
        found = getattr(transformers, name, None)
        if found is not None and type(config) in found._model_mapping:
            return found
    return None


def names(builder: Any, config: Any) -> tuple[str, ...]:
    """Of the classes that the builder has for this configuration."""
    return tuple(one.__name__ for one in classes(builder, config))


def classes(builder: Any, config: Any) -> tuple[type, ...]:
    """The classes that the builder has for this configuration."""
    found = builder._model_mapping[type(config)]
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


__all__ = ["SILENT", "chosen"]
