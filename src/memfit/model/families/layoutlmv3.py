"""LayoutLMv3 on text alone: the places of words add to what embeddings and attention see; the
patches of a page are idle."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.classes import named_head
from memfit.model.config import Fields
from memfit.model.families._captured import TRACE, Dims, variants
from memfit.model.families._chains import chained
from memfit.model.families.bert import BASE, LABELS
from memfit.model.families.bert import dims as as_bert
from memfit.model.families.roberta import like
from memfit.model.label_heads import labels_of

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (192, 320, 288),
    "intermediate_size": (200, 312, 184),
    "num_attention_heads": (3, 5, 4),
    "max_position_embeddings": (164, 178, 194),
    "type_vocab_size": (4, 8, 2),
    "max_2d_position_embeddings": (1040, 1104, 1232),
    "coordinate_size": (26, 50, 37),
    "shape_size": (44, 60, 70),
}
DEFAULTS = {
    "max_2d_position_embeddings": 1024,
    "coordinate_size": 128,
    "shape_size": 128,
}
FEW = 10  # labels, from which on the class has another head (modeling_layoutlmv3.py)


def dims(fields: Fields) -> Dims:
    found = as_bert(fields) | {key: fields.count(key) for key in DEFAULTS}
    parts = 4 * found["coordinate_size"] + 2 * found["shape_size"]
    if parts != found["hidden_size"]:
        message = "four times `coordinate_size` and twice `shape_size` must be `hidden_size`"
        fields.blame("coordinate_size", message, of=(parts, found["hidden_size"]))
    words = named_head(fields.config, LABELS) == "token-classification"
    if words and labels_of(fields) >= FEW:
        message = f"no captured graph of `layoutlmv3` with {FEW} labels of words or more"
        fields.blame("num_labels", message, TRACE)
    return found


ROW = like("layoutlmv3")
chained(
    replace(
        ROW,
        dims=dims,
        examples=variants({**BASE, "model_type": "layoutlmv3", "pad_token_id": 1}, SIZES),
        heads=LABELS,
        sizes=((3, 88, 40, 5), (7, 104, 72, 9), (11, 152, 56, 7)),
        defaults={**ROW.defaults, **DEFAULTS},
        pooler="",
        checkpoints=False,
    )
)
