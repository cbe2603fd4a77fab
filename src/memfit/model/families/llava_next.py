"""LLaVA 1.6 (and Granite's vision models) and LLaVA-OneVision as they read text: a language model
with CLIP's or SigLIP's tower idle."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._composite import composite, kind_of
from memfit.model.families._siglip import vision_tower
from memfit.model.families._towers import clip_tower, linear
from memfit.model.families.granite import EXAMPLE as GRANITE
from memfit.model.families.llama import SMALL
from memfit.model.families.llava import TOWER
from memfit.model.families.mistral import MISTRAL
from memfit.model.families.qwen2 import EXAMPLE as QWEN2
from memfit.model.model import Model
from memfit.model.modules import Weight

SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
KINDS = ("llama", "mistral", "qwen2", "granite")


def seeing(fields: Fields, name: str, kinds: tuple[str, ...], features: int) -> Model:
    """`features`: the layer of the tower whose result is projected, where a config names none."""
    kind, picture = kind_of(fields, kinds), fields.section("vision_config")
    siglip = picture.text("model_type", default="") == "siglip_vision_model"
    width, tower = (vision_tower if siglip else clip_tower)(picture, "model.vision_tower")
    bias = fields.flag("multimodal_projector_bias", default=True)
    layers = fields.value("vision_feature_layer", default=features)
    count = len(layers) if isinstance(layers, list) else 1

    def towers(model: Model) -> Iterator[Weight]:
        yield Weight(name="model.image_newline", shape=(model.width,))
        yield from tower
        projector = "model.multi_modal_projector"
        yield from linear(f"{projector}.linear_1", count * width, model.width, bias=bias)
        yield from linear(f"{projector}.linear_2", model.width, model.width, bias=bias)

    either = name == "llava_onevision"
    return composite(fields, name, kind, towers, tied_by_either=either, hands_on_cache=True)


@family(
    "llava_next",
    examples=(
        {
            "model_type": "llava_next",
            "text_config": {**MISTRAL, "sliding_window": None},
            "vision_config": TOWER,
        },
        {
            "model_type": "llava_next",
            "text_config": GRANITE,
            "vision_config": SIGLIP,
            "vision_feature_layer": [-2, -1],
            "tie_word_embeddings": True,
        },
        {
            "model_type": "llava_next",
            "text_config": {**SMALL, "model_type": "llama"},
            "vision_config": TOWER,
        },
    ),
)
def build(fields: Fields) -> Model:
    return seeing(fields, "llava_next", KINDS, -2)


@family(
    "llava_onevision",
    examples=({"model_type": "llava_onevision", "text_config": QWEN2, "vision_config": SIGLIP},),
)
def build_onevision(fields: Fields) -> Model:
    return seeing(fields, "llava_onevision", ("qwen2",), -1)
