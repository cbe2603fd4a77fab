"""Command R7B and Command A: three layers in four slide and are rotated, the fourth sees all and
knows no positions."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.cohere import EXAMPLE as COHERE
from memfit.model.families.cohere import side_by_side
from memfit.model.families.llama import attention, decoder, layer_types, masks, stack
from memfit.model.model import Model
from memfit.model.modules import Layer

EXAMPLE = {**COHERE, "model_type": "cohere2", "num_hidden_layers": 5}


@family(
    "cohere2",
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "sliding_window": 64,
            "sliding_window_pattern": 2,
            "num_key_value_heads": None,
            "attention_dropout": 0.1,
            "head_dim": 32,
        },
        {
            **EXAMPLE,
            "layer_types": ["full_attention"] * 5,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(sliding_window=4096, sliding_window_pattern=4)
    width, bias, window = (
        fields.count("hidden_size"),
        fields.flag("attention_bias", default=False),
        fields.optional("sliding_window"),
    )
    plain = attention(fields, width, qkv_bias=bias, out_bias=bias, style="cohere")
    period = fields.count("sliding_window_pattern")

    def layer(slides: bool) -> Layer:
        rotated = slides and window > 0
        return side_by_side(
            fields,
            replace(plain, window=window if slides else 0, rotary=plain.rotary if rotated else 0),
            width,
        )

    types = layer_types(fields, [(index + 1) % period != 0 for index in range(fields.layers())])
    model = decoder(
        fields,
        "cohere2",
        stack(types, layer),
        width=width,
        rotary=plain.rotary,
        tied=True,
        norm="cohere",
    )
    return replace(model, logit_scale=True, masks=masks(window, types, always=True))
