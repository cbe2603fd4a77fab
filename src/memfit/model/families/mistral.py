"""Mistral 7B and Ministral: Llama without biases, and with a sliding window in some versions."""

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
from memfit.model.label_heads import ANSWERS, ANSWERS_RENAMED, CLASSIFIES, TAGS
from memfit.model.model import Model
from memfit.model.modules import Layer

MISTRAL = {**SMALL, "model_type": "mistral"}
MINISTRAL = {**SMALL, "model_type": "ministral", "head_dim": 16}
MINISTRAL3 = {**SMALL, "model_type": "ministral3"}


def model(fields: Fields, windows: list[int], style: str = "llama") -> Model:
    width = fields.count("hidden_size")

    def layer(window: int) -> Layer:
        mixer = attention(
            fields,
            width,
            qkv_bias=False,
            out_bias=False,
            window=window,
            style=style,
            repeated_until=(4, 48),
        )
        return pre_norm(mixer, dense_mlp(fields, width), width)

    rotary = attention(fields, width, qkv_bias=False, out_bias=False).rotary
    return decoder(fields, "mistral", stack(windows, layer), width=width, rotary=rotary, tied=False)


@family(
    "mistral",
    label_heads=(
        CLASSIFIES,
        TAGS,
        ANSWERS,
    ),
    examples=(
        {**MISTRAL, "sliding_window": None},
        {**MISTRAL, "sliding_window": 64, "head_dim": 32, "attention_dropout": 0.1},
        {key: value for key, value in MISTRAL.items() if key != "num_key_value_heads"}
        | {"num_attention_heads": 16, "tie_word_embeddings": True},
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_key_value_heads=8, sliding_window=4096)
    return model(fields, [fields.optional("sliding_window")] * fields.layers())


@family(
    "ministral",
    label_heads=(
        CLASSIFIES,
        TAGS,
        ANSWERS_RENAMED,
    ),
    examples=(
        {
            **MINISTRAL,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 64,
        },
        {**MINISTRAL, "head_dim": 32},
        {**MINISTRAL, "sliding_window": None},
    ),
)
def build_ministral(fields: Fields) -> Model:
    """Windows by layer; where no list says which, all slide. Without `head_dim` transformers 5.23
    cannot build it."""
    fields.count("head_dim")
    fields.assume(num_key_value_heads=8, sliding_window=4096)
    window = fields.optional("sliding_window")
    types = layer_types(fields, [window > 0] * fields.layers())
    made = model(fields, [window if slides else 0 for slides in types])
    return replace(made, masks=masks(window, types, always=True))


@family(
    "ministral3",
    label_heads=(
        CLASSIFIES,
        TAGS,
        ANSWERS,
    ),
    examples=(
        {**MINISTRAL3, "head_dim": 32},
        {**MINISTRAL3, "sliding_window": 64, "tie_word_embeddings": True},
    ),
)
def build_ministral3(fields: Fields) -> Model:
    """Queries are scaled by position (Llama 4's temperature), one product more."""
    fields.assume(num_key_value_heads=8, head_dim=128)
    windows = [fields.optional("sliding_window")] * fields.layers()
    # A family of its own: other frameworks' code for Mistral has no such product
    return replace(model(fields, windows, style="ministral3"), family="ministral3")
