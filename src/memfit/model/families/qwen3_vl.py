"""Qwen3-VL, dense and with experts, as it reads text: Qwen 3 with positions in three directions,
and an idle vision tower."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._composite import composite
from memfit.model.families._towers import qwen3_tower
from memfit.model.families.qwen3 import EXAMPLE as TEXT
from memfit.model.families.qwen3_moe import EXAMPLE as SPARSE
from memfit.model.model import Model

VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": TEXT["hidden_size"],
    "deepstack_visual_indexes": [0, 1],
}


@family(
    "qwen3_vl",
    examples=(
        {
            "model_type": "qwen3_vl",
            "text_config": {**TEXT, "model_type": "qwen3_vl_text"},
            "vision_config": VISION,
        },
        {
            "model_type": "qwen3_vl",
            "text_config": {**TEXT, "model_type": "qwen3_vl_text", "head_dim": 32},
            "vision_config": {**VISION, "deepstack_visual_indexes": [1]},
            "tie_word_embeddings": True,
        },
    ),
)
def build(fields: Fields) -> Model:
    tower = qwen3_tower(fields.section("vision_config"), deepstack=True)
    return composite(fields, "qwen3_vl", "qwen3", lambda _: tower, own_positions=True)


@family(
    "qwen3_vl_moe",
    examples=(
        {
            "model_type": "qwen3_vl_moe",
            "text_config": {**SPARSE, "model_type": "qwen3_vl_moe_text"},
            "vision_config": VISION,
        },
    ),
)
def build_moe(fields: Fields) -> Model:
    """Its router always divides by the sum (transformers 5.23 modeling_qwen3_vl_moe.py)."""
    text = {**fields.mapping("text_config"), "norm_topk_prob": True}
    if text.get("num_experts") is None and "num_local_experts" in text:  # another name of it
        text["num_experts"] = text["num_local_experts"]
    fields.config = {**fields.config, "text_config": text}
    fields.section("text_config").optional("intermediate_size")  # of dense layers, which it has not
    tower = qwen3_tower(fields.section("vision_config"), deepstack=True)
    return composite(fields, "qwen3_vl_moe", "qwen3_moe", lambda _: tower, own_positions=True)
