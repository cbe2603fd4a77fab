"""Grok-1 (`grok-1`, xai-org/grok-1 model.py): experts in every layer, norms on both sides of each
block, capped scores, multipliers on embedding and logits. Its code ships with the checkpoints."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.granite import multiplied
from memfit.model.families.llama import SMALL, attention, decoder
from memfit.model.model import Model
from memfit.model.modules import Block, Layer, MoE, Norm

EXAMPLE = {
    **SMALL,
    "model_type": "grok_1",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": True,
}


@family("grok_1", brought=True, examples=(EXAMPLE,))
def build(fields: Fields) -> Model:
    width = fields.count("hidden_size")
    plain = attention(fields, width, qkv_bias=False, out_bias=False, style="gemma2")
    mixer = replace(plain, softcap=True, kernels=("eager",))
    experts = fields.count("num_experts")
    moe = MoE(
        name="mlp",
        experts=experts,
        active=fields.count("num_experts_per_tok", high=experts),
        inputs=width,
        width=fields.count("intermediate_size"),
        activation=fields.activation("hidden_act", default="gelu"),
        style="mixtral",
    )
    norms = [
        Norm(name=name, width=width)
        for name in ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm")
    ]
    layer = Layer(
        blocks=(
            Block(norm=norms[0], mixer=mixer, post_norm=norms[1]),
            Block(norm=norms[2], mixer=moe, post_norm=norms[3]),
        )
    )
    model = decoder(
        fields,
        "grok_1",
        (layer,) * fields.layers(),
        width=width,
        rotary=mixer.rotary,
        tied=True,
        scaled=True,
    )
    return multiplied(model)
