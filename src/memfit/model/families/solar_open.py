"""Solar Open: attention with heads of their own size, and experts with a shared one in every
layer."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, captured, each, ratio, variants

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 240, 336),
    "num_attention_heads": (6, 10, 14),
    "num_key_value_heads": (2, 5, 7),
    "head_dim": (40, 88, 56),
    "n_routed_experts": (13, 11, 9),
    "num_experts_per_tok": (5, 3, 4),
    "moe_intermediate_size": (64, 152, 120),
    "n_shared_experts": (1, 2, 3),
}
BASE = {
    "model_type": "solar_open",
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
DEFAULTS = {"head_dim": 128, "n_shared_experts": 1, "num_experts_per_tok": 8}


def dims(fields: Fields) -> Dims:
    fields.assume(**DEFAULTS)
    found = each(fields, *SIZES)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    found["shared_size"] = found.pop("n_shared_experts") * found["moe_intermediate_size"]
    return found


captured(
    Row(
        name="solar_open",
        dims=dims,
        kinds=lambda fields: ["layer"] * fields.layers(),
        examples=variants(BASE, SIZES),
        active=lambda fields: (
            fields.count("num_experts_per_tok"),
            fields.count("n_routed_experts"),
        ),
        silent=("routed_scaling_factor", "first_k_dense_replace", "intermediate_size"),
    )
)
