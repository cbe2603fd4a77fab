"""Sizes that hybrids of Mamba 2 and attention have in common."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, ratio

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
DERIVED = {
    "chunks": ("seq", "mamba_chunk_size"),
    "states": ("chunks + 1", "1"),
    "conv_length": ("seq + 3", "1"),
}


def mamba(fields: Fields, found: Dims) -> Dims:
    """With the sizes that the state-space layers add up."""
    ratio(fields, found, "mamba_n_heads", "mamba_n_groups")
    inner = fields.count("mamba_expand", default=2) * found["hidden_size"]
    conv = inner + 2 * found["mamba_n_groups"] * found["mamba_d_state"]
    heads = found["mamba_n_heads"]
    return {**found, "conv_dim": conv, "projected": inner + conv + heads}
