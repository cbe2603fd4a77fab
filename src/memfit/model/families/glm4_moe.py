"""GLM-4.5 and 4.6, Solar Open: grouped heads with DeepSeek-V3's experts, half of each head
rotated."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import rotated
from memfit.model.families.deepseek_v2 import routed_experts
from memfit.model.families.llama import (
    SMALL,
    attention,
    both_kinds,
    decoder,
    dense_mlp,
    normed,
    pre_norm,
    stack,
)
from memfit.model.model import Model
from memfit.model.modules import Layer

EXAMPLE = {
    **SMALL,
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}


@family(
    "glm4_moe",
    examples=(
        {**EXAMPLE, "num_nextn_predict_layers": 1},
        {
            **EXAMPLE,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 32,
            "n_shared_experts": 2,
            "attention_dropout": 0.1,
        },
        {
            **EXAMPLE,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
            "n_group": 2,
            "partial_rotary_factor": 1.0,
        },
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(
        num_key_value_heads=8, n_shared_experts=1, first_k_dense_replace=1, num_experts_per_tok=8
    )
    width = fields.count("hidden_size")
    mixer = attention(
        fields,
        width,
        qkv_bias=fields.flag("attention_bias", default=False),
        out_bias=False,
        style="glm4_moe",
    )
    mixer = replace(mixer, rotary=rotated(fields, mixer.head, "partial_rotary_factor", default=0.5))
    if fields.flag("use_qk_norm", default=False):
        mixer = normed(mixer)
    dense = fields.count("first_k_dense_replace", low=0)

    def layer(routed: bool) -> Layer:
        second = (
            routed_experts(fields, width, corrected=True, style="deepseek_v3")
            if routed
            else dense_mlp(fields, width)
        )
        return pre_norm(mixer, second, width)

    layers = stack([index >= dense for index in range(fields.layers())], layer)
    both_kinds(fields, "first_k_dense_replace", read=layer)
    return decoder(fields, "glm4_moe", layers, width=width, rotary=mixer.rotary, tied=False)
