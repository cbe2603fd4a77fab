"""Gemma 3n as engines serve it: four streams, of which one goes through a layer and the others are
predicted from it, a low-rank path beside attention, and an embedding for every layer.

Sizes are those of vLLM 0.24.0 `models/gemma3n.py`. Layers that read the cache of earlier ones have
keys and values there, which the checkpoint lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memfit.model.model import Model
from memfit.model.modules import MLP, Block, Embedding, Layer, Linear
from memfit.serving.parts import decoder, gated, heads_of, norm, plain

Config = Mapping[str, Any]


def gemma3n(config: Config) -> Model:
    width, each = int(config["hidden_size"]), int(config["hidden_size_per_layer_input"])
    count, streams = int(config["num_hidden_layers"]), int(config["altup_num_inputs"])
    full = heads_of(
        config,
        int(config["num_attention_heads"]),
        int(config["num_key_value_heads"]),
        int(config["head_dim"]),
    )
    near = replace(full, window=int(config["sliding_window"]))
    inner = config["intermediate_size"]
    sizes = inner if isinstance(inner, list) else [inner] * count
    beside = [
        low_rank("laurel", "linear_left", "linear_right", (width, int(config["laurel_rank"]))),
        low_rank("per_layer", "per_layer_input_gate", "per_layer_projection", (width, each)),
    ]
    # coefficients of the streams, a router with its norm, and a scale
    altup = norm("altup", streams**2 + streams**3 + (streams + 2) * width)
    made = {
        (kind, size): Layer(
            blocks=(
                Block(
                    norm=norm("input_layernorm", width),
                    mixer=near if kind == "sliding_attention" else full,
                    post_norm=norm("post_attention_layernorm", width),
                ),
                Block(
                    norm=norm("pre_feedforward_layernorm", width),
                    mixer=gated(width, int(size)),
                    post_norm=norm("post_feedforward_layernorm", width),
                ),
                Block(norm=altup, mixer=beside[0], post_norm=norm("post_laurel_norm", width)),
                Block(mixer=beside[1], post_norm=norm("post_per_layer_input_norm", width)),
            )
        )
        for kind, size in set(zip(config["layer_types"], sizes, strict=True))
    }
    rows = int(config["vocab_size_per_layer_input"])
    projections = (
        Linear(name=f"altup_{name}.{index}", inputs=width, outputs=width)
        for name in ("projections", "unembed_projections")
        for index in range(streams - 1)
    )
    extra = (
        Embedding(name="embed_tokens_per_layer", rows=rows, width=each * count),
        Linear(name="per_layer_model_projection", inputs=width, outputs=each * count),
        norm("per_layer_projection_norm", each),
        *projections,
    )
    layers = [made[one] for one in zip(config["layer_types"], sizes, strict=True)]
    return decoder({"tie_word_embeddings": True, **config}, layers, extra)


def low_rank(name: str, first: str, second: str, sizes: tuple[int, int]) -> MLP:
    return plain(name, f"{name}.{first}", f"{name}.{second}", sizes, bias=False)


__all__ = ["gemma3n"]
