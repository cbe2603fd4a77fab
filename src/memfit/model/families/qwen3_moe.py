"""Qwen 3 with experts: no shared one; a window, where there is one, holds for every layer."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.llama import SMALL, both_kinds, decoder, dense_mlp, pre_norm, stack
from memfit.model.families.qwen2_moe import SPARSE, experts, sparse
from memfit.model.families.qwen3 import qwen3_attention
from memfit.model.label_heads import ANSWERS_RENAMED, CLASSIFIES, TAGS
from memfit.model.model import Model
from memfit.model.modules import Layer

EXAMPLE = {
    **SMALL,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


@family(
    "qwen3_moe",
    label_heads=(
        CLASSIFIES,
        TAGS,
        ANSWERS_RENAMED,
    ),
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "decoder_sparse_step": 2,
            "tie_word_embeddings": True,
            "head_dim": 32,
            "attention_bias": True,
        },
        {
            **EXAMPLE,
            "mlp_only_layers": [0, 2],
            "use_sliding_window": True,
            "sliding_window": 64,
            "attention_dropout": 0.1,
        },
        {**EXAMPLE, "num_experts": 0},
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_key_value_heads=4, num_experts_per_tok=8, sliding_window=4096)
    width = fields.count("hidden_size")
    window = (
        fields.optional("sliding_window") if fields.flag("use_sliding_window", default=False) else 0
    )
    mixer = qwen3_attention(fields, width, window)

    def layer(routed: bool) -> Layer:
        return pre_norm(
            mixer,
            experts(fields, width, style="qwen3_moe") if routed else dense_mlp(fields, width),
            width,
        )

    layers = stack(sparse(fields), layer)
    both_kinds(fields, *SPARSE, read=layer)
    return decoder(fields, "qwen3_moe", layers, width=width, rotary=mixer.rotary, tied=False)
