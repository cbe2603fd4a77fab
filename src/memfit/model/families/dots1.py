"""dots.llm1: Qwen 3's attention with DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.deepseek_v2 import routed_experts
from memfit.model.families.glm4_moe import EXAMPLE as GLM
from memfit.model.families.llama import both_kinds, decoder, dense_mlp, layer_types, pre_norm, stack
from memfit.model.families.qwen3 import qwen3_attention
from memfit.model.model import Model
from memfit.model.modules import Layer

EXAMPLE = {**GLM, "model_type": "dots1", "n_shared_experts": 2}


@family(
    "dots1",
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "sliding_window": 64,
            "max_window_layers": 2,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
            "head_dim": 32,
        },
        {
            **EXAMPLE,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
            "attention_dropout": 0.1,
        },
        {**EXAMPLE, "sliding_window": None, "num_key_value_heads": None},
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(
        num_key_value_heads=32, sliding_window=4096, max_window_layers=62, norm_topk_prob=False
    )
    width, window = fields.count("hidden_size"), fields.optional("sliding_window")
    first, dense = (
        fields.count("max_window_layers", low=0),
        fields.count("first_k_dense_replace", low=0, default=0),
    )
    count = fields.layers()

    def layer(kind: tuple[bool, bool]) -> Layer:
        slides, routed = kind
        second = (
            routed_experts(fields, width, corrected=True, style="deepseek_v3")
            if routed
            else dense_mlp(fields, width)
        )
        return pre_norm(qwen3_attention(fields, width, window if slides else 0), second, width)

    types = layer_types(fields, [window > 0 and index >= first for index in range(count)])
    kinds = zip(types, (i >= dense for i in range(count)), strict=True)
    both_kinds(fields, "first_k_dense_replace", read=lambda routed: layer((False, routed)))
    rotary = qwen3_attention(fields, width, 0).rotary
    model = decoder(fields, "dots1", stack(kinds, layer), width=width, rotary=rotary, tied=False)
    return replace(model, masks=(None,) if any(types) and not window else ())
