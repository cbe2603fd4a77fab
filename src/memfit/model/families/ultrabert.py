"""Ultrabert: gated layers without biases, of which one in three sees the whole sequence."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, each, ratio, variants
from memfit.model.families._chains import ChainRow, chained
from memfit.model.families.modernbert import SIZES as MODERNBERT
from memfit.model.families.modernbert import choose

SIZES = {
    **MODERNBERT,
    "num_key_value_heads": (3, 2, 4),
    "head_dim": (32, 24, 40),
    "prediction_head_size": (120, 264, 344),
}
BASE = {
    "model_type": "ultrabert",
    "num_hidden_layers": 6,
    "sliding_window": 16,
    "attention_dropout": 0.17,
    "classifier_dropout": 0.19,
}


def dims(fields: Fields) -> Dims:
    """What the class puts in place of what a config leaves out (transformers 5.23
    configuration_ultrabert.py)."""
    found = each(fields, "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    heads = found["num_attention_heads"]
    ratio(fields, found, "hidden_size", "num_attention_heads")
    found["num_key_value_heads"] = fields.count("num_key_value_heads", default=heads)
    found["head_dim"] = fields.count("head_dim", default=found["hidden_size"] // heads)
    found["prediction_head_size"] = fields.count("prediction_head_size", default=768)
    fields.count("sliding_window", default=128)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    return found


def kinds(fields: Fields) -> list[str]:
    count = fields.layers()
    usual = ["sliding_attention" if (one + 1) % 3 else "full_attention" for one in range(count)]
    return [str(one) for one in fields.listing("layer_types", count, usual)]


def row(name: str, pooling: str) -> ChainRow:
    return ChainRow(
        name=name,
        dims=dims,
        kinds=kinds,
        limited=False,
        examples=variants({**BASE, "classifier_pooling": pooling}, SIZES),
        heads=("classification", "token-classification", "question-answering", "masked-lm"),
        rates=dict.fromkeys(("attention_dropout", "classifier_dropout"), 0.0),
        silent=("sliding_window",),
        absent=("attention_windows", "rope_theta"),
        depth="num_hidden_layers",
    )


chained(row("ultrabert", "cls"), row("ultrabert-mean", "mean"), choose=choose)
