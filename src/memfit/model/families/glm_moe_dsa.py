"""GLM-5: latent attention over the tokens that an indexer picks, and a mixture of experts."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, captured, each, variants

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 136, 232),
    "intermediate_size": (200, 312, 184),
    "num_attention_heads": (6, 10, 14),
    "kv_lora_rank": (40, 56, 72),
    "q_lora_rank": (88, 64, 120),
    "qk_rope_head_dim": (16, 24, 8),
    "qk_nope_head_dim": (32, 48, 24),
    "v_head_dim": (48, 40, 80),
    "index_head_dim": (36, 52, 44),
    "index_n_heads": (4, 5, 3),
    "index_topk": (31, 47, 61),
    "n_routed_experts": (13, 11, 9),
    "num_experts_per_tok": (5, 3, 2),
    "moe_intermediate_size": (152, 104, 128),
}


def base(name: str) -> dict[str, object]:
    return {
        "model_type": name,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


def dims(fields: Fields) -> Dims:
    found = each(fields, *SIZES)
    whole = found["qk_nope_head_dim"] + found["qk_rope_head_dim"]
    return {
        **found,
        "qk_head_dim": whole,
        "latent_dim": found["kv_lora_rank"] + found["qk_rope_head_dim"],
        "kv_head_dim": found["qk_nope_head_dim"] + found["v_head_dim"],
    }


def kinds(fields: Fields) -> list[str]:
    dense = fields.count("first_k_dense_replace", default=3, low=0)
    default = ["dense" if number < dense else "sparse" for number in range(fields.layers())]
    return [str(one) for one in fields.listing("mlp_layer_types", fields.layers(), default)]


def active(fields: Fields) -> tuple[int, int]:
    return fields.count("num_experts_per_tok"), fields.count("n_routed_experts")


DERIVED = {"picked": ("index_topk", "seq", "min")}
SILENT = ("head_dim", "num_key_value_heads", "first_k_dense_replace", "routed_scaling_factor")

captured(
    Row(
        name="glm_moe_dsa",
        dims=dims,
        kinds=kinds,
        examples=variants(
            {**base("glm_moe_dsa"), "mlp_layer_types": ["dense", "sparse", "sparse"]}, SIZES
        ),
        active=active,
        absent=("indexer_types",),
        silent=SILENT,
        derived=DERIVED,
    )
)
