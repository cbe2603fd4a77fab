"""Jais 2: Llama's layers with LayerNorm, biases and a plain feed-forward."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, captured, each, ratio, variants

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 160, 288),
    "intermediate_size": (200, 312, 184),
    "num_attention_heads": (6, 10, 12),
    "num_key_value_heads": (2, 5, 3),
    "head_dim": (40, 88, 56),
}
BASE = {
    "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}


def defaults(fields: Fields) -> None:
    """As many keys as queries, and heads that divide the width, where a config says nothing."""
    heads = fields.count("num_attention_heads")
    if fields.config.get("num_key_value_heads") is None:
        fields.config = {**fields.config, "num_key_value_heads": heads}
    if fields.config.get("head_dim") is None:
        width = fields.count("hidden_size")
        fields.divides(heads, width, "num_attention_heads", "hidden_size")
        fields.config = {**fields.config, "head_dim": width // heads}


def dims(fields: Fields) -> Dims:
    defaults(fields)
    found = each(fields, *SIZES)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    return found


captured(
    Row(
        name="jais2",
        dims=dims,
        kinds=lambda fields: ["layer"] * fields.layers(),
        examples=variants({"model_type": "jais2", **BASE}, SIZES),
    )
)
