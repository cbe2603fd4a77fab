"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.llama import SMALL, attention, decoder, pre_norm
from memfit.model.label_heads import ANSWERS, CLASSIFIES, TAGS
from memfit.model.model import Model
from memfit.model.modules import MoE

EXAMPLE = {**SMALL, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 3}


@family(
    "mixtral",
    label_heads=(
        CLASSIFIES,
        TAGS,
        ANSWERS,
    ),
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "sliding_window": 64,
            "head_dim": 32,
            "tie_word_embeddings": True,
            "attention_dropout": 0.1,
        },
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2)
    width = fields.count("hidden_size")
    mixer = attention(
        fields,
        width,
        qkv_bias=False,
        out_bias=False,
        window=fields.optional("sliding_window"),
        repeated_until=(4, 48),
    )
    experts = fields.count("num_local_experts", "num_experts")
    moe = MoE(
        name="mlp",
        experts=experts,
        active=fields.count("num_experts_per_tok", high=experts),
        inputs=width,
        width=fields.count("intermediate_size"),
        activation=fields.activation("hidden_act", default="silu"),
        style="mixtral",
        jitter=fields.number("router_jitter_noise", default=0.0) > 0,
    )
    return decoder(
        fields,
        "mixtral",
        (pre_norm(mixer, moe, width),) * fields.layers(),
        width=width,
        rotary=mixer.rotary,
        tied=False,
    )
