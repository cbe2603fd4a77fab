"""Hunyuan 0.5B to 7B: Llama with norms on queries and keys after they are rotated."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.llama import SMALL, attention, decoder, dense_mlp, pre_norm
from memfit.model.label_heads import CLASSIFIES
from memfit.model.model import Model
from memfit.model.modules import Norm

EXAMPLE = {**SMALL, "model_type": "hunyuan_v1_dense", "head_dim": 16}


@family(
    "hunyuan_v1_dense",
    label_heads=(CLASSIFIES,),
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "num_key_value_heads": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 32,
            "attention_dropout": 0.1,
        },
        {**EXAMPLE, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    ),
)
def build(fields: Fields) -> Model:
    """Without `head_dim` transformers 5.23 cannot build it."""
    fields.count("head_dim")
    width, bias = fields.count("hidden_size"), fields.flag("attention_bias", default=False)
    mixer = attention(fields, width, qkv_bias=bias, out_bias=bias, style="hunyuan_v1_dense")
    q, k = (Norm(name=f"self_attn.{one}_layernorm", width=mixer.head) for one in ("query", "key"))
    layer = pre_norm(replace(mixer, q_norm=q, k_norm=k), dense_mlp(fields, width), width)
    return decoder(
        fields,
        "hunyuan_v1_dense",
        (layer,) * fields.layers(),
        width=width,
        rotary=mixer.rotary,
        tied=False,
    )
