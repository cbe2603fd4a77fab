"""K-EXAONE: layers that see a window, and layers that see all, most of them with experts and a
shared one."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, captured, each, ratio, variants

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 240, 336),
    "intermediate_size": (200, 312, 184),
    "num_attention_heads": (6, 10, 14),
    "num_key_value_heads": (2, 5, 7),
    "head_dim": (40, 88, 56),
    "num_experts": (13, 11, 9),
    "num_experts_per_tok": (5, 3, 4),
    "moe_intermediate_size": (64, 152, 120),
    "num_shared_experts": (1, 2, 3),
}
BASE = {
    "model_type": "exaone_moe",
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def dims(fields: Fields) -> Dims:
    if fields.config.get("head_dim") is None:
        heads = fields.count("num_attention_heads", default=32)
        fields.assume(head_dim=fields.count("hidden_size", default=4096) // heads)
    fields.assume(num_shared_experts=1)
    found = each(fields, *SIZES)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    found["shared_size"] = found.pop("num_shared_experts") * found["moe_intermediate_size"]
    return found


def kinds(fields: Fields) -> list[str]:
    """What a layer sees, and its feed-forward (transformers 5.23
    configuration_exaone_moe.py)."""
    count = fields.layers()
    dense = fields.count("first_k_dense_replace", default=1, low=0)
    listed = fields.config.get("layer_types") is not None
    every = 1 if listed else fields.count("sliding_window_pattern", default=4)
    sees = [
        "full_attention" if (number + 1) % every == 0 else "sliding_attention"
        for number in range(count)
    ]
    runs = ["dense" if number < dense else "sparse" for number in range(count)]
    pairs = zip(
        fields.listing("layer_types", count, sees),
        fields.listing("mlp_layer_types", count, runs),
        strict=True,
    )
    return [f"{str(one).removesuffix('_attention')}_{other}" for one, other in pairs]


captured(
    Row(
        name="exaone_moe",
        dims=dims,
        kinds=kinds,
        examples=variants(BASE, SIZES),
        window="sliding_window",
        active=lambda fields: (fields.count("num_experts_per_tok"), fields.count("num_experts")),
        silent=(
            "first_k_dense_replace",
            "sliding_window",
            "sliding_window_pattern",
            "routed_scaling_factor",
            "num_nextn_predict_layers",
        ),
    )
)
