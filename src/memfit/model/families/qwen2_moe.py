"""Qwen 1.5 and 2 with experts: routed experts, and a shared one with its own gate."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.llama import (
    SMALL,
    attention,
    both_kinds,
    decoder,
    dense_mlp,
    gated_mlp,
    layer_types,
    masks,
    pre_norm,
    stack,
)
from memfit.model.label_heads import ANSWERS, CLASSIFIES, TAGS
from memfit.model.model import Model
from memfit.model.modules import MLP, Layer, Linear, MoE

EXAMPLE = {
    **SMALL,
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
SPARSE = (
    "num_experts",
    "decoder_sparse_step",
    "mlp_only_layers",
)  # what tells layers with experts from dense ones


def sparse(fields: Fields) -> list[bool]:
    """For each layer, whether it has experts: every `decoder_sparse_step`th, but not those of
    `mlp_only_layers`."""
    step, dense = fields.count("decoder_sparse_step", default=1), fields.integers("mlp_only_layers")
    routed = fields.count("num_experts", "num_local_experts", low=0) > 0
    return [
        routed and layer not in dense and (layer + 1) % step == 0
        for layer in range(fields.layers())
    ]


def experts(
    fields: Fields, width: int, *, shared: MLP | None = None, gate: Linear | None = None, style: str
) -> MoE:
    count = fields.count("num_experts", "num_local_experts")
    return MoE(
        name="mlp",
        experts=count,
        active=fields.count("num_experts_per_tok", high=count),
        inputs=width,
        width=fields.count("moe_intermediate_size"),
        activation=fields.activation("hidden_act", default="silu"),
        shared=shared,
        shared_gate=gate,
        style=style,
        normed=fields.flag("norm_topk_prob", default=False),
    )


def second(fields: Fields, width: int, routed: bool) -> MLP | MoE:
    if not routed:
        return dense_mlp(fields, width)
    inner, activation = (
        fields.count("shared_expert_intermediate_size"),
        fields.activation("hidden_act", default="silu"),
    )
    gate = Linear(name="mlp.shared_expert_gate", inputs=width, outputs=1)
    return experts(
        fields,
        width,
        shared=gated_mlp("mlp.shared_expert", width, inner, activation),
        gate=gate,
        style="qwen2_moe",
    )


def windowed(fields: Fields) -> tuple[int, list[bool]]:
    """(the window, for each layer whether it slides): every other layer below `max_window_layers`,
    where `use_sliding_window` says so (configuration_qwen2_moe.py)."""
    fields.assume(sliding_window=4096, max_window_layers=28)
    count = fields.layers()
    window = (
        fields.optional("sliding_window") if fields.flag("use_sliding_window", default=False) else 0
    )
    below = fields.count("max_window_layers", low=0) if window else 0
    return window, layer_types(fields, [layer % 2 == 0 and layer < below for layer in range(count)])


@family(
    "qwen2_moe",
    label_heads=(
        CLASSIFIES,
        TAGS,
        ANSWERS,
    ),
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
        },
        {
            **EXAMPLE,
            "use_sliding_window": True,
            "sliding_window": 64,
            "max_window_layers": 2,
            "qkv_bias": False,
            "attention_dropout": 0.1,
        },
        {
            **EXAMPLE,
            "use_sliding_window": True,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "num_experts": 0,
        },
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_key_value_heads=16, qkv_bias=True, num_experts_per_tok=4)
    width, bias = fields.count("hidden_size"), fields.flag("qkv_bias", default=True)

    window, types = windowed(fields)

    def layer(kind: tuple[bool, bool]) -> Layer:
        slides, routed = kind
        mixer = attention(
            fields,
            width,
            qkv_bias=bias,
            out_bias=False,
            window=window if slides else 0,
            repeated_until=(5, 0),
        )
        return pre_norm(mixer, second(fields, width, routed), width)

    kinds = zip(types, sparse(fields), strict=True)
    both_kinds(fields, *SPARSE, read=lambda routed: second(fields, width, routed))
    rotary = attention(fields, width, qkv_bias=bias, out_bias=False).rotary
    model = decoder(
        fields, "qwen2_moe", stack(kinds, layer), width=width, rotary=rotary, tied=False
    )
    # Switched off, its window is 0, and the mask of it is made all the same
    # (configuration_qwen2_moe.py, modeling_qwen2_moe.py)
    return replace(
        model,
        masks=masks(window, types, always=True)
        if fields.flag("use_sliding_window", default=False)
        else (0, 1),
    )
