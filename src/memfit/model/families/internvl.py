"""InternVL 2.5, 3 and 3.5 as they read text: a language model with a tower of BEiT's kind idle."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._composite import composite, kind_of
from memfit.model.families._towers import layer_norm, linear, of_kind, rms_norm
from memfit.model.families.qwen2 import EXAMPLE as QWEN2
from memfit.model.families.qwen3 import EXAMPLE as QWEN3
from memfit.model.model import Model
from memfit.model.modules import Weight

# Class defaults (transformers 5.23 configuration_internvl.py InternVLVisionConfig)
VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": [448, 448],
    "patch_size": [14, 14],
}
KINDS = ("qwen2", "llama", "qwen3", "qwen3_moe", "gpt_oss")
ROOT = "model.vision_tower"
SMALL = {
    "model_type": "internvl_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": [56, 56],
    "patch_size": [14, 14],
}


def sides(fields: Fields, key: str) -> tuple[int, int]:
    """Height and width; one number is both."""
    given = fields.value(key)
    if isinstance(given, list) and len(given) == 2:
        if all(isinstance(one, int) and 0 < one < 2**20 for one in given):
            return given[0], given[1]
        fields.blame(key, f"`{key}` needs two lengths")
        return 1, 1
    side = fields.count(key)
    return side, side


def vision(fields: Fields) -> Iterator[Weight]:
    width, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    bias, norms = (fields.flag(key, default=False) for key in ("attention_bias", "use_qk_norm"))
    norm = rms_norm if fields.text("norm_type", default="layer_norm") == "rms_norm" else layer_norm
    height, across = sides(fields, "image_size")
    rows, columns = sides(fields, "patch_size")
    heads = fields.count("num_attention_heads")
    fields.divides(heads, width, "num_attention_heads", "hidden_size")
    place = f"{ROOT}.embeddings"
    yield Weight(name=f"{place}.cls_token", shape=(1, 1, width))
    if fields.flag("use_mask_token", default=False):
        yield Weight(name=f"{place}.mask_token", shape=(1, 1, width))
    if fields.flag("use_absolute_position_embeddings", default=True):
        places = (height // rows) * (across // columns) + 1
        yield Weight(name=f"{place}.position_embeddings", shape=(1, places, width))
    patches = f"{place}.patch_embeddings.projection"
    shape = (width, fields.count("num_channels"), rows, columns)
    yield Weight(name=f"{patches}.weight", shape=shape, role="linear")
    yield Weight(name=f"{patches}.bias", shape=(width,), role="bias")
    for number in range(fields.layers()):
        name = f"{ROOT}.encoder.layer.{number}"
        for one in (1, 2):
            yield Weight(name=f"{name}.lambda_{one}", shape=(width,))
        for part in ("q", "k", "v"):
            yield from linear(f"{name}.attention.{part}_proj", width, width, bias=bias)
        yield from linear(f"{name}.attention.projection_layer", width, width)
        if norms:
            for part in ("q_norm", "k_norm"):
                yield from rms_norm(f"{name}.attention.{part}", width)
        yield from linear(f"{name}.mlp.fc1", width, inner)
        yield from linear(f"{name}.mlp.fc2", inner, width)
        for part in ("before", "after"):
            yield from norm(f"{name}.layernorm_{part}", width)
    if not fields.flag("use_mean_pooling", default=True):
        yield from layer_norm(f"{ROOT}.layernorm", width)


@family(
    "internvl",
    examples=(
        {"model_type": "internvl", "text_config": QWEN2, "vision_config": SMALL},
        {
            "model_type": "internvl",
            "text_config": QWEN3,
            "vision_config": {
                **SMALL,
                "attention_bias": True,
                "use_qk_norm": True,
                "norm_type": "rms_norm",
                "use_mean_pooling": False,
                "image_size": [56, 84],
            },
            "downsample_ratio": 1.0,
            "tie_word_embeddings": False,
        },
    ),
)
def build(fields: Fields) -> Model:
    kind, picture = kind_of(fields, KINDS), fields.section("vision_config")
    of_kind(picture, "internvl_vision")
    picture.assume(**VISION)
    tower, width = tuple(vision(picture)), picture.count("hidden_size")
    ratio = fields.number("downsample_ratio", default=0.5)
    if not 0.01 <= ratio <= 1:
        fields.blame("downsample_ratio", f"`{ratio:g}` is out of range", "must be from 0.01 to 1")
        ratio = 1.0
    shuffled = width * int(1 / ratio) ** 2

    def towers(model: Model) -> Iterator[Weight]:
        projector = "model.multi_modal_projector"
        yield from tower
        yield from layer_norm(f"{projector}.layer_norm", shuffled)
        yield from linear(f"{projector}.linear_1", shuffled, model.width)
        yield from linear(f"{projector}.linear_2", model.width, model.width)

    return composite(fields, "internvl", kind, towers, tied=True)
