"""Kimi K2.5 and K2.6 as they read text: DeepSeek-V3 with a vision tower idle."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._composite import composite, kind_of
from memfit.model.families._siglip import norm
from memfit.model.families._towers import frequencies, linear
from memfit.model.families.deepseek_v3 import EXAMPLE
from memfit.model.model import Model
from memfit.model.modules import Weight

ROOT = "model.vision_tower"
# Class defaults (transformers 5.23 configuration_kimi_k25.py), also of published configs, whose
# own names for these fields no code reads
DEFAULTS = {
    "patch_size": 14,
    "pos_emb_height": 64,
    "pos_emb_width": 64,
    "pos_emb_time": 4,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pos_emb_height": 6,
    "pos_emb_width": 10,
}


@family(
    "kimi_k25",
    examples=(
        {
            "model_type": "kimi_k25",
            "text_config": EXAMPLE,
            "vision_config": TOWER,
            "projection_hidden_size": 32,
            "tie_word_embeddings": False,
        },
        {
            "model_type": "kimi_k25",
            "text_config": {**EXAMPLE, "q_lora_rank": None},
            "vision_config": {**TOWER, "patch_size": 10, "merge_kernel_size": [1, 3]},
            "projection_hidden_size": 32,
        },
    ),
)
def build(fields: Fields) -> Model:
    text = fields.mapping("text_config")
    if text.get("model_type", "kimi_k2") == "kimi_k2":
        text = {**text, "model_type": "deepseek_v3"}
    fields.config = {**fields.config, "text_config": text}
    kind = kind_of(fields, ("deepseek_v3",))
    fields.assume(projection_hidden_size=DEFAULTS["hidden_size"])
    vision = fields.section("vision_config")
    vision.assume(**DEFAULTS)
    merged = vision.count("hidden_size") * merges(vision)
    tied = fields.flag("tie_word_embeddings", default=True)

    def towers(model: Model) -> Iterator[Weight]:
        name = "model.mm_projector"
        yield from tower(vision)
        yield from norm(f"{name}.pre_norm", fields.count("projection_hidden_size"))
        yield from linear(f"{name}.in_proj", merged, merged)
        yield from linear(f"{name}.out_proj", merged, model.width)

    last = "model.mm_projector.out_proj" if tied else ""
    return composite(fields, "kimi_k25", kind, towers, tied=True, last=last)


def merges(fields: Fields) -> int:
    """How many patches become one embedding."""
    found = fields.value("merge_kernel_size", default=[2, 2])
    sides = found if isinstance(found, (list, tuple)) else ()
    if len(sides) != 2 or any(type(one) is not int or one < 1 for one in sides):
        fields.blame("merge_kernel_size", "must be a list of two integers")
        return 4
    return int(sides[0]) * int(sides[1])


def tower(fields: Fields) -> Iterator[Weight]:
    width, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    heads, patch = fields.count("num_attention_heads"), fields.count("patch_size")
    fields.divides(heads, width, "num_attention_heads", "`hidden_size`")
    place = f"{ROOT}.patch_embed"
    yield Weight(name=f"{place}.proj.weight", shape=(width, 3, patch, patch), role="linear")
    yield Weight(name=f"{place}.proj.bias", shape=(width,), role="bias")
    sides = (fields.count("pos_emb_height"), fields.count("pos_emb_width"))
    positions = f"{place}.pos_emb"
    yield Weight(name=f"{positions}.position_embeddings", shape=(*sides, width), role="embedding")
    yield Weight(
        name=f"{positions}.time_position_embeddings",
        shape=(fields.count("pos_emb_time") + 1, width),
        role="buffer",
        format="float32",
    )
    yield from frequencies(f"{ROOT}.rotary_emb", width // heads // 4)
    for number in range(fields.layers()):
        name = f"{ROOT}.layers.{number}"
        yield from norm(f"{name}.norm1", width)
        yield from norm(f"{name}.norm2", width)
        for one in ("proj", "q_proj", "k_proj", "v_proj"):
            yield from linear(f"{name}.attn.{one}", width, width)
        yield from linear(f"{name}.mlp.fc1", width, inner)
        yield from linear(f"{name}.mlp.fc2", inner, width)
    yield from norm(f"{ROOT}.final_layernorm", width)
