"""Qwen 1.5, 2 and 2.5, dense: Llama with biases on queries, keys and values; the upper layers may
slide."""

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

EXAMPLE = {**SMALL, "model_type": "qwen2"}
SLIDING = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}


def windowed(fields: Fields, *, assumed: int = 28) -> tuple[int, list[bool]]:
    """(the window, for each layer whether it slides): layers from `max_window_layers` on slide,
    where `use_sliding_window` says so (configuration_qwen2.py)."""
    fields.assume(sliding_window=4096, max_window_layers=assumed)
    count = fields.layers()
    window = (
        fields.optional("sliding_window") if fields.flag("use_sliding_window", default=False) else 0
    )
    first = fields.count("max_window_layers", low=0, default=assumed) if window else count
    return window, layer_types(fields, [layer >= first for layer in range(count)])


@family(
    "qwen2",
    label_heads=(
        CLASSIFIES,
        TAGS,
        ANSWERS_RENAMED,
    ),
    examples=(
        EXAMPLE,
        {**EXAMPLE, **SLIDING, "tie_word_embeddings": True},
        {
            **EXAMPLE,
            **SLIDING,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "attention_dropout": 0.1,
        },
        {**EXAMPLE, "layer_types": ["sliding_attention"] * 3, "head_dim": 32},
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_key_value_heads=32)
    width = fields.count("hidden_size")

    window, types = windowed(fields)

    def layer(slides: bool) -> Layer:
        mixer = attention(
            fields,
            width,
            qkv_bias=True,
            out_bias=False,
            window=window if slides else 0,
            repeated_until=(4, 48),
        )
        return pre_norm(mixer, dense_mlp(fields, width), width)

    rotary = attention(fields, width, qkv_bias=True, out_bias=False).rotary
    return replace(
        decoder(fields, "qwen2", stack(types, layer), width=width, rotary=rotary, tied=False),
        masks=masks(window, types),
    )
