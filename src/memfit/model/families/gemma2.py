"""Gemma 2: every other layer slides, scores and logits are capped, norms stand on both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.gemma import EXAMPLE as GEMMA
from memfit.model.families.gemma import gemma_mlp, sandwich, scaled
from memfit.model.families.llama import attention, decoder, layer_types, masks, stack
from memfit.model.label_heads import CLASSIFIES, TAGS
from memfit.model.model import Model
from memfit.model.modules import MLP, Attention, Layer

EXAMPLE = {**GEMMA, "model_type": "gemma2"}


@family(
    "gemma2",
    label_heads=(
        CLASSIFIES,
        TAGS,
    ),
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "head_dim": 32,
            "sliding_window": 64,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        {
            **EXAMPLE,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "attention_bias": True,
            "attention_dropout": 0.1,
        },
        {**EXAMPLE, "tie_word_embeddings": False, "sliding_window": None},
    ),
)
def build(fields: Fields) -> Model:
    return gemma2_model(fields, "gemma2", sandwich)


def gemma2_model(
    fields: Fields, name: str, around: Callable[[Attention, MLP, int], Layer]
) -> Model:
    """`around` puts norms around attention and MLP."""
    fields.assume(
        num_key_value_heads=4,
        head_dim=256,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )
    width, bias = fields.count("hidden_size"), fields.flag("attention_bias", default=False)
    fields.divides(
        fields.count("num_attention_heads"), width, "num_attention_heads", "the hidden size"
    )  # its config insists
    window = fields.optional("sliding_window")
    capped = [
        fields.number(f"{what}_logit_softcapping", default=0.0) > 0 for what in ("attn", "final")
    ]
    mlp = gemma_mlp(
        fields, width, fields.activation("hidden_activation", default="gelu_pytorch_tanh")
    )
    plain = attention(fields, width, qkv_bias=bias, out_bias=bias, style="gemma2")

    def layer(slides: bool) -> Layer:
        mixer = replace(
            plain, window=window if slides else 0, softcap=capped[0], kernels=("eager", "flash")
        )
        return around(mixer, mlp, width)

    types = layer_types(fields, [index % 2 == 0 for index in range(fields.layers())])
    layers = stack(types, layer)
    model = decoder(
        fields,
        name,
        layers,
        width=width,
        rotary=plain.rotary,
        tied=True,
        norm="gemma",
        scaled=True,
    )
    return replace(scaled(model), softcap=capped[1], masks=masks(window, types, always=True))
