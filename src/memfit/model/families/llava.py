"""LLaVA 1.5 as it reads text: Llama with CLIP's tower idle."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._composite import composite
from memfit.model.families._towers import clip_tower, linear, of_kind
from memfit.model.families.llama import SMALL
from memfit.model.model import Model
from memfit.model.modules import Weight

TOWER = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
# Class defaults of LlamaConfig, which LLaVA's configs leave out (transformers 5.23
# configuration_llama.py)
DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}


@family(
    "llava",
    examples=(
        {
            "model_type": "llava",
            "text_config": {**SMALL, "model_type": "llama"},
            "vision_config": TOWER,
            "image_seq_length": 16,
        },
        {
            "model_type": "llava",
            "text_config": {**SMALL, "model_type": "llama"},
            "vision_config": {**TOWER, "image_size": 60},
            "multimodal_projector_bias": False,
            "tie_word_embeddings": True,
        },
    ),
)
def build(fields: Fields) -> Model:
    of_kind(fields.section("text_config"), "llama", "language model")
    text = fields.mapping("text_config")
    known = DEFAULTS if text else {}
    fields.config = {**fields.config, "text_config": {**known, **text, "model_type": "llama"}}
    fields.count("image_seq_length", default=576)  # of one image: no memory without images
    width, tower = clip_tower(fields.section("vision_config"), "model.vision_tower")
    bias = fields.flag("multimodal_projector_bias", default=True)
    if not isinstance(fields.value("vision_feature_layer", default=-2), int):
        fields.blame("vision_feature_layer", "not supported yet: features of several layers")

    def towers(model: Model) -> Iterator[Weight]:
        name = "model.multi_modal_projector"
        yield from tower
        yield from linear(f"{name}.linear_1", width, model.width, bias=bias)
        yield from linear(f"{name}.linear_2", model.width, model.width, bias=bias)

    return composite(fields, "llava", "llama", towers, tied_by_either=True)
