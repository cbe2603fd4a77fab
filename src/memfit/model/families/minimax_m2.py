"""MiniMax M2: norms over the whole of queries and keys, half of each head rotated, experts chosen
with a correction bias."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import rotated
from memfit.model.families.llama import SMALL, attention, decoder, normed, pre_norm
from memfit.model.model import Model
from memfit.model.modules import MoE, Weight

EXAMPLE = {
    **SMALL,
    "model_type": "minimax_m2",
    "num_local_experts": 4,
    "num_experts_per_tok": 3,
    "head_dim": 32,
}


@family(
    "minimax_m2",
    examples=(
        EXAMPLE,
        {**EXAMPLE, "rotary_dim": 8, "tie_word_embeddings": True, "attention_dropout": 0.1},
        {
            **EXAMPLE,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_key_value_heads=8, head_dim=128, num_experts_per_tok=8)
    width = fields.count("hidden_size")
    mixer = normed(
        attention(fields, width, qkv_bias=False, out_bias=False, style="minimax_m2"), whole=True
    )
    whole = fields.count("rotary_dim", default=mixer.head, high=mixer.head) / mixer.head
    mixer = replace(
        mixer, rotary=rotated(fields, mixer.head, "partial_rotary_factor", default=whole)
    )
    experts = fields.count("num_local_experts", "num_experts")
    moe = MoE(
        name="mlp",
        experts=experts,
        active=fields.count("num_experts_per_tok", high=experts),
        inputs=width,
        width=fields.count("intermediate_size"),
        activation=fields.activation("hidden_act", default="silu"),
        style="minimax_m2",
        jitter=fields.number("router_jitter_noise", default=0.0) > 0,
        extra=(Weight(name="mlp.e_score_correction_bias", shape=(experts,), role="buffer"),),
    )
    return decoder(
        fields,
        "minimax_m2",
        (pre_norm(mixer, moe, width),) * fields.layers(),
        width=width,
        rotary=mixer.rotary,
        tied=False,
    )
