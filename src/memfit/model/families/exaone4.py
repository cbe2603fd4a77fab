"""EXAONE 4: OLMo 2's order of norms, Gemma 3's norms on queries and keys; in the 32B three layers
in four slide, only they rotate."""

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
    normed,
    post_norm,
    stack,
)
from memfit.model.label_heads import ANSWERS_RENAMED, CLASSIFIES, TAGS
from memfit.model.model import Model
from memfit.model.modules import Attention

EXAMPLE = {**SMALL, "model_type": "exaone4", "num_hidden_layers": 5}
FULL = {"sliding_window": None, "layer_types": ["full_attention"] * 5}


def exaone_types(fields: Fields) -> list[bool]:
    """`sliding_window_pattern` may be text (`LLLG`) for other programs; transformers then needs
    `layer_types`, and so it does where no window is given (configuration_exaone4.py)."""
    count, listed = fields.layers(), fields.config.get("layer_types") is not None
    if not listed and fields.value("sliding_window", default=None) is None:
        fields.blame(
            "layer_types",
            ("`layer_types` is missing, and without a window the layer types are unknown"),
        )
    period = 1 if listed else fields.count("sliding_window_pattern")
    return layer_types(fields, [(index + 1) % period != 0 for index in range(count)])


def exaone_attention(plain: Attention, window: int, slides: bool) -> Attention:
    return replace(
        plain, window=window if slides else 0, rotary=plain.rotary if slides or not window else 0
    )


@family(
    "exaone4",
    label_heads=(
        CLASSIFIES,
        TAGS,
        ANSWERS_RENAMED,
    ),
    examples=(
        EXAMPLE,
        {**EXAMPLE, **FULL, "tie_word_embeddings": True, "head_dim": 32},
        {
            **EXAMPLE,
            "sliding_window": 64,
            "sliding_window_pattern": "LG",
            "layer_types": [*["sliding_attention"] * 4, "full_attention"],
        },
        {**EXAMPLE, "sliding_window": 64, "sliding_window_pattern": 2, "attention_dropout": 0.1},
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_key_value_heads=32, sliding_window=4096, sliding_window_pattern=4)
    width, window = fields.count("hidden_size"), fields.optional("sliding_window")
    plain = normed(attention(fields, width, qkv_bias=False, out_bias=False, style="gemma3"))
    mlp = dense_mlp(fields, width)
    types = exaone_types(fields)
    layers = stack(
        types, lambda slides: post_norm(exaone_attention(plain, window, slides), mlp, width)
    )
    return replace(
        decoder(fields, "exaone4", layers, width=width, rotary=plain.rotary, tied=False),
        masks=masks(window, types),
    )
