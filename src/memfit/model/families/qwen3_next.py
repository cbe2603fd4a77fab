"""Qwen3-Next: layers of gated delta rule and of attention, each with a mixture of experts."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, captured, each, ratio

EXAMPLE = {
    "model_type": "qwen3_next",
    "vocab_size": 544,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 56,
    "linear_conv_kernel_dim": 4,
    "num_experts": 12,
    "num_experts_per_tok": 5,
    "moe_intermediate_size": 72,
    "shared_expert_intermediate_size": 104,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
OTHERS = (
    {
        "vocab_size": 608,
        "hidden_size": 136,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "head_dim": 88,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 9,
        "linear_key_head_dim": 40,
        "linear_value_head_dim": 32,
        "num_experts": 10,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 152,
        "shared_expert_intermediate_size": 48,
    },
    {
        "vocab_size": 736,
        "hidden_size": 232,
        "num_attention_heads": 14,
        "num_key_value_heads": 7,
        "head_dim": 56,
        "linear_num_key_heads": 5,
        "linear_num_value_heads": 20,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 72,
        "num_experts": 9,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 88,
        "shared_expert_intermediate_size": 136,
    },
)


def dims(fields: Fields) -> Dims:
    found = each(
        fields,
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    )
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    ratio(fields, found, "linear_num_value_heads", "linear_num_key_heads")
    keys = found["linear_num_key_heads"] * found["linear_key_head_dim"]
    values = found["linear_num_value_heads"] * found["linear_value_head_dim"]
    return {**found, "conv_dim": 2 * keys + values}


def kinds(fields: Fields) -> list[str]:
    every = fields.count("full_attention_interval", default=4)
    default = [
        "full_attention" if (number + 1) % every == 0 else "linear_attention"
        for number in range(fields.layers())
    ]
    return list(fields.listing("layer_types", fields.layers(), default))


captured(
    Row(
        name="qwen3_next",
        dims=dims,
        kinds=kinds,
        examples=(EXAMPLE, *({**EXAMPLE, **other} for other in OTHERS)),
        active=lambda fields: (fields.count("num_experts_per_tok"), fields.count("num_experts")),
        silent=("intermediate_size",),
        sizes=((3, 184), (7, 248), (11, 424)),
        derived={
            "chunks": ("seq", "64"),
            "conv_length": ("seq + linear_conv_kernel_dim + -1", "1"),
        },
    )
)
