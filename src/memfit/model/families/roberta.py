"""RoBERTa: BERT's layers, positions counted from behind the padding id, a head of two layers."""

from __future__ import annotations

from memfit.model.families._captured import variants
from memfit.model.families._chains import ChainRow, chained
from memfit.model.families._headless import POOLER
from memfit.model.families.bert import BASE, HEADS, RATES, SIZES, dims, kinds

DEFAULTS = {"type_vocab_size": 2, "max_position_embeddings": 512}


def like(name: str) -> ChainRow:
    """The row of a family with RoBERTa's architecture."""
    base = {**BASE, "model_type": name, "pad_token_id": 1}
    return ChainRow(
        name=name,
        dims=dims,
        kinds=kinds,
        examples=variants(base, SIZES),
        heads=HEADS,
        rates=RATES,
        defaults=DEFAULTS,
        before=2,
        pooler=POOLER,
    )


chained(like("roberta"))
