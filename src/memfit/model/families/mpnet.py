"""MPNet: BERT's layers without token types, and distances that are added to the scores."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, each, ratio, variants
from memfit.model.families._chains import chained
from memfit.model.families._headless import POOLER
from memfit.model.families.bert import BASE, RATES, ROW, SILENT, SIZES

UNREAD = ("classifier_dropout",)
OWN = {key: rate for key, rate in RATES.items() if key not in UNREAD}
KEPT = {key: value for key, value in BASE.items() if key not in UNREAD}
NAMES = {key: values for key, values in SIZES.items() if key != "type_vocab_size"}


def dims(fields: Fields) -> Dims:
    found = each(fields, *NAMES)
    ratio(fields, found, "hidden_size", "num_attention_heads")
    return found


chained(
    replace(
        ROW,
        heads=SILENT,
        name="mpnet",
        dims=dims,
        examples=variants({**KEPT, "model_type": "mpnet", "pad_token_id": 1}, NAMES),
        rates=OWN,
        defaults={"max_position_embeddings": 512},
        before=2,
        checkpoints=False,
        pooler=POOLER,
    )
)
