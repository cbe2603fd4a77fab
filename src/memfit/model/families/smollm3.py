"""SmolLM 3: Llama of which every fourth layer knows no positions."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.llama import (
    SMALL,
    attention,
    decoder,
    dense_mlp,
    layer_types,
    masks,
    pre_norm,
    stack,
)
from memfit.model.label_heads import ANSWERS_RENAMED, CLASSIFIES, TAGS
from memfit.model.model import Model
from memfit.model.modules import Layer

EXAMPLE = {key: value for key, value in SMALL.items() if key != "tie_word_embeddings"} | {
    "model_type": "smollm3",
    "num_hidden_layers": 5,
    "pad_token_id": 0,
}


def rotating(fields: Fields) -> list[bool]:
    """For each layer, whether it is rotated: `no_rope_layers` says 1 where it is (its name
    notwithstanding)."""
    count = fields.layers()
    interval = fields.count("no_rope_layer_interval", default=4)
    listed = fields.listing(
        "no_rope_layers", count, [int((index + 1) % interval != 0) for index in range(count)]
    )
    if not all(item in (0, 1) for item in listed):
        fields.blame("no_rope_layers", "`no_rope_layers` must contain only 0 and 1")
    return [item == 1 for item in listed]


@family(
    "smollm3",
    label_heads=(
        CLASSIFIES,
        TAGS,
        ANSWERS_RENAMED,
    ),
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "use_sliding_window": True,
            "sliding_window": 64,
            "no_rope_layer_interval": 2,
            "attention_dropout": 0.1,
        },
        {
            **EXAMPLE,
            "no_rope_layers": [0, 1, 1, 0, 1],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
        {
            **EXAMPLE,
            "use_sliding_window": True,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", *["full_attention"] * 4],
        },
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_key_value_heads=4)
    width, bias = fields.count("hidden_size"), fields.flag("attention_bias", default=False)
    window = (
        fields.optional("sliding_window") if fields.flag("use_sliding_window", default=False) else 0
    )
    plain = attention(fields, width, qkv_bias=bias, out_bias=bias)
    mlp = dense_mlp(fields, width, fields.flag("mlp_bias", default=False))
    turns = rotating(fields)

    def layer(kind: tuple[bool, bool]) -> Layer:
        slides, turned = kind
        return pre_norm(
            replace(plain, window=window if slides else 0, rotary=plain.rotary if turned else 0),
            mlp,
            width,
        )

    types = layer_types(fields, [window > 0 and not turned for turned in turns])
    layers = stack(zip(types, turns, strict=True), layer)
    return replace(
        decoder(fields, "smollm3", layers, width=width, rotary=plain.rotary, tied=True),
        masks=masks(window, types),
    )
