"""DeepSeek-V3 and R1: V2 with sigmoid routing steered by a bias; the layers for predicting further
tokens are not built."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.deepseek_v2 import EXAMPLE as V2
from memfit.model.families.deepseek_v2 import latent_attention, latent_layer, routed_experts
from memfit.model.families.llama import both_kinds, decoder, dense_mlp, stack
from memfit.model.label_heads import CLASSIFIES, TAGS
from memfit.model.model import Model
from memfit.model.modules import Layer

EXAMPLE = {**V2, "model_type": "deepseek_v3", "n_group": 4, "topk_group": 2}


@family(
    "deepseek_v3",
    label_heads=(
        CLASSIFIES,
        TAGS,
    ),
    examples=(
        {**EXAMPLE, "num_nextn_predict_layers": 1},
        {
            **EXAMPLE,
            "q_lora_rank": None,
            "attention_bias": True,
            "first_k_dense_replace": 2,
            "tie_word_embeddings": True,
        },
        {
            **EXAMPLE,
            "rope_interleave": False,
            "attention_bias": True,
            "attention_dropout": 0.1,
            "n_shared_experts": 1,
        },
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(
        q_lora_rank=1536,
        n_shared_experts=1,
        first_k_dense_replace=3,
        n_group=8,
        topk_group=4,
        num_experts_per_tok=8,
    )
    width = fields.count("hidden_size")
    mixer = latent_attention(fields, width, "deepseek_v3")
    dense = fields.count("first_k_dense_replace", low=0)

    def layer(routed: bool) -> Layer:
        second = (
            routed_experts(fields, width, corrected=True, style="deepseek_v3")
            if routed
            else dense_mlp(fields, width)
        )
        return latent_layer(mixer, second, width)

    layers = stack([index >= dense for index in range(fields.layers())], layer)
    both_kinds(fields, "first_k_dense_replace", read=layer)
    return decoder(fields, "deepseek_v3", layers, width=width, rotary=mixer.rope, tied=False)
