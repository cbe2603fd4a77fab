"""LFM2 with experts: layers of a gated short convolution and of attention, of which all but the
first ones have a mixture of experts."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, captured, each, ratio, variants

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 160, 288),
    "intermediate_size": (200, 312, 184),
    "num_attention_heads": (6, 10, 12),
    "num_key_value_heads": (2, 5, 3),
    "num_experts": (13, 11, 9),
    "num_experts_per_tok": (5, 3, 2),
    "moe_intermediate_size": (64, 152, 120),
}
BASE = {
    "model_type": "lfm2_moe",
    "num_hidden_layers": 4,
    "num_dense_layers": 2,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention"] * 2,
    "tie_word_embeddings": True,
}


def dims(fields: Fields) -> Dims:
    found = each(fields, *SIZES)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    ratio(fields, found, "hidden_size", "num_attention_heads")
    return found


def kinds(fields: Fields) -> list[str]:
    dense = fields.count("num_dense_layers", default=2, low=0)
    listed = fields.listing("layer_types", fields.layers())
    return [f"{one}_{'dense' if number < dense else 'moe'}" for number, one in enumerate(listed)]


captured(
    Row(
        name="lfm2_moe",
        dims=dims,
        kinds=kinds,
        examples=variants(BASE, SIZES),
        active=lambda fields: (
            fields.count("num_experts_per_tok"),
            fields.count("num_experts"),
        ),
        derived={"conv_length": ("seq + 2", "1")},
        silent=("num_dense_layers", "routed_scaling_factor"),
        tied=True,
    )
)
