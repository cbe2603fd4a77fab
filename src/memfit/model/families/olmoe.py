"""OLMoE: OLMo's clamped projections, norms over the whole of queries and keys, and experts in every
layer."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.llama import SMALL, attention, decoder, normed, pre_norm
from memfit.model.families.olmo import clipped
from memfit.model.model import Model
from memfit.model.modules import MoE

EXAMPLE = {**SMALL, "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 3}


@family(
    "olmoe",
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "num_key_value_heads": None,
            "clip_qkv": 8.0,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "attention_dropout": 0.1,
        },
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_experts_per_tok=8)
    width, bias = fields.count("hidden_size"), fields.flag("attention_bias", default=False)
    mixer = normed(
        clipped(fields, attention(fields, width, qkv_bias=bias, out_bias=bias, style="olmoe")),
        whole=True,
    )
    experts = fields.count("num_experts", "num_local_experts")
    moe = MoE(
        name="mlp",
        experts=experts,
        active=fields.count("num_experts_per_tok", high=experts),
        inputs=width,
        width=fields.count("intermediate_size"),
        activation=fields.activation("hidden_act", default="silu"),
        style="qwen3_moe",
        normed=fields.flag("norm_topk_prob", default=False),
    )
    return decoder(
        fields,
        "olmoe",
        (pre_norm(mixer, moe, width),) * fields.layers(),
        width=width,
        rotary=mixer.rotary,
        tied=False,
    )
