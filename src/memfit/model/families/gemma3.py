"""Gemma 3 with its vision tower, as transformers loads the 4B, 12B and 27B: the text model is
computed, the tower only takes memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._composite import rooted
from memfit.model.families._siglip import vision_tower
from memfit.model.families.gemma3_text import EXAMPLE as TEXT
from memfit.model.families.gemma3_text import text_model
from memfit.model.label_heads import CLASSIFIES
from memfit.model.model import Model
from memfit.model.modules import Weight

VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
    "vision_use_head": False,
}
EXAMPLE = {
    "model_type": "gemma3",
    "text_config": {**TEXT, "num_hidden_layers": 7},
    "vision_config": VISION,
}
# Class defaults of Gemma3TextConfig that published configs leave out (transformers 5.23
# configuration_gemma3.py)
DEFAULTS = {"num_attention_heads": 8, "vocab_size": 262208, "max_position_embeddings": 131072}


def small(text: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    return {**EXAMPLE, "text_config": {**TEXT, **text}, "vision_config": {**VISION, **vision}}


@family(
    "gemma3",
    label_heads=(CLASSIFIES,),
    examples=(
        EXAMPLE,
        small(
            {"sliding_window": 64, "sliding_window_pattern": 2, "head_dim": 32},
            {"vision_use_head": True, "image_size": 60},
        ),
        {**EXAMPLE, "tie_word_embeddings": False},
        {
            "model_type": "gemma3",
            "text_config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        },
    ),
)
def build(fields: Fields) -> Model:
    if not fields.mapping("text_config"):
        fields.value("text_config")
    text = fields.section("text_config")
    text.assume(**DEFAULTS)
    model = rooted(text_model(text, "gemma3"), "model.", "model.language_model.")
    width, tower = vision_tower(fields.section("vision_config"), "model.vision_tower")
    projector = (
        Weight(
            name="model.multi_modal_projector.mm_input_projection_weight",
            shape=(width, model.width),
            role="linear",
        ),
        Weight(
            name="model.multi_modal_projector.mm_soft_emb_norm.weight", shape=(width,), role="norm"
        ),
    )
    said = (
        fields.value("dtype", "torch_dtype", default=None) is not None
    )  # the outer dtype holds for both parts
    return replace(
        model,
        towers=(*tower, *projector),
        heads=("causal-lm", "image-text"),
        caching=text.flag("use_cache", default=True),
        tied=fields.flag("tie_word_embeddings", default=True),
        dtype=fields.dtype() if said else model.dtype,
    )
