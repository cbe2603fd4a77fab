"""Mistral Small 3.1 and later, Ministral 3, Devstral 2 and LightOnOCR as they read text: Mistral,
Ministral 3 or Qwen 3 with Pixtral's tower idle."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._composite import composite, kind_of
from memfit.model.families._towers import linear, pixtral_tower, rms_norm
from memfit.model.families.mistral import MINISTRAL3, MISTRAL
from memfit.model.families.qwen3 import EXAMPLE as QWEN3
from memfit.model.model import Model
from memfit.model.modules import Weight

TEXTS = ("mistral", "ministral3")
TOWER = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@family(
    "mistral3",
    examples=(
        {
            "model_type": "mistral3",
            "text_config": {**MISTRAL, "sliding_window": None},
            "vision_config": TOWER,
            "tie_word_embeddings": False,
        },
        {
            "model_type": "mistral3",
            "text_config": {**MINISTRAL3, "head_dim": 32},
            "vision_config": {**TOWER, "patch_size": 8},
            "multimodal_projector_bias": True,
            "spatial_merge_size": 1,
        },
    ),
)
def build(fields: Fields) -> Model:
    return with_pixtral(fields, "mistral3", TEXTS, ("vision_tower", "multi_modal_projector"))


@family(
    "lighton_ocr",
    examples=(
        {
            "model_type": "lighton_ocr",
            "text_config": QWEN3,
            "vision_config": TOWER,
        },
    ),
)
def build_lighton_ocr(fields: Fields) -> Model:
    """LightOnOCR: Qwen 3 in Mistral's place."""
    return with_pixtral(fields, "lighton_ocr", ("qwen3",), ("vision_encoder", "vision_projection"))


def with_pixtral(
    fields: Fields, name: str, kinds: tuple[str, ...], parts: tuple[str, str]
) -> Model:
    """A language model of one of these kinds; `parts` are the names of tower and projector."""
    kind = kind_of(fields, kinds)
    width, tower = pixtral_tower(fields.section("vision_config"), f"model.{parts[0]}")
    merge = fields.count("spatial_merge_size", default=2)
    bias = fields.flag("multimodal_projector_bias", default=False)
    if not isinstance(fields.value("vision_feature_layer", default=-1), int):
        fields.blame("vision_feature_layer", "not supported yet: features of several layers")

    def towers(model: Model) -> Iterator[Weight]:
        projector = f"model.{parts[1]}"
        yield from tower
        yield from rms_norm(f"{projector}.norm", width)
        merger = f"{projector}.patch_merger.merging_layer"
        yield from linear(merger, width * merge**2, width, bias=False)
        yield from linear(f"{projector}.linear_1", width, model.width, bias=bias)
        yield from linear(f"{projector}.linear_2", model.width, model.width, bias=bias)

    return composite(fields, name, kind, towers, tied=True, hands_on_cache=True)
