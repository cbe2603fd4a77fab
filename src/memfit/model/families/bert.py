"""BERT: a bidirectional encoder with learned positions and norms behind each block."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, each, ratio, variants
from memfit.model.families._chains import ChainRow, chained

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 160, 288),
    "intermediate_size": (200, 312, 184),
    "num_attention_heads": (6, 10, 12),
    "max_position_embeddings": (164, 178, 194),
    "type_vocab_size": (4, 8, 2),
}
RATES: dict[str, float | str] = {
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": "hidden_dropout_prob",
}
LABELS = ("classification", "token-classification", "question-answering")
SILENT = (*LABELS, "masked-lm")
HEADS = (*SILENT, "causal-lm")
BASE = {
    "model_type": "bert",
    "num_hidden_layers": 3,
    "hidden_dropout_prob": 0.11,
    "attention_probs_dropout_prob": 0.13,
    "classifier_dropout": 0.17,
    "hidden_act": "gelu",
}


def dims(fields: Fields) -> Dims:
    found = each(fields, *SIZES)
    ratio(fields, found, "hidden_size", "num_attention_heads")
    return found


def kinds(fields: Fields) -> list[str]:
    return ["layer"] * fields.layers()


ROW = ChainRow(
    name="bert",
    dims=dims,
    kinds=kinds,
    examples=variants(BASE, SIZES),
    heads=HEADS,
    rates=RATES,
    defaults={"type_vocab_size": 2, "max_position_embeddings": 512},
)
chained(ROW)
