"""Falcon-H1: every layer runs Mamba 2 and attention beside each other, and a dense feed-forward."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, captured, each, ratio, variants
from memfit.model.families._mamba_sizes import ATTENTION, DERIVED, MAMBA

SIZES = {
    **ATTENTION,
    **MAMBA,
    "head_dim": (40, 88, 56),
    "intermediate_size": (200, 312, 184),
}
BASE = {
    "model_type": "falcon_h1",
    "num_hidden_layers": 2,
    "mamba_d_conv": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SPLIT = [
    {"mamba_d_ssm": heads * size}
    for heads, size in zip(MAMBA["mamba_n_heads"], MAMBA["mamba_d_head"], strict=True)
]


def dims(fields: Fields) -> Dims:
    if fields.config.get("head_dim") is None:
        heads = fields.count("num_attention_heads", default=32)
        fields.assume(head_dim=fields.count("hidden_size", default=4096) // heads)
    found = each(fields, *SIZES)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    ratio(fields, found, "mamba_n_heads", "mamba_n_groups")
    inner = found["mamba_n_heads"] * found["mamba_d_head"]
    given = fields.count("mamba_d_ssm", default=inner)
    if given != inner:  # transformers 5.23 configuration_falcon_h1.py validate_architecture
        message = f"{given} is not `mamba_n_heads` times `mamba_d_head`, {inner}"
        fields.blame("mamba_d_ssm", message, of=(given, inner))
    conv = inner + 2 * found["mamba_n_groups"] * found["mamba_d_state"]
    projected = inner + conv + found["mamba_n_heads"]
    return {**found, "inner": inner, "conv_dim": conv, "projected": projected}


captured(
    Row(
        name="falcon_h1",
        dims=dims,
        kinds=lambda fields: ["hybrid"] * fields.layers(),
        examples=variants(BASE, SIZES, *SPLIT),
        derived=DERIVED,
        # No code of models without `mamba_rms_norm` reads it.
        silent=("mamba_norm_before_gate", "num_logits_to_keep", "mamba_expand", "mamba_use_mlp"),
    )
)
