"""Phi-3.5-MoE: LayerNorms, biases, and a router that samples while it trains."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import layer_norm
from memfit.model.families.llama import SMALL, attention, decoder, pre_norm
from memfit.model.label_heads import CLASSIFIES
from memfit.model.model import Model
from memfit.model.modules import MoE

EXAMPLE = {**SMALL, "model_type": "phimoe", "num_local_experts": 4}


@family(
    "phimoe",
    label_heads=(CLASSIFIES,),
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 64,
            "attention_dropout": 0.1,
        },
        {**EXAMPLE, "lm_head_bias": True, "tie_word_embeddings": True},
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_key_value_heads=8, num_local_experts=16, num_experts_per_tok=2)
    width, bias = fields.count("hidden_size"), fields.flag("attention_bias", default=False)
    mixer = attention(
        fields,
        width,
        qkv_bias=bias,
        out_bias=bias,
        window=fields.optional("sliding_window"),
        repeated_until=(5, 0),
    )
    experts = fields.count("num_local_experts", "num_experts")
    moe = MoE(
        name="mlp",
        experts=experts,
        active=fields.count("num_experts_per_tok", high=experts),
        inputs=width,
        router="router",
        width=fields.count("intermediate_size"),
        activation=fields.activation("hidden_act", default="silu"),
        style="phimoe",
        jitter=fields.number("input_jitter_noise", default=0.0) > 0,
    )
    layers = (pre_norm(mixer, moe, width, "layer", bias=True),) * fields.layers()
    model = decoder(fields, "phimoe", layers, width=width, rotary=mixer.rotary, tied=False)
    head = replace(model.head, bias=fields.flag("lm_head_bias", default=False))
    return replace(model, final=(layer_norm("model.norm", width),), head=head)
