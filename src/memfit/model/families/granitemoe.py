"""Granite 3 MoE: Granite with experts in every layer."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.granite import MULTIPLIERS, multiplied
from memfit.model.families.llama import SMALL, attention, decoder, pre_norm
from memfit.model.model import Model
from memfit.model.modules import MoE

EXAMPLE = {**SMALL, "model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 3}


@family(
    "granitemoe",
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            **MULTIPLIERS,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "attention_dropout": 0.1,
        },
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_local_experts=8, num_experts_per_tok=2)
    width, bias = fields.count("hidden_size"), fields.flag("attention_bias", default=False)
    mixer = attention(fields, width, qkv_bias=bias, out_bias=bias)
    experts = fields.count("num_local_experts", "num_experts")
    moe = MoE(
        name="block_sparse_moe",
        experts=experts,
        active=fields.count("num_experts_per_tok", high=experts),
        inputs=width,
        router="router",
        width=fields.count("intermediate_size"),
        activation=fields.activation("hidden_act", default="silu"),
        style="granitemoe",
    )
    layers = (pre_norm(mixer, moe, width, scaled=True),) * fields.layers()
    model = decoder(
        fields, "granitemoe", layers, width=width, rotary=mixer.rotary, tied=False, scaled=True
    )
    return multiplied(model)
