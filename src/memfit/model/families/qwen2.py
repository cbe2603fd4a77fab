"""Qwen 1.5, 2 and 2.5, dense: Llama with biases on queries, keys and values; the upper layers may slide."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families.llama import SMALL, attention, decoder, dense_mlp, layer_types, pre_norm, stack
from memfit.model.modules import Layer, Model

EXAMPLE = {**SMALL, "model_type": "qwen2"}
SLIDING = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}


def windows(fields: Fields, *, assumed: int = 28) -> list[int]:
    """Layers from `max_window_layers` on slide, where `use_sliding_window` says so (configuration_qwen2.py)."""
    fields.assume(sliding_window=4096, max_window_layers=assumed)
    count = fields.layers()
    window = fields.optional("sliding_window") if fields.flag("use_sliding_window", default=False) else 0
    first = fields.count("max_window_layers", low=0, default=assumed) if window else count
    return [window if slides else 0 for slides in layer_types(fields, [layer >= first for layer in range(count)])]


@family(
    "qwen2",
    examples=(
        EXAMPLE,
        {**EXAMPLE, **SLIDING, "tie_word_embeddings": True},
        {**EXAMPLE, **SLIDING, "layer_types": ["sliding_attention", "full_attention", "full_attention"], "attention_dropout": 0.1},
        {**EXAMPLE, "layer_types": ["sliding_attention"] * 3, "head_dim": 32},
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_key_value_heads=32)
    width = fields.count("hidden_size")

    def layer(window: int) -> Layer:
        return pre_norm(attention(fields, width, qkv_bias=True, out_bias=False, window=window), dense_mlp(fields, width), width)

    rotary = attention(fields, width, qkv_bias=True, out_bias=False).rotary
    return decoder(fields, "qwen2", stack(windows(fields), layer), width=width, rotary=rotary, tied=False)
