"""Granite 3: Llama with multipliers on the embedding, on what each block adds, and on the
logits."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.llama import SMALL, attention, decoder, dense_mlp, pre_norm
from memfit.model.model import Model
from memfit.model.modules import Embedding

EXAMPLE = {**SMALL, "model_type": "granite"}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
}


@family(
    "granite",
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            **MULTIPLIERS,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "attention_dropout": 0.1,
        },
    ),
)
def build(fields: Fields) -> Model:
    """The products are computed whatever the multipliers are, 1 included (modeling_granite.py)."""
    width, bias = fields.count("hidden_size"), fields.flag("attention_bias", default=False)
    mixer = attention(fields, width, qkv_bias=bias, out_bias=bias)
    layer = pre_norm(
        mixer, dense_mlp(fields, width, fields.flag("mlp_bias", default=False)), width, scaled=True
    )
    model = decoder(
        fields,
        "granite",
        (layer,) * fields.layers(),
        width=width,
        rotary=mixer.rotary,
        tied=False,
        scaled=True,
    )
    return multiplied(model)


def multiplied(model: Model) -> Model:
    """Multipliers of embedding and logits, both in the model's own code."""
    return replace(
        model,
        logit_scale=True,
        embed=tuple(
            replace(one, outside=True) for one in model.embed if isinstance(one, Embedding)
        ),
    )
