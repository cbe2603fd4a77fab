"""Gemma 1: Llama with different norms, wide heads, a scaled embedding and a tied head."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.llama import SMALL, attention, decoder, gated_mlp, pre_norm
from memfit.model.label_heads import CLASSIFIES, TAGS
from memfit.model.model import Model
from memfit.model.modules import MLP, Attention, Block, Layer, Norm, Weight

EXAMPLE = {key: value for key, value in SMALL.items() if key != "tie_word_embeddings"} | {
    "model_type": "gemma"
}


def gemma_mlp(fields: Fields, width: int, activation: str) -> MLP:
    return gated_mlp("mlp", width, fields.count("intermediate_size"), activation)


def scaled(model: Model) -> Model:
    """With the embedding's factor, a scalar tensor (modeling_gemma.py
    GemmaTextScaledWordEmbedding)."""
    return replace(
        model,
        buffers=(
            Weight(name="model.embed_tokens.embed_scale", shape=(), role="buffer"),
            *model.buffers,
        ),
    )


def sandwich(mixer: Attention, second: MLP, width: int) -> Layer:
    """Gemma 2's layer: a norm before and after each of the two."""

    def norm(name: str) -> Norm:
        return Norm(name=f"{name}_layernorm", width=width, style="gemma")

    first = Block(norm=norm("input"), mixer=mixer, post_norm=norm("post_attention"))
    return Layer(
        blocks=(
            first,
            Block(norm=norm("pre_feedforward"), mixer=second, post_norm=norm("post_feedforward")),
        )
    )


@family(
    "gemma",
    label_heads=(
        CLASSIFIES,
        TAGS,
    ),
    examples=(
        {**EXAMPLE, "head_dim": 32, "hidden_act": "gelu"},
        {
            **EXAMPLE,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "attention_dropout": 0.1,
            "num_attention_heads": 16,
        },
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_key_value_heads=16, head_dim=256)
    width, bias = fields.count("hidden_size"), fields.flag("attention_bias", default=False)
    activation = fields.activation("hidden_act", default="gelu_pytorch_tanh")
    mixer = attention(fields, width, qkv_bias=bias, out_bias=bias)
    # `gelu` is what old configs say and `gelu_pytorch_tanh` what they mean (configuration_gemma.py)
    mlp = gemma_mlp(fields, width, "gelu_pytorch_tanh" if activation == "gelu" else activation)
    layers = (pre_norm(mixer, mlp, width, "gemma"),) * fields.layers()
    return scaled(
        decoder(
            fields,
            "gemma",
            layers,
            width=width,
            rotary=mixer.rotary,
            tied=True,
            norm="gemma",
            scaled=True,
        )
    )
