"""gpt-oss: every other layer slides, each head has a sink, experts carry biases and are stored in
MXFP4."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.llama import (
    SMALL,
    attention,
    decoder,
    layer_types,
    masks,
    pre_norm,
    stack,
)
from memfit.model.label_heads import CLASSIFIES, TAGS
from memfit.model.model import Model
from memfit.model.modules import Layer, MoE

EXAMPLE = {
    **SMALL,
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 32,
}
# values that share a scale, along a matrix's inputs (transformers 5.23 integrations/mxfp4.py)
MX_BLOCK = 32


def stored(fields: Fields, width: int, inner: int) -> str:
    """The format of the expert matrices: MXFP4 where `quantization_config` says so."""
    if fields.mapping("quantization_config").get("quant_method") != "mxfp4":
        return ""
    for size, key in ((width, "hidden_size"), (inner, "intermediate_size")):
        fields.divides(MX_BLOCK, size, key, "the inputs of an expert, stored in MXFP4,")
    return "mxfp4"


@family(
    "gpt_oss",
    label_heads=(
        CLASSIFIES,
        TAGS,
    ),
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "sliding_window": 64,
            "attention_dropout": 0.1,
        },
        {
            **EXAMPLE,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "sliding_window": None,
        },
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_key_value_heads=8, head_dim=64, sliding_window=128, num_experts_per_tok=4)
    width, inner, bias = (
        fields.count("hidden_size"),
        fields.count("intermediate_size"),
        fields.flag("attention_bias", default=True),
    )
    window, experts = (
        fields.optional("sliding_window"),
        fields.count("num_local_experts", "num_experts"),
    )
    plain = attention(fields, width, qkv_bias=bias, out_bias=bias, style="gpt_oss")
    moe = MoE(
        name="mlp",
        experts=experts,
        active=fields.count("num_experts_per_tok", high=experts),
        inputs=width,
        width=inner,
        router="router",
        router_bias=True,
        expert_bias=True,
        transposed=True,
        style="gpt_oss",
        format=stored(fields, width, inner),
    )

    def layer(slides: bool) -> Layer:
        mixer = replace(
            plain, window=window if slides else 0, sinks=True, kernels=("eager", "flash")
        )
        return pre_norm(mixer, moe, width, "olmo2")

    types = layer_types(fields, [index % 2 == 0 for index in range(fields.layers())])
    model = decoder(
        fields,
        "gpt_oss",
        stack(types, layer),
        width=width,
        rotary=plain.rotary,
        tied=False,
        norm="olmo2",
    )
    model = replace(model, masks=masks(window, types, always=True))
    unsaid = fields.value("dtype", "torch_dtype", default=None) is None
    return (
        replace(model, dtype="bfloat16") if moe.format and unsaid else model
    )  # the published configs do not say; the rest is stored so
