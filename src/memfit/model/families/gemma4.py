"""Gemma 4 (31B, and 26B with experts) with its vision tower: layers that see a window, and layers
that see all with heads of another size, whose keys are their values, too."""

from __future__ import annotations

from collections.abc import Mapping

from memfit.model.config import Fields
from memfit.model.families._captured import TRACE, Dims, Row, captured, each, variants
from memfit.model.families._towers import gemma4_tower
from memfit.model.modules import Weight

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 136, 232),
    "intermediate_size": (200, 312, 184),
    "num_attention_heads": (12, 20, 28),
    "num_key_value_heads": (6, 5, 14),
    "head_dim": (40, 88, 56),
    "global_head_dim": (272, 328, 296),
    "num_global_key_value_heads": (3, 10, 4),
}
EXPERTS = {
    "num_experts": (13, 11, 9),
    "top_k_experts": (5, 3, 2),
    "moe_intermediate_size": (64, 152, 120),
}
TEXT = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 24,
}
# Class defaults (transformers 5.23 configuration_gemma4.py)
DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False,
}
# Keys and values of larger heads are repeated (transformers 5.23 integrations/sdpa_attention.py
# use_gqa_in_sdpa).
GROUPED = 256
SILENT = (
    "final_logit_softcapping",
    "sliding_window",
    "use_bidirectional_attention",
    "vocab_size_per_layer_input",
)


def dims(fields: Fields, *more: str) -> Dims:
    """Layers that see all have heads of their own (`per_layer_config`)."""
    fields.assume(**DEFAULTS)
    fields.assume(num_global_key_value_heads=fields.config["num_key_value_heads"])
    found = each(fields, *SIZES, *more)
    heads = found["num_attention_heads"]
    for key in ("num_key_value_heads", "num_global_key_value_heads"):
        fields.divides(found[key], heads, key, "`num_attention_heads`")
        found[f"{key}_groups"] = heads // found[key]
    if found["global_head_dim"] <= GROUPED or found["head_dim"] > GROUPED:
        message = "no captured graph of `gemma4` with heads of these sizes"
        fields.blame("global_head_dim", message, TRACE)
    if fields.config.get("use_bidirectional_attention") not in (None, "vision"):
        message = "no captured graph of `gemma4` with this `use_bidirectional_attention`"
        fields.blame("use_bidirectional_attention", message, TRACE)
    return found


def kinds(fields: Fields) -> list[str]:
    """The last layer of each type keeps its keys and values until the model returns."""
    count = fields.layers()
    usual = ["full" if number % 6 == 5 else "sliding" for number in range(count)]
    listed = fields.listing("layer_types", count, [f"{one}_attention" for one in usual])
    found = [str(one).removesuffix("_attention") for one in listed]
    found[-1] = "full"
    for kind in dict.fromkeys(found):
        last = max(number for number, one in enumerate(found) if one == kind)
        found[last] = f"{kind}_kept"
    return found


def tower(fields: Fields) -> tuple[Weight, ...]:
    if fields.config.get("audio_config") is not None:
        fields.blame("audio_config", "no captured graph of `gemma4` with an audio tower", TRACE)
    if fields.config.get("vision_config") is None:
        return ()
    width = fields.section("text_config").count("hidden_size", default=DEFAULTS["hidden_size"])
    return gemma4_tower(fields.section("vision_config"), width)


def active(fields: Fields) -> tuple[int, int]:
    return fields.count("top_k_experts"), fields.count("num_experts")


def row(name: str, more: Mapping[str, tuple[int, ...]]) -> Row:
    text = {**TEXT, "enable_moe_block": bool(more)}
    return Row(
        name=name,
        text="text_config",
        dims=lambda fields: dims(fields, *more),
        kinds=kinds,
        examples=tuple(
            {
                "model_type": "gemma4",
                "text_config": one,
                "vision_config": VISION,
                "audio_config": None,
            }
            for one in variants(text, {**SIZES, **more})
        ),
        active=active if more else None,
        silent=SILENT if more else (*SILENT, *EXPERTS),
        tied=True,
        softcap="final_logit_softcapping",
        window="sliding_window",
        tower=tower,
        last="model.embed_vision.embedding_projection",
        idle=("model.vision_tower.", "model.embed_vision."),
    )


def choose(fields: Fields) -> int:
    return int(bool(fields.mapping("text_config").get("enable_moe_block")))


captured(row("gemma4", {}), row("gemma4-moe", EXPERTS), choose=choose)
