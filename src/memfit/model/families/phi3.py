"""Phi-3, Phi-3.5 and Phi-4: Llama with q, k, v in one matrix and gate and up in another; Phi-4-mini
rotates part of each head."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import dropout, rotated
from memfit.model.families.llama import SMALL, attention, decoder, fused_mlp, pre_norm
from memfit.model.label_heads import CLASSIFIES, TAGS
from memfit.model.model import Model
from memfit.model.modules import Linear

EXAMPLE = {**SMALL, "model_type": "phi3", "pad_token_id": 0}


@family(
    "phi3",
    label_heads=(
        CLASSIFIES,
        TAGS,
    ),
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "sliding_window": 64,
            "num_key_value_heads": None,
            "attention_dropout": 0.1,
            "resid_pdrop": 0.2,
        },
        {**EXAMPLE, "partial_rotary_factor": 0.75, "tie_word_embeddings": True},
        {
            **EXAMPLE,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
)
def build(fields: Fields) -> Model:
    width = fields.count("hidden_size")
    apart = attention(
        fields,
        width,
        qkv_bias=False,
        out_bias=False,
        window=fields.optional("sliding_window"),
        style="phi3",
        repeated_until=(4, 48),
    )
    together = Linear(
        name="self_attn.qkv_proj", inputs=width, outputs=sum(one.outputs for one in apart.project)
    )
    residual = dropout(fields, "resid_pdrop")
    rotary = rotated(fields, apart.head, "partial_rotary_factor", default=1.0)
    mixer = replace(apart, project=(together,), rotary=rotary, out_dropout=residual)
    mlp = replace(
        fused_mlp(
            width,
            fields.count("intermediate_size"),
            fields.activation("hidden_act", default="silu"),
        ),
        dropout=residual,
    )
    return decoder(
        fields,
        "phi3",
        (pre_norm(mixer, mlp, width),) * fields.layers(),
        width=width,
        rotary=rotary,
        tied=False,
    )
