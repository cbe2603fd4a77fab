"""LFM2: layers of a gated short convolution and of attention."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, captured, each, ratio, variants

MULTIPLIER = "block_ffn_dim_multiplier"
SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 160, 288),
    "intermediate_size": (200, 312, 184),
    "num_attention_heads": (6, 10, 12),
    "num_key_value_heads": (2, 5, 3),
}
BASE = {
    "model_type": "lfm2",
    "num_hidden_layers": 3,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_multiple_of": 8,
    "block_auto_adjust_ff_dim": True,
    MULTIPLIER: 1.0,
    "tie_word_embeddings": True,
}


def dims(fields: Fields) -> Dims:
    """The width of the feed-forward is adjusted (transformers 5.23 modeling_lfm2.py Lfm2MLP)."""
    found = each(fields, *SIZES)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    ratio(fields, found, "hidden_size", "num_attention_heads")
    given = width = found.pop("intermediate_size")
    if fields.flag("block_auto_adjust_ff_dim", default=True):
        step = fields.count("block_multiple_of", default=256)
        thirds = int(2 * given / 3)
        width = int(fields.number(MULTIPLIER, default=1.0) * thirds)
        if width < 1:
            key = MULTIPLIER if thirds else "intermediate_size"
            fields.blame(key, f"no feed-forward is left by this `{key}`", of=(given,))
        width = step * -(-width // step)
    return {**found, "inner": width}


def kinds(fields: Fields) -> list[str]:
    places = fields.integers("full_attn_idxs")
    default = ["full_attention" if one in places else "conv" for one in range(fields.layers())]
    return [str(one) for one in fields.listing("layer_types", fields.layers(), default)]


captured(
    Row(
        name="lfm2",
        dims=dims,
        kinds=kinds,
        examples=variants(BASE, SIZES),
        derived={"conv_length": ("seq + 2", "1")},
        silent=(
            "intermediate_size",
            "block_multiple_of",
            "block_auto_adjust_ff_dim",
            MULTIPLIER,
            "full_attn_idxs",
        ),
        tied=True,
    )
)
