"""Nomic BERT: BERT's layers with a gated feed-forward and rotated queries and keys."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.families._captured import variants
from memfit.model.families._chains import chained
from memfit.model.families.bert import BASE, RATES, ROW, SIZES

chained(
    replace(
        ROW,
        name="nomic_bert",
        examples=variants({**BASE, "model_type": "nomic_bert", "hidden_act": "silu"}, SIZES),
        heads=("classification", "token-classification", "masked-lm"),
        rates={**RATES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        defaults={"type_vocab_size": 2, "max_position_embeddings": 2048},
        silent=("max_position_embeddings",),
        bare="token-classification",
    )
)
