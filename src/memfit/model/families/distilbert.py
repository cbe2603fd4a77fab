"""DistilBERT: BERT's layers without types of tokens and without a pooler."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, ratio, variants
from memfit.model.families._chains import ChainRow, chained

NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_position_embeddings",
}
SIZES = {
    "vocab_size": (544, 608, 736),
    "dim": (96, 160, 288),
    "hidden_dim": (200, 312, 184),
    "n_heads": (6, 10, 12),
    "max_position_embeddings": (164, 178, 194),
}
BASE = {
    "model_type": "distilbert",
    "n_layers": 3,
    "dropout": 0.11,
    "attention_dropout": 0.13,
    "seq_classif_dropout": 0.17,
    "qa_dropout": 0.19,
    "activation": "gelu",
}


def dims(fields: Fields) -> Dims:
    found = {name: fields.count(key) for name, key in NAMES.items()}
    ratio(fields, found, "hidden_size", "num_attention_heads")
    return found


def kinds(fields: Fields) -> list[str]:
    return ["layer"] * fields.layers("n_layers")


chained(
    ChainRow(
        name="distilbert",
        dims=dims,
        kinds=kinds,
        examples=variants(BASE, SIZES),
        heads=("classification", "token-classification", "question-answering", "masked-lm"),
        rates={
            "dropout": 0.1,
            "attention_dropout": 0.1,
            "seq_classif_dropout": 0.2,
            "qa_dropout": 0.1,
        },
        defaults={"max_position_embeddings": 512},
        silent=("sinusoidal_pos_embds", "n_layers"),
    )
)
