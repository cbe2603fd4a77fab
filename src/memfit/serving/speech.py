"""Whisper as engines serve it: the decoder's layers, each with attention to itself and to the
sound, and the encoder as a tower.

Sizes are those of vLLM 0.24.0 `models/whisper.py`, whose merged projections give keys a bias that
the checkpoint lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from memfit.model.model import Model
from memfit.model.modules import Attention, Block, Embedding, Layer, Linear, Weight
from memfit.serving.parts import Crossing, decoder, layer_norm, plain

Config = Mapping[str, Any]
TAPS = 3  # of each of the two convolutions


def whisper(config: Config) -> Model:
    width, inner = int(config["d_model"]), int(config["decoder_ffn_dim"])
    own = attention("self_attn", width, int(config["decoder_attention_heads"]))
    sound = attention("encoder_attn", width, int(config["decoder_attention_heads"]))
    crossing = Crossing(
        **{one.name: getattr(sound, one.name) for one in fields(sound)},
        length=int(config["max_source_positions"]),
    )
    forward = plain("mlp", "fc1", "fc2", (width, inner), bias=True)
    one = Layer(
        blocks=(
            Block(norm=layer_norm("self_attn_layer_norm", width), mixer=own),
            Block(norm=layer_norm("encoder_attn_layer_norm", width), mixer=crossing),
            Block(norm=layer_norm("final_layer_norm", width), mixer=forward),
        )
    )
    count, positions = int(config["decoder_layers"]), int(config["max_target_positions"])
    common = {"tie_word_embeddings": True, **config, "hidden_size": width}
    made = decoder({**common, "max_position_embeddings": positions}, [one] * count)
    rows = made.vocab
    return replace(
        made,
        prefix="model.decoder.layers",
        embed=(
            # neither padded nor split
            Embedding(name="decoder.embed_tokens", rows=rows, width=width, style="learned"),
            Embedding(name="decoder.positions", rows=positions, width=width, style="learned"),
        ),
        final=(layer_norm("decoder.layer_norm", width),),
        towers=tuple(tower(config, width)),
        encodes=True,
    )


def attention(name: str, width: int, heads: int) -> Attention:
    query, key, value, out = (
        Linear(name=f"{name}.{one}_proj", inputs=width, outputs=width, bias=True)
        for one in ("q", "k", "v", "out")
    )
    return Attention(
        name=name,
        heads=heads,
        kv_heads=heads,
        head=width // heads,
        project=(query, key, value),
        out=out,
    )


def tower(config: Config, width: int) -> list[Weight]:
    """The encoder's weights: two convolutions, positions, layers and a norm."""
    inner, bins = int(config["encoder_ffn_dim"]), int(config["num_mel_bins"])
    layer = [
        ("qkv", "linear", (3 * width, width)),
        ("out", "linear", (width, width)),
        ("fc1", "linear", (inner, width)),
        ("fc2", "linear", (width, inner)),
        ("biases", "bias", (3 * width + inner,)),
        ("outer", "norm", (2 * width + 4 * width,)),  # biases of sums, and two norms
    ]
    ends: list[tuple[str, Any, tuple[int, ...]]] = [
        ("conv1", "norm", (width, bins, TAPS)),
        ("conv2", "norm", (width, width, TAPS)),
        ("biases", "norm", (2 * width,)),
        ("positions", "norm", (int(config["max_source_positions"]), width)),
        ("layer_norm", "norm", (2 * width,)),
    ]
    named = [(f"encoder.{name}", role, shape) for name, role, shape in ends]
    for index in range(int(config["encoder_layers"])):
        named += [(f"encoder.layers.{index}.{name}", role, shape) for name, role, shape in layer]
    return [Weight(name=name, shape=shape, role=role) for name, role, shape in named]


SPEECH: dict[str, Callable[[Config], Model]] = {"whisper": whisper}


def is_speech(model: Model | None) -> bool:
    """Whether a decoder attends to what an encoder has made of a sound."""
    found = () if model is None else model.attentions
    return any(isinstance(one, Crossing) for one in found)


__all__ = ["SPEECH", "is_speech"]
