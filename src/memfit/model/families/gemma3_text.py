"""Gemma 3, text only: Gemma 2 with five sliding layers to one full, norms on queries and keys, and
no caps."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.gemma import EXAMPLE as GEMMA
from memfit.model.families.gemma import gemma_mlp, sandwich, scaled
from memfit.model.families.llama import (
    attention,
    decoder,
    layer_types,
    masks,
    normed,
    rotary_buffers,
    stack,
)
from memfit.model.label_heads import CLASSIFIES
from memfit.model.model import Model
from memfit.model.modules import Layer

EXAMPLE = {**GEMMA, "model_type": "gemma3_text"}


def windowed(fields: Fields) -> tuple[int, list[bool]]:
    """(the window, for each layer whether it slides): all but every `sliding_window_pattern`th; a
    model that reads both ways splits its window (configuration_gemma3.py)."""
    fields.assume(sliding_window=4096, sliding_window_pattern=6)
    window = fields.optional("sliding_window")
    if fields.flag("use_bidirectional_attention", default=False):
        window = window // 2 + 1
    period = fields.count("sliding_window_pattern")
    return window, layer_types(
        fields, [(index + 1) % period != 0 for index in range(fields.layers())]
    )


def text_model(fields: Fields, name: str) -> Model:
    fields.assume(num_key_value_heads=4, head_dim=256)
    width, bias = fields.count("hidden_size"), fields.flag("attention_bias", default=False)
    fields.divides(
        fields.count("num_attention_heads"), width, "num_attention_heads", "the hidden size"
    )  # its config insists
    capped = [
        fields.number(f"{what}_logit_softcapping", default=0.0) > 0 for what in ("attn", "final")
    ]
    if capped[0]:
        fields.blame(
            "attn_logit_softcapping", "Gemma 3 does not support attention logit soft-capping"
        )
    window, types = windowed(fields)
    mlp = gemma_mlp(
        fields, width, fields.activation("hidden_activation", default="gelu_pytorch_tanh")
    )
    plain = normed(
        attention(fields, width, qkv_bias=bias, out_bias=bias, style="gemma3"), style="gemma"
    )
    layers: tuple[Layer, ...] = stack(
        types, lambda slides: sandwich(replace(plain, window=window if slides else 0), mlp, width)
    )
    model = decoder(
        fields, name, layers, width=width, rotary=0, tied=True, norm="gemma", scaled=True
    )
    return scaled(
        replace(
            model,
            buffers=rotary_buffers(plain.rotary, types=types),
            softcap=capped[1],
            masks=masks(window, types, always=True),
            both_ways=fields.flag("use_bidirectional_attention", default=False),
        )
    )


@family(
    "gemma3_text",
    label_heads=(CLASSIFIES,),
    examples=(
        {**EXAMPLE, "num_hidden_layers": 7, "head_dim": 32},
        {
            **EXAMPLE,
            "sliding_window_pattern": 2,
            "sliding_window": 64,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 30.0,
        },
        {
            **EXAMPLE,
            "layer_types": ["full_attention"] * 3,
            "attention_bias": True,
            "attention_dropout": 0.1,
        },
        {
            **EXAMPLE,
            "use_bidirectional_attention": True,
            "sliding_window": 64,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
)
def build(fields: Fields) -> Model:
    return text_model(fields, "gemma3_text")
