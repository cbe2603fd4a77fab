"""Helium 1: Llama rotated in neighbouring pairs, with norms that cast their weight up."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.llama import SMALL, attention, decoder, dense_mlp, pre_norm
from memfit.model.label_heads import CLASSIFIES, TAGS
from memfit.model.model import Model

EXAMPLE = {**SMALL, "model_type": "helium", "head_dim": 16}


@family(
    "helium",
    label_heads=(
        CLASSIFIES,
        TAGS,
    ),
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "attention_dropout": 0.1,
        },
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_key_value_heads=20, head_dim=128)
    width = fields.count("hidden_size")
    mixer = attention(
        fields,
        width,
        qkv_bias=fields.flag("attention_bias", default=False),
        out_bias=False,
        style="helium",
    )
    if (
        mixer.out.inputs != width
    ):  # its output projection is square (modeling_helium.py HeliumAttention)
        fields.blame(
            "head_dim",
            f"{mixer.heads} heads of {mixer.head} do not equal the hidden size {width}",
            of=(mixer.heads, mixer.head, width),
        )
    mixer = replace(mixer, out=replace(mixer.out, inputs=width))
    layer = pre_norm(
        mixer, dense_mlp(fields, width, fields.flag("mlp_bias", default=False)), width, "helium"
    )
    return decoder(
        fields,
        "helium",
        (layer,) * fields.layers(),
        width=width,
        rotary=mixer.rotary,
        tied=False,
        norm="helium",
    )
