"""DeepSeek-V4 as its config describes it: attention over a window and compressed entries, experts
in every layer, four residual streams.

Sizes are those of vLLM 0.25.0 `models/deepseek_v4/attention.py`, `compressor.py` and
`nvidia/model.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memfit.model.model import Model
from memfit.model.modules import Layer, Linear, MoE
from memfit.serving.parts import Compressed, decoder, gated, layer

FLOAT = 4
INDEXED = 4  # at this ratio entries overlap, and an indexer chooses among them

Config = Mapping[str, Any]


def deepseek_v4(config: Config) -> Model:
    ratios, count = config["compress_ratios"], int(config["num_hidden_layers"])
    hashed = int(config.get("num_hash_layers") or 0)
    kinds = [(max(1, int(ratios[index])), index < hashed) for index in range(count)]
    made = {kind: decoder_layer(config, *kind) for kind in dict.fromkeys(kinds)}
    return decoder(config, [made[kind] for kind in kinds])


def decoder_layer(config: Config, ratio: int, hashed: bool) -> Layer:
    """A layer; the first few send a token to experts by its id, in a table."""
    width, inner = int(config["hidden_size"]), int(config["moe_intermediate_size"])
    active = int(config["num_experts_per_tok"])
    experts = MoE(
        name="ffn",
        experts=int(config["n_routed_experts"]),
        active=active,
        inputs=width,
        width=inner,
        shared=gated(width, inner * int(config["n_shared_experts"]), "ffn.shared_experts"),
        correction_bias=not hashed,
    )
    mixer = attention(config, ratio)
    if hashed:
        table = int(config["vocab_size"]) * active * FLOAT
        mixer = replace(mixer, tables=mixer.tables + table)
    return layer(mixer, experts, width)


def attention(config: Config, ratio: int) -> Compressed:
    """`ratio` 1: a window alone."""
    width, low = int(config["hidden_size"]), int(config["q_lora_rank"])
    heads, head = int(config["num_attention_heads"]), int(config["head_dim"])
    groups, inner = int(config["o_groups"]), int(config["o_lora_rank"])
    index = int(config["index_head_dim"]) if ratio == INDEXED else 0
    wide = 1 + (ratio == INDEXED)
    whole = [linear("fused_wqa_wkv", width, low + head)]
    plain: list[Linear] = []
    streams = int(config["hc_mult"])
    mixes = (2 + streams) * streams * streams * width  # of attention and feed-forward each
    tables = FLOAT * (2 * mixes + low + head + heads)
    if ratio > 1:
        plain.append(linear("compressor.fused_wkv_wgate", width, 2 * wide * head))
        tables += FLOAT * (ratio * wide * head + head)
    if index:
        scores = int(config["index_n_heads"])
        whole.append(linear("indexer.wq_b", low, index * scores))
        plain.append(linear("indexer.weights_proj", width, scores))
        plain.append(linear("indexer.compressor.fused_wkv_wgate", width, 2 * wide * index))
        tables += FLOAT * (ratio * wide * index + index)
    return Compressed(
        name="attn",
        heads=heads,
        head=head,
        rope=int(config["qk_rope_head_dim"]),
        window=int(config["sliding_window"]),
        ratio=ratio,
        index=index,
        whole=tuple(whole),
        columns=(
            linear("wq_b", low, heads * head),
            linear("wo_a", heads * head // groups, groups * inner),
        ),
        out=linear("wo_b", groups * inner, width),
        plain=tuple(plain),
        tables=tables,
    )


def linear(name: str, inputs: int, outputs: int) -> Linear:
    return Linear(name=f"attn.{name}", inputs=inputs, outputs=outputs)


def is_compressed(model: Model | None) -> bool:
    """Whether a model's layers keep compressed entries."""
    layers = () if model is None else model.layers
    return any(isinstance(one.blocks[0].mixer, Compressed) for one in layers if one.blocks)


__all__ = ["attention", "decoder_layer", "deepseek_v4", "is_compressed"]
