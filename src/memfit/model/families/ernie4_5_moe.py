"""ERNIE 4.5 with experts: a router kept in fp32, with a correction that is a frozen parameter, and
shared experts or none."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.ernie4_5 import EXAMPLE as DENSE
from memfit.model.families.ernie4_5 import ernie_attention
from memfit.model.families.llama import both_kinds, decoder, dense_mlp, gated_mlp, pre_norm, stack
from memfit.model.model import Model
from memfit.model.modules import Layer, MoE, Weight

EXAMPLE = {
    **DENSE,
    "model_type": "ernie4_5_moe",
    "num_hidden_layers": 5,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 48,
}


def experts(fields: Fields, width: int, bias: bool) -> MoE:
    count = fields.count("moe_num_experts", "num_experts")
    inner, activation = (
        fields.count("moe_intermediate_size"),
        fields.activation("hidden_act", default="silu"),
    )
    shared = fields.count("moe_num_shared_experts", low=0)
    return MoE(
        name="mlp",
        experts=count,
        active=fields.count("moe_k", "num_experts_per_tok", high=count),
        inputs=width,
        width=inner,
        shared=gated_mlp("mlp.shared_experts", width, inner * shared, activation, bias)
        if shared
        else None,
        activation=activation,
        style="ernie4_5_moe",
        router_format="float32",
        extra=(
            Weight(
                name="mlp.gate.moe_statics.e_score_correction_bias",
                shape=(1, count),
                role="router",
                format="float32",
            ),
        ),
    )


@family(
    "ernie4_5_moe",
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "moe_layer_interval": 2,
            "moe_layer_start_index": 2,
            "moe_layer_end_index": 3,
            "moe_num_shared_experts": 0,
        },
        {
            **EXAMPLE,
            "use_bias": True,
            "tie_word_embeddings": False,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 0,
        },
        {**EXAMPLE, "use_bias": True},
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(
        num_key_value_heads=4,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_end_index=-1,
        moe_layer_interval=1,
        moe_k=6,
    )
    width, bias, count = (
        fields.count("hidden_size"),
        fields.flag("use_bias", default=False),
        fields.layers(),
    )
    mixer = ernie_attention(fields, width, bias)
    first, last = (
        fields.count("moe_layer_start_index", low=0),
        fields.count("moe_layer_end_index", low=-1),
    )
    interval = fields.count("moe_layer_interval")
    routed = [
        (index + 1) % interval == 0 and first <= index <= (count - 1 if last == -1 else last)
        for index in range(count)
    ]

    def layer(sparse: bool) -> Layer:
        return pre_norm(
            mixer, experts(fields, width, bias) if sparse else dense_mlp(fields, width, bias), width
        )

    both_kinds(
        fields, "moe_layer_interval", "moe_layer_start_index", "moe_layer_end_index", read=layer
    )
    model = decoder(
        fields, "ernie4_5_moe", stack(routed, layer), width=width, rotary=mixer.rotary, tied=True
    )
    return replace(model, head=replace(model.head, bias=bias))
