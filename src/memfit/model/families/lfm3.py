"""LFM3: layers of a gated short convolution, of attention that sees a window, and of attention that
sees all."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, captured, each, ratio, variants

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 136, 232),
    "intermediate_size": (200, 312, 184),
    "num_attention_heads": (6, 10, 14),
    "num_key_value_heads": (2, 5, 7),
    "head_dim": (40, 88, 56),
}
BASE = {
    "model_type": "lfm3",
    "num_hidden_layers": 4,
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
    "conv_L_cache": 7,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}


def dims(fields: Fields) -> Dims:
    """Class defaults are of transformers 5.23 configuration_lfm3.py."""
    fields.assume(head_dim=128, sliding_window=256)
    found = each(fields, *SIZES)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    return found


def kinds(fields: Fields) -> list[str]:
    count = fields.layers()
    some = ["conv", "conv", "full_attention", "conv", "sliding_attention"]
    default = [some[number % 4 or 4 * bool(number)] for number in range(count)]
    return [str(one) for one in fields.listing("layer_types", count, default)]


captured(
    Row(
        name="lfm3",
        dims=dims,
        kinds=kinds,
        examples=variants(BASE, SIZES),
        derived={"conv_length": ("seq + 6", "1")},
        silent=("sliding_window",),
        window="sliding_window",
        tied=True,
    )
)
