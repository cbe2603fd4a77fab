"""Qwen2-VL and Qwen2.5-VL as they read text: Qwen 2 with positions in three directions, and an idle
vision tower."""

from __future__ import annotations

from collections.abc import Mapping

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._composite import composite, text_fields
from memfit.model.families._towers import qwen2_5_tower, qwen2_tower
from memfit.model.families.qwen2 import EXAMPLE as TEXT
from memfit.model.model import Model
from memfit.model.modules import Weight

VISION = {"depth": 2, "embed_dim": 32, "hidden_size": TEXT["hidden_size"], "num_heads": 2}
VISION_5 = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": TEXT["hidden_size"],
}
FLAT = {
    **{key: value for key, value in TEXT.items() if key != "model_type"},
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
}


def with_text(fields: Fields, name: str, tower: tuple[Weight, ...]) -> Model:
    """Beside Qwen 2 (transformers 5.23 configuration_qwen2_vl.py, configuration_qwen2_5_vl.py)."""
    return composite(
        fields, name, "qwen2", lambda _: tower, own_positions=True, tied_by_either=True
    )


HINT = "parts of half a head, as `mrope_section`"


def sections(fields: Fields, model: Model) -> Model:
    """Frequencies turn by time, row or column, each its part of them (transformers 5.23
    modeling_qwen2_vl.py Qwen2VLRotaryEmbedding)."""
    text = text_fields(fields)
    given = text.config.get("rope_scaling") or text.config.get("rope_parameters") or {}
    found = given.get("mrope_section") if isinstance(given, Mapping) else None
    parts = [16, 24, 24] if found is None else found
    half = next(one.shape[0] for one in model.buffers if one.name.endswith("inv_freq"))
    whole = isinstance(parts, list) and all(isinstance(one, int) for one in parts)
    if not whole or sum(parts) != half:
        text.blame("rope_scaling", f"`mrope_section` does not add up to {half}", HINT)
    return model


@family(
    "qwen2_vl",
    examples=(
        {
            "model_type": "qwen2_vl",
            "text_config": {**FLAT, "model_type": "qwen2_vl_text"},
            "vision_config": {**VISION, "mlp_ratio": 2, "spatial_merge_size": 1},
            "tie_word_embeddings": True,
        },
        {**FLAT, "model_type": "qwen2_vl", "vision_config": VISION},
    ),
)
def build(fields: Fields) -> Model:
    tower = qwen2_tower(fields.section("vision_config"))
    model = with_text(fields, "qwen2_vl", tower)
    return sections(fields, model)


@family(
    "qwen2_5_vl",
    examples=(
        {
            "model_type": "qwen2_5_vl",
            "text_config": {**FLAT, "model_type": "qwen2_5_vl_text"},
            "vision_config": {**VISION_5, "patch_size": 8},
            "tie_word_embeddings": True,
        },
        {**FLAT, "model_type": "qwen2_5_vl", "vision_config": VISION_5},
    ),
)
def build_qwen2_5(fields: Fields) -> Model:
    tower = qwen2_5_tower(fields.section("vision_config"))
    model = with_text(fields, "qwen2_5_vl", tower)
    return sections(fields, model)
