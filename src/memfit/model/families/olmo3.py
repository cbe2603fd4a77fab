"""OLMo 3: OLMo 2 of which three layers in four slide."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.llama import (
    SMALL,
    decoder,
    dense_mlp,
    layer_types,
    masks,
    post_norm,
    rotary_buffers,
    stack,
)
from memfit.model.families.olmo2 import olmo2_attention
from memfit.model.label_heads import CLASSIFIES
from memfit.model.model import Model

EXAMPLE = {**SMALL, "model_type": "olmo3", "num_hidden_layers": 5}


@family(
    "olmo3",
    label_heads=(CLASSIFIES,),
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "layer_types": ["full_attention"] * 5,
            "num_key_value_heads": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        {**EXAMPLE, "sliding_window": 64, "num_hidden_layers": 3, "attention_dropout": 0.1},
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(sliding_window=4096)
    width, window = fields.count("hidden_size"), fields.optional("sliding_window")
    types = layer_types(fields, [(index + 1) % 4 != 0 for index in range(fields.layers())])
    mlp = dense_mlp(fields, width)
    layers = stack(
        types,
        lambda slides: post_norm(
            olmo2_attention(fields, width, window if slides else 0), mlp, width, "olmo2"
        ),
    )
    model = decoder(fields, "olmo3", layers, width=width, rotary=0, tied=False, norm="olmo2")
    buffers = rotary_buffers(olmo2_attention(fields, width).rotary, types=types)
    return replace(model, buffers=buffers, masks=masks(window, types, always=True))
