"""Granite 4: layers of Mamba 2 and of attention, each with experts beside a dense feed-forward."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, captured, each, ratio, variants

ATTENTION = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 160, 336),
    "num_attention_heads": (4, 10, 14),
    "num_key_value_heads": (2, 5, 2),
}
MAMBA = {
    "mamba_n_heads": (8, 10, 12),
    "mamba_d_head": (24, 32, 56),
    "mamba_d_state": (48, 72, 88),
    "mamba_n_groups": (2, 5, 4),
    "mamba_chunk_size": (16, 40, 24),
}
EXPERTS = {
    "num_local_experts": (12, 11, 9),
    "num_experts_per_tok": (5, 3, 2),
    "intermediate_size": (72, 152, 88),
    "shared_intermediate_size": (104, 56, 136),
}
BASE = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
DERIVED = {
    "chunks": ("seq", "mamba_chunk_size"),
    "states": ("chunks + 1", "1"),
    "conv_length": ("seq + 3", "1"),
}
NAMES = {"linear_attention": "mamba", "full_attention": "attention"}


def mamba(fields: Fields, found: Dims) -> Dims:
    """With the sizes that the state-space layers add up."""
    ratio(fields, found, "mamba_n_heads", "mamba_n_groups")
    inner = fields.count("mamba_expand", default=2) * found["hidden_size"]
    conv = inner + 2 * found["mamba_n_groups"] * found["mamba_d_state"]
    heads = found["mamba_n_heads"]
    return {**found, "conv_dim": conv, "projected": inner + conv + heads}


def dims(fields: Fields) -> Dims:
    found = each(fields, *ATTENTION, *MAMBA, *EXPERTS)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    ratio(fields, found, "hidden_size", "num_attention_heads")
    return mamba(fields, found)


def kinds(fields: Fields) -> list[str]:
    key = "layers_block_type" if "layers_block_type" in fields.config else "layer_types"
    listed = fields.listing(key, fields.layers(), ["mamba"] * fields.layers())
    return [NAMES.get(str(one), str(one)) for one in listed]


captured(
    Row(
        name="granitemoehybrid",
        dims=dims,
        kinds=kinds,
        examples=variants(BASE, {**ATTENTION, **MAMBA, **EXPERTS}),
        active=lambda fields: (
            fields.count("num_experts_per_tok"),
            fields.count("num_local_experts"),
        ),
        derived=DERIVED,
        silent=("attention_multiplier",),
        tied=True,
    )
)
