"""Apertus: norms of each head's queries and keys, and xIELU in a plain feed-forward."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, captured, each, ratio, variants
from memfit.model.families.jais2 import BASE, SIZES, defaults
from memfit.model.label_heads import TAGS

OWN = {key: sizes for key, sizes in SIZES.items() if key != "head_dim"}


def dims(fields: Fields) -> Dims:
    """Its heads divide the width, whatever a config says (transformers 5.23 modeling_apertus.py
    reads `head_dim`, which the class has none of)."""
    defaults(fields)
    found = each(fields, *OWN)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    ratio(fields, found, "hidden_size", "num_attention_heads")
    if fields.count("head_dim") != found["hidden_size_each"]:
        fields.blame("head_dim", "no captured graph of `apertus` with another `head_dim`")
    return found


captured(
    Row(
        name="apertus",
        label_heads=(TAGS,),
        dims=dims,
        kinds=lambda fields: ["layer"] * fields.layers(),
        examples=variants({"model_type": "apertus", **BASE}, OWN),
        silent=("head_dim",),
        absent=("post_norm",),
    )
)
