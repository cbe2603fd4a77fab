"""Draft layers that come with a model: multi-token prediction (MTP), which engines run to guess
tokens ahead.

A draft layer is one more decoder layer with attention, or one of each kind that a pattern lists,
behind a projection of the last hidden state and the next token's embedding; it shares the embedding
and the output head (vLLM 0.22.0 `model_executor/models/qwen3_5_mtp.py`, `deepseek_mtp.py`;
`v1/spec_decode/llm_base_proposer.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memfit.model.model import Model
from memfit.model.modules import Attention, Latent, Layer
from memfit.serving.compressed import decoder_layer
from memfit.serving.parts import Compressed
from memfit.serving.weights import Rank, kept_names, layer_sizes

COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
INNER = ("text_config", "llm_config", "language_config")
PATH = "mtp.layers.0"  # as recipes of quantization name them
NORMS = 3  # of the hidden state, of the embedding, and the last one


def draft_layers(model: Model, config: Mapping[str, Any]) -> tuple[Layer, ...]:
    """The model's own draft layers: copies of its last layer with attention, or of the last of each
    kind in `mtp_hybrid_override_pattern` (nemotron_h_mtp.py, vLLM 0.20)."""
    text = next((config[key] for key in INNER if isinstance(config.get(key), Mapping)), config)
    count = next((text[key] for key in COUNTS if isinstance(text.get(key), int)), 0)
    count = max(0, min(count, len(model.layers)))
    kinds, order = (str(text.get(f"{name}hybrid_override_pattern") or "") for name in ("mtp_", ""))
    if kinds and set(kinds) <= set(order) and len(order) == len(model.layers):
        return tuple(model.layers[order.rindex(kind)] for kind in kinds) * count
    if text.get("model_type") == "deepseek_v4":  # a window alone (vLLM 0.25.0 attention.py)
        return (decoder_layer(text, 1, hashed=False),) * count
    last = next((one for one in reversed(model.layers) if attends(one)), None)
    return () if last is None else (last,) * count


def attends(layer: Layer) -> bool:
    kinds = (Attention, Latent, Compressed)
    return any(isinstance(block.mixer, kinds) for block in layer.blocks)


def draft_sizes(layers: tuple[Layer, ...], model: Model, rank: Rank) -> Iterator[int]:
    """Bytes of every tensor of the draft layers on one rank."""
    for layer in layers:
        yield from layer_sizes(layer, rank, kept_names(layer, PATH, rank.scheme))
        if not attends(layer):
            continue
        yield 2 * model.width**2 * rank.width
        yield NORMS * model.width * rank.width
