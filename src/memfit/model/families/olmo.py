"""OLMo 1: Llama with LayerNorms that have no weights, and projections that may be clamped."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import layer, layer_norm
from memfit.model.families.llama import SMALL, attention, decoder, dense_mlp
from memfit.model.label_heads import CLASSIFIES
from memfit.model.model import Model
from memfit.model.modules import Attention, Norm

EXAMPLE = {**SMALL, "model_type": "olmo"}


def bare(name: str, width: int) -> Norm:
    return layer_norm(name, width, affine=False, style="olmo")


def clipped(fields: Fields, mixer: Attention) -> Attention:
    """`clip_qkv`: the three projections are clamped in place (modeling_olmo.py OlmoAttention)."""
    return replace(mixer, clipped=fields.number("clip_qkv", default=0.0) != 0)


@family(
    "olmo",
    label_heads=(CLASSIFIES,),
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "clip_qkv": 8.0,
            "num_key_value_heads": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "attention_dropout": 0.1,
        },
    ),
)
def build(fields: Fields) -> Model:
    width, bias = fields.count("hidden_size"), fields.flag("attention_bias", default=False)
    mixer = clipped(fields, attention(fields, width, qkv_bias=bias, out_bias=bias, style="olmo"))
    one = layer(
        bare("input_layernorm", width),
        mixer,
        bare("post_attention_layernorm", width),
        dense_mlp(fields, width),
    )
    model = decoder(
        fields, "olmo", (one,) * fields.layers(), width=width, rotary=mixer.rotary, tied=False
    )
    return replace(model, final=(bare("model.norm", width),))
