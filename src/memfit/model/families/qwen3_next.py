"""Qwen3-Next: layers of gated delta rule and of attention, each with a mixture of experts."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, alternating, captured, each, ratio, variants
from memfit.model.label_heads import ANSWERS_RENAMED, CLASSIFIES, TAGS

ATTENTION = {
    "num_attention_heads": (6, 10, 14),
    "num_key_value_heads": (2, 5, 7),
    "head_dim": (40, 88, 56),
}
DELTA = {
    "linear_num_key_heads": (2, 3, 5),
    "linear_num_value_heads": (4, 9, 20),
    "linear_key_head_dim": (24, 40, 16),
    "linear_value_head_dim": (56, 32, 72),
}
EXPERTS = {
    "num_experts": (12, 10, 9),
    "num_experts_per_tok": (5, 3, 2),
    "moe_intermediate_size": (72, 152, 88),
    "shared_expert_intermediate_size": (104, 48, 136),
}
SIZES = {"vocab_size": (544, 608, 736), "hidden_size": (96, 136, 232), **ATTENTION, **DELTA}
DERIVED = {"chunks": ("seq", "64"), "conv_length": ("seq + 3", "1")}


def base(name: str) -> dict[str, object]:
    """What all examples of a family have in common."""
    return {
        "model_type": name,
        "num_hidden_layers": 4,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


def dims(fields: Fields, *more: str) -> Dims:
    found = each(fields, *SIZES, *more)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    ratio(fields, found, "linear_num_value_heads", "linear_num_key_heads")
    keys = found["linear_num_key_heads"] * found["linear_key_head_dim"]
    values = found["linear_num_value_heads"] * found["linear_value_head_dim"]
    return {**found, "conv_dim": 2 * keys + values}


def sections(fields: Fields, dims: Dims) -> Dims:
    """How many frequencies turn with a token's row and column in a picture (transformers 5.23
    modeling_qwen3_5.py Qwen3_5TextRotaryEmbedding.apply_interleaved_mrope)."""
    rope = fields.section("rope_parameters")
    given = rope.config.get("mrope_section") or [11, 11, 10]
    turned = int(dims["head_dim"] * rope.number("partial_rotary_factor", default=0.25)) // 2
    return {
        **dims,
        **{
            f"section_{place}": len(range(place, min(3 * given[place], turned), 3))
            for place in (1, 2)
        },
    }


def kinds(fields: Fields) -> list[str]:
    every = fields.count("full_attention_interval", default=4)
    return alternating(fields, every, "linear_attention", "full_attention")


def active(fields: Fields) -> tuple[int, int]:
    return fields.count("num_experts_per_tok"), fields.count("num_experts")


captured(
    Row(
        name="qwen3_next",
        label_heads=(
            CLASSIFIES,
            TAGS,
            ANSWERS_RENAMED,
        ),
        dims=lambda fields: dims(fields, *EXPERTS),
        kinds=kinds,
        examples=variants(base("qwen3_next"), {**SIZES, **EXPERTS}),
        active=active,
        silent=("intermediate_size",),
        sizes=((3, 184), (7, 248), (11, 424)),
        derived=DERIVED,
    )
)
