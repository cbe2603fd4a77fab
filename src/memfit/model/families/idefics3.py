"""Idefics 3 and SmolVLM as they read text: Llama with a tower of SigLIP's kind idle."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._composite import composite, kind_of
from memfit.model.families._towers import clip_layers, linear, of_kind
from memfit.model.families.llama import SMALL
from memfit.model.model import Model
from memfit.model.modules import Weight

# Class defaults (transformers 5.23 configuration_idefics3.py, configuration_smolvlm.py)
VISION = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
}
ROOT = "model.vision_model"


def example(name: str, tower: str, **more: object) -> dict[str, object]:
    vision = {
        "model_type": tower,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }
    text = {**SMALL, "model_type": "llama", "pad_token_id": 0}
    return {"model_type": name, "text_config": text, "vision_config": vision, **more}


def seeing(fields: Fields, name: str, tower: str) -> Model:
    kind, picture = kind_of(fields, ("llama",)), fields.section("vision_config")
    of_kind(picture, tower)
    picture.assume(**VISION)
    width, inner = picture.count("hidden_size"), picture.count("intermediate_size")
    heads = picture.count("num_attention_heads")
    picture.divides(heads, width, "num_attention_heads", "hidden_size")
    patch, layers = picture.count("patch_size"), picture.layers()
    places = (picture.count("image_size") // patch) ** 2
    shuffled = fields.count("scale_factor", default=2) ** 2

    def towers(model: Model) -> Iterator[Weight]:
        place = f"{ROOT}.embeddings"
        shape = (width, picture.count("num_channels"), patch, patch)
        yield Weight(name=f"{place}.patch_embedding.weight", shape=shape, role="linear")
        yield Weight(name=f"{place}.patch_embedding.bias", shape=(width,), role="bias")
        table = f"{place}.position_embedding.weight"
        yield Weight(name=table, shape=(places, width), role="embedding")
        yield from clip_layers(ROOT, layers, width, inner)
        projection = "model.connector.modality_projection.proj"
        yield from linear(projection, shuffled * width, model.width, bias=False)

    return composite(
        fields, name, kind, towers, hands_on_cache=True, names=("model.", "model.text_model.")
    )


@family(
    "idefics3",
    examples=(
        example("idefics3", "idefics3_vision"),
        example("idefics3", "idefics3_vision", tie_word_embeddings=True, scale_factor=1),
    ),
)
def build(fields: Fields) -> Model:
    return seeing(fields, "idefics3", "idefics3_vision")


@family("smolvlm", examples=(example("smolvlm", "smolvlm_vision"),))
def build_smolvlm(fields: Fields) -> Model:
    return seeing(fields, "smolvlm", "smolvlm_vision")
