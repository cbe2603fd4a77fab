"""Cohere Compass's language model: Cohere 2 with positions in three directions. Layers with a
window rotate, layers that see all do not."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import TRACE, Dims, Row, captured, each, ratio, variants
from memfit.model.label_heads import CLASSIFIES

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 240, 336),
    "intermediate_size": (200, 312, 184),
    "num_attention_heads": (6, 10, 14),
    "num_key_value_heads": (2, 5, 7),
    "head_dim": (128, 144, 160),  # positions have sections of 24, 20 and 20 in each
}
KINDS = ("sliding_attention", "full_attention")
ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 50000.0}}
BASE = {
    "model_type": "cohere_compass_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "rope_parameters": {**ROPE, "full_attention": None},
    "sliding_window": 4096,
    "logit_scale": 0.25,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
LEAST = 128  # of a head


def dims(fields: Fields) -> Dims:
    width, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    fields.assume(num_key_value_heads=heads, head_dim=width // heads)
    found = each(fields, *SIZES)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    if found["head_dim"] < LEAST:
        message = f"no captured graph of `cohere_compass_text` with heads of less than {LEAST}"
        fields.blame("head_dim", message, TRACE)
    return found


def kinds(fields: Fields) -> list[str]:
    count = fields.layers()
    listed = [str(one) for one in fields.listing("layer_types", count, [KINDS[1]] * count)]
    rope = fields.mapping("rope_parameters")
    for kind in dict.fromkeys(listed):
        known = kind in KINDS and bool(rope.get(kind)) == (kind == KINDS[0])
        if not known:
            message = (
                f"no captured graph of `cohere_compass_text` with these layers of `{kind[:40]}`"
            )
            fields.blame("layer_types", message, TRACE)
    return [one.removesuffix("_attention") for one in listed]


captured(
    Row(
        name="cohere_compass_text",
        label_heads=(CLASSIFIES,),
        examples=variants(BASE, SIZES),
        dims=dims,
        kinds=kinds,
        tied=True,
        scaled=True,
        window="sliding_window",
        silent=("layer_types", "logit_scale", "pooling", "rope_parameters", "sliding_window"),
    )
)
