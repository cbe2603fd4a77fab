"""ELECTRA: BERT's layers, and an embedding that may be narrower than they are."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, variants
from memfit.model.families._chains import ChainRow, chained
from memfit.model.families.bert import BASE, HEADS, RATES, SIZES, kinds
from memfit.model.families.bert import dims as of_bert

NARROW = (72, 136, 184)


def dims(fields: Fields) -> Dims:
    found = of_bert(fields)
    width = fields.count("embedding_size", default=128)
    return found if width == found["hidden_size"] else {**found, "embedding_size": width}


def row(name: str, widths: tuple[int, ...]) -> ChainRow:
    base = {**BASE, "model_type": "electra"}
    return ChainRow(
        name=name,
        dims=dims,
        kinds=kinds,
        examples=variants(base, {**SIZES, "embedding_size": widths}),
        heads=HEADS,
        rates=RATES,
        defaults={"type_vocab_size": 2, "max_position_embeddings": 512},
        silent=("embedding_size", "summary_last_dropout"),
    )


def choose(fields: Fields) -> int:
    """A projection stands behind an embedding of another width."""
    return int(fields.count("embedding_size", default=128) != fields.count("hidden_size"))


chained(row("electra", SIZES["hidden_size"]), row("electra-narrow", NARROW), choose=choose)
