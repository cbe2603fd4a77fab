"""Nemotron-H and Nemotron 3: layers of Mamba 2, of attention, of experts or of a dense
feed-forward alone, in the order that a pattern says."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, captured, each, ratio, variants

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 136, 232),
    "num_attention_heads": (6, 10, 14),
    "num_key_value_heads": (2, 5, 7),
    "head_dim": (40, 88, 56),
    "mamba_num_heads": (8, 15, 12),
    "mamba_head_dim": (24, 32, 72),
    "ssm_state_size": (48, 80, 104),
    "n_groups": (4, 3, 6),
    "chunk_size": (16, 40, 24),
    "intermediate_size": (200, 312, 184),
}
EXPERTS = {
    "n_routed_experts": (13, 11, 9),
    "num_experts_per_tok": (5, 3, 2),
    "moe_intermediate_size": (64, 152, 120),
    "moe_shared_expert_intermediate_size": (112, 144, 128),
}
BASE = {
    "model_type": "nemotron_h",
    "layers_block_type": ["mamba", "moe", "attention", "mlp"],
    "num_hidden_layers": 4,
    "conv_kernel": 4,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
LETTERS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
NAMES = {"linear_attention": "mamba", "full_attention": "attention"}


def dims(fields: Fields) -> Dims:
    fields.assume(head_dim=fields.config.get("attention_head_dim", 128))
    found = each(fields, *SIZES)
    if fields.config.get("num_hidden_layers") is not None:
        fields.layers()  # the pattern says how many there are
    for key in EXPERTS:  # of dense models they say nothing
        found[key] = fields.count(key, default=8)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    ratio(fields, found, "mamba_num_heads", "n_groups")
    inner = found["mamba_num_heads"] * found["mamba_head_dim"]
    conv = inner + 2 * found["n_groups"] * found["ssm_state_size"]
    heads = found["mamba_num_heads"]
    return {**found, "inner": inner, "conv_dim": conv, "projected": inner + conv + heads}


def kinds(fields: Fields) -> list[str]:
    pattern = fields.config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and not fields.config.get("layers_block_type"):
        if not set(pattern) <= LETTERS.keys():
            fields.blame("hybrid_override_pattern", f"`{pattern[:40]}` has unknown letters")
        return [LETTERS.get(one, "mamba") for one in pattern]
    listed = fields.config.get("layers_block_type")
    if not isinstance(listed, list) or not listed:
        fields.blame("layers_block_type", "`layers_block_type` needs an entry for each layer")
        return ["mamba"]
    return [NAMES.get(str(one), str(one)) for one in listed]


captured(
    Row(
        name="nemotron_h",
        dims=dims,
        kinds=kinds,
        examples=variants(BASE, {**SIZES, **EXPERTS}),
        active=lambda fields: (
            fields.count("num_experts_per_tok", default=1),
            fields.count("n_routed_experts", default=1),
        ),
        derived={
            "chunks": ("seq", "chunk_size"),
            "states": ("chunks + 1", "1"),
            "conv_length": ("seq + 3", "1"),
        },
        absent=("moe_latent_size",),
        silent=(
            "expand",
            "num_logits_to_keep",
            "routed_scaling_factor",
            "num_nextn_predict_layers",
            "use_mamba_kernels",
            "moe_shared_expert_overlap",
        ),
    )
)
