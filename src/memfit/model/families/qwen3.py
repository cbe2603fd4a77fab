"""Qwen 3, dense: Qwen 2 with norms on queries and keys in place of the biases."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.llama import (
    SMALL,
    attention,
    decoder,
    dense_mlp,
    masks,
    normed,
    pre_norm,
    stack,
)
from memfit.model.families.qwen2 import SLIDING, windowed
from memfit.model.label_heads import ANSWERS_RENAMED, CLASSIFIES, TAGS
from memfit.model.model import Model
from memfit.model.modules import Attention, Layer

EXAMPLE = {**SMALL, "model_type": "qwen3"}


def qwen3_attention(fields: Fields, width: int, window: int) -> Attention:
    bias = fields.flag("attention_bias", default=False)
    return normed(
        attention(fields, width, qkv_bias=bias, out_bias=bias, window=window, style="qwen3")
    )


@family(
    "qwen3",
    label_heads=(
        CLASSIFIES,
        TAGS,
        ANSWERS_RENAMED,
    ),
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            **SLIDING,
            "tie_word_embeddings": True,
            "head_dim": 32,
            "attention_bias": True,
            "attention_dropout": 0.1,
        },
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_key_value_heads=32, head_dim=128)
    width = fields.count("hidden_size")

    window, types = windowed(fields)

    def layer(slides: bool) -> Layer:
        return pre_norm(
            qwen3_attention(fields, width, window if slides else 0), dense_mlp(fields, width), width
        )

    rotary = qwen3_attention(fields, width, 0).rotary
    return replace(
        decoder(fields, "qwen3", stack(types, layer), width=width, rotary=rotary, tied=False),
        masks=masks(window, types),
    )
