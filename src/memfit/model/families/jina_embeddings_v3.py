"""Jina embeddings v3: XLM-RoBERTa with rotated queries and keys."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.families._captured import variants
from memfit.model.families._chains import chained
from memfit.model.families._headless import POOLER
from memfit.model.families.bert import BASE, ROW, SILENT, SIZES

chained(
    replace(
        ROW,
        heads=SILENT,
        name="jina_embeddings_v3",
        examples=variants({**BASE, "model_type": "jina_embeddings_v3", "pad_token_id": 1}, SIZES),
        defaults={"type_vocab_size": 1, "max_position_embeddings": 8194},
        silent=("max_position_embeddings",),
        pooler=POOLER,
    )
)
