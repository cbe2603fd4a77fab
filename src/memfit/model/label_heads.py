"""Heads that put labels on a decoder's tokens or sequences, as data: which linear layer stands in
place of the vocabulary's, what is before it, and which loss follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TypeVar

from memfit.errors import InputError
from memfit.lazy_dataclass import dataclass
from memfit.model.config import Fields
from memfit.model.model import LabelHead, Model
from memfit.model.modules import Linear, Module, Weight

T = TypeVar("T")
SEQUENCE, TOKENS, SPAN = "classification", "token-classification", "question-answering"
ENDS = 2  # of an answer
LABELLED = (SEQUENCE, TOKENS)


@dataclass(frozen=True, kw_only=True)
class LabelRow:
    """The head of one class: `base` is what the class calls the model where the name is another
    one than in the language model; `rates` are the fields that give the rate of the dropout before
    the head, the first that is given, and `rate` is the class's default. `ends` is the number of
    outputs of a class that has the same for any number of labels. `front`: what the class calls
    the modules between the model and the head, which a language model has in `lm_head`."""

    head: str
    module: str = "score"
    bias: bool = False
    base: str = ""
    rates: tuple[str, ...] = ()
    rate: float = 0.0
    wide: bool = False
    ends: int = 0
    front: str = ""


LANGUAGE = "lm_head"
# transformers 5.23 modeling_layers.py GenericForSequenceClassification,
# GenericForTokenClassification, GenericForQuestionAnswering.
RATES = ("classifier_dropout", "hidden_dropout")
CLASSIFIES = LabelRow(head=SEQUENCE)
# modeling_modernbert_decoder.py ModernBertDecoderForSequenceClassification.
CLASSIFIES_BEHIND = LabelRow(
    head=SEQUENCE, module="classifier", rates=("classifier_dropout",), front="head"
)
TAGS = LabelRow(head=TOKENS, bias=True, rates=RATES, rate=0.1, wide=True)
ANSWERS = LabelRow(head=SPAN, module="qa_outputs", bias=True, ends=ENDS)
# Several classes keep the name that the model had in GPT-2 (modeling_llama.py
# LlamaForQuestionAnswering `base_model_prefix`).
ANSWERS_RENAMED = replace(ANSWERS, base="transformer")
# Classes older than those (modeling_gpt2.py GPT2ForTokenClassification): the loss is of the logits
# as they are.
TAGS_NARROW = replace(TAGS, module="classifier", wide=False)
# modeling_gpt_neox.py GPTNeoXForTokenClassification.
TAGS_NEOX = replace(TAGS, module="classifier", rates=("classifier_dropout",))

# Of configs whose `hidden_dropout` is 0 where it is absent (configuration_falcon.py).
TAGS_UNDROPPED = replace(TAGS, rate=0.0)
TAGS_NARROW_UNDROPPED = replace(TAGS_NARROW, rate=0.0)
# modeling_gptj.py GPTJForQuestionAnswering: as many outputs as labels.
ANSWERS_LABELLED = replace(ANSWERS, ends=0)


def labels_of(fields: Fields) -> int:
    """The number of labels (transformers 5.23 configuration_utils.py `num_labels`: 2)."""
    named = fields.config.get("id2label")
    if isinstance(named, Mapping) and named and fields.config.get("num_labels") is None:
        return len(named)
    return fields.count("num_labels", default=2)


def with_labels(model: Model, row: LabelRow, fields: Fields, labels: int = 0) -> Model:
    """The model with a head of labels in place of the vocabulary's."""
    count = row.ends or labels or labels_of(fields)
    if row.head == SPAN and count != ENDS:
        fields.blame("num_labels", f"the class answers questions with 2 labels, not {count}")
    rate = rate_of(row, fields)
    if fields.problems:
        raise InputError(*fields.problems)
    model = renamed_base(model, row.base) if row.base else model
    model = renamed_base(model, row.front, LANGUAGE) if row.front else model
    return replace(
        model,
        head=Linear(name=row.module, inputs=model.head.inputs, outputs=count, bias=row.bias),
        tied=False,
        softcap=False,
        logit_scale=False,
        last="",
        heads=(row.head,),
        whole=(row.module,),
        labelled=LabelHead(task=row.head, dropout=rate, wide=row.wide),
    )


def rate_of(row: LabelRow, fields: Fields) -> float:
    """The rate of the dropout before the head."""
    given = next((name for name in row.rates if fields.config.get(name) is not None), "")
    rate = fields.number(given, default=row.rate) if given else row.rate
    if not 0 <= rate <= 1:
        fields.blame(given, f"`{rate:g}` is out of range", "must be from 0 to 1")
    return rate


def renamed_base(model: Model, name: str, old: str = "") -> Model:
    """The model, or the module `old`, under another name in its class."""
    old = old or model.prefix.partition(".")[0]
    graphs = model.graphs
    if graphs is not None:
        from memfit.model.families._captured import graphs_of  # written families have none

        root = (f"{old}.", f"{name}.")
        graphs = replace(graphs, graphs=graphs_of(graphs.family, root=root), root=root)
    return replace(
        model,
        graphs=graphs,
        prefix=renamed(model.prefix, old, name),
        embed=tuple(renamed(one, old, name) for one in model.embed),
        final=tuple(renamed(one, old, name) for one in model.final),
        buffers=tuple(renamed(one, old, name) for one in model.buffers),
        towers=tuple(renamed(one, old, name) for one in model.towers),
    )


def renamed(thing: T, old: str, new: str) -> T:
    """A path, a weight, or a module with all that it holds."""
    if isinstance(thing, str):
        begins = f"{thing}.".startswith(f"{old}.")
        return f"{new}{thing[len(old) :]}" if begins else thing  # type: ignore[return-value]
    if isinstance(thing, tuple) and type(thing) is tuple:
        return tuple(renamed(one, old, new) for one in thing)  # type: ignore[return-value]
    if isinstance(thing, (Module, Weight)):
        values = {one.name: getattr(thing, one.name) for one in fields(thing)}
        held = {
            key: renamed(value, old, new)
            for key, value in values.items()
            if key == "name" or isinstance(value, (Module, Weight, tuple))
        }
        return replace(thing, **held)
    return thing
