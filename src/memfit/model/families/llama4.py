"""Llama 4 with its vision tower: layers that see a chunk, with rotation, and layers that see all,
without; each with a mixture of experts or, in Maverick's every other one, a dense feed-forward."""

from __future__ import annotations

from typing import Any

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, captured, each, ratio, variants
from memfit.model.families._composite import text_of
from memfit.model.families._towers import llama4_tower
from memfit.model.modules import Weight

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 136, 232),
    "intermediate_size": (200, 312, 184),
    "intermediate_size_mlp": (168, 248, 264),
    "num_attention_heads": (6, 10, 14),
    "num_key_value_heads": (2, 5, 7),
    "head_dim": (40, 88, 56),
    "num_local_experts": (13, 11, 9),
}
TEXT = {
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 1, 0, 0],
    "interleave_moe_layer_step": 2,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 4096,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
VISION = {
    "model_type": "llama4_vision_model",
    "hidden_size": 32,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "vision_output_dim": 48,
    "projector_input_dim": 48,
    "projector_output_dim": 48,
}
# Class defaults (transformers 5.23 configuration_llama4.py)
DEFAULTS = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "max_position_embeddings": 131_072,
    "attention_chunk_size": 8192,
}


def usual(fields: Fields) -> None:
    """Take what a config of the text model leaves out from its class; nothing at all is no
    config."""
    if fields.config:
        fields.assume(**DEFAULTS)


def dims(fields: Fields) -> Dims:
    usual(fields)
    found = each(fields, *SIZES)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    return found


def kinds(fields: Fields) -> list[str]:
    usual(fields)
    count, every = fields.layers(), fields.count("no_rope_layer_interval", default=4)
    rotated = [int((number + 1) % every != 0) for number in range(count)]
    turned = (
        fields.listing("no_rope_layers", count, rotated)
        if fields.config.get("no_rope_layers")
        else rotated
    )
    step = fields.count("interleave_moe_layer_step")
    sparse = fields.integers("moe_layers") or range(step - 1, count, step)
    return [
        f"{'chunked' if turned[number] else 'full'}_{'moe' if number in sparse else 'dense'}"
        for number in range(count)
    ]


def tower(fields: Fields) -> tuple[Weight, ...]:
    width = fields.section("text_config").count("hidden_size", default=DEFAULTS["hidden_size"])
    return llama4_tower(fields.section("vision_config"), width)


def row(name: str, **changes: Any) -> Row:
    text = {**TEXT, **changes}
    return Row(
        name=name,
        text="text_config",
        ties="text",
        dims=dims,
        kinds=kinds,
        examples=tuple(
            {"model_type": "llama4", "text_config": one, "vision_config": VISION}
            for one in variants(text, SIZES)
        ),
        active=lambda fields: (
            fields.count("num_experts_per_tok"),
            fields.count("num_local_experts"),
        ),
        silent=(
            "interleave_moe_layer_step",
            "no_rope_layer_interval",
            "attention_chunk_size",
            "floor_scale",
            "attn_scale",
        ),
        window="attention_chunk_size",
        tower=tower,
        idle=("vision_model.", "multi_modal_projector."),
    )


def choose(fields: Fields) -> int:
    return int(fields.mapping("text_config").get("use_qk_norm", True) is False)


ROWS = (row("llama4"), row("llama4-unnormed", use_qk_norm=False))
captured(*ROWS, choose=choose, alone=text_of)
