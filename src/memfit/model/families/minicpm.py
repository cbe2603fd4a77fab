"""MiniCPM 1 and 2 (arXiv 2404.06395): Llama with multipliers on the embedding and on what each
block adds; its code ships with the checkpoints. The hidden states are divided before the head,
which is not counted: one more tensor as wide as the model."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.llama import SMALL, attention, decoder, dense_mlp, pre_norm
from memfit.model.model import Model
from memfit.model.modules import Embedding


@family(
    "minicpm",
    brought=True,
    examples=({**SMALL, "model_type": "minicpm"},),
)
def build(fields: Fields) -> Model:
    width, bias = fields.count("hidden_size"), fields.flag("attention_bias", default=False)
    mixer = attention(fields, width, qkv_bias=bias, out_bias=bias)
    layer = pre_norm(mixer, dense_mlp(fields, width), width, scaled=True)
    model = decoder(
        fields,
        "minicpm",
        (layer,) * fields.layers(),
        width=width,
        rotary=mixer.rotary,
        tied=True,
        scaled=True,
    )
    embed = tuple(replace(one, outside=True) for one in model.embed if isinstance(one, Embedding))
    return replace(model, embed=embed)
