"""Seed-OSS: Llama with biases on queries, keys and values, and dropout that is on unless the config
says otherwise."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import dropout
from memfit.model.families.llama import SMALL, attention, decoder, dense_mlp, pre_norm
from memfit.model.label_heads import ANSWERS_RENAMED, CLASSIFIES, TAGS
from memfit.model.model import Model

EXAMPLE = {**SMALL, "model_type": "seed_oss"}


@family(
    "seed_oss",
    label_heads=(
        CLASSIFIES,
        TAGS,
        ANSWERS_RENAMED,
    ),
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "attention_out_bias": True,
            "mlp_bias": True,
            "attention_dropout": 0.0,
            "residual_dropout": 0.0,
            "head_dim": 32,
        },
        {**EXAMPLE, "attention_bias": False, "tie_word_embeddings": True, "head_dim": None},
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_key_value_heads=8, head_dim=128, attention_dropout=0.1, residual_dropout=0.1)
    width, residual = fields.count("hidden_size"), dropout(fields, "residual_dropout")
    biases = (
        fields.flag("attention_bias", default=True),
        fields.flag("attention_out_bias", default=False),
    )
    mixer = replace(
        attention(fields, width, qkv_bias=biases[0], out_bias=biases[1]), out_dropout=residual
    )
    mlp = replace(
        dense_mlp(fields, width, fields.flag("mlp_bias", default=False)), dropout=residual
    )
    return decoder(
        fields,
        "seed_oss",
        (pre_norm(mixer, mlp, width),) * fields.layers(),
        width=width,
        rotary=mixer.rotary,
        tied=False,
    )
