"""Pieces of models that serving engines need and the formulas of training lack: recurrent mixers,
and short ways to write layers down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.model.modules import (
    MLP,
    Attention,
    Block,
    Embedding,
    Layer,
    Linear,
    Module,
    MoE,
    Norm,
    Weight,
)

INDEX_BLOCK = 128  # values per scale (SGLang NSATokenToKVPool; vLLM DeepseekV32IndexerCache)


@dataclass(frozen=True, kw_only=True)
class Recurrent(Module):
    """Linear attention or a state space layer: `columns` are split over ranks by heads, `out` by
    rows. A request keeps `conv` numbers and `state` numbers, both split."""

    columns: tuple[Linear, ...]
    out: Linear
    conv: int
    state: int
    vectors: int = 0  # numbers of small vectors, split
    kernel: int = 0  # numbers of the convolution's weight, split

    def own(self) -> Iterator[Weight]:
        yield Weight(name=f"{self.name}.conv1d.weight", shape=(self.kernel,))
        yield Weight(name=f"{self.name}.vectors", shape=(self.vectors,))


@dataclass(frozen=True, kw_only=True)
class Indexer(Module):
    """Sparse attention's indexer: small queries and keys that score tokens. It is whole on every
    rank (vLLM 0.12.0 and SGLang 0.5.9, Indexer of DeepSeek-V3.2)."""

    queries: Linear
    keys: Linear
    scores: Linear
    key_norm: Norm

    @property
    def cached(self) -> int:
        """Bytes of a token's key: a byte a value and a scale in fp32 for each block of 128."""
        return self.keys.outputs + self.keys.outputs // INDEX_BLOCK * 4


@dataclass(frozen=True, kw_only=True)
class Uneven(Attention):
    """Attention whose values have another size than its keys."""

    value: int


@dataclass(frozen=True, kw_only=True)
class Bidirectional(Attention):
    """Attention of an encoder: tokens see those behind them, and a request keeps nothing."""


@dataclass(frozen=True, kw_only=True)
class Crossing(Attention):
    """Attention of a decoder to `length` outputs of an encoder, which a request keeps."""

    length: int


@dataclass(frozen=True, kw_only=True)
class Picking(Attention):
    """Attention to blocks of tokens that small queries and a key pick (MiniMax-M3). Ranks share
    these queries as they share keys and values; the key is whole on each, and so is its cache, in
    the model's numbers (vLLM models/minimax_m3, SGLang 0.5.18 models/minimax_m3.py)."""

    queries: Linear
    key: Linear
    query_norm: Norm
    key_norm: Norm
    index: int  # values of a small head


def pair(mixer: Attention) -> int:
    """Numbers of a key and its value in one head."""
    return mixer.head + (mixer.value if isinstance(mixer, Uneven) else mixer.head)


@dataclass(frozen=True, kw_only=True)
class Compressed(Module):
    """DeepSeek-V4's attention: the last `window` tokens as they are, and one entry for every
    `ratio` tokens before, which an indexer of `index` values picks where it has any. `whole` lies
    on every rank, `columns` and `out` are split, `plain` is never quantized; `tables` are bytes of
    small parameters in fp32, those of the layer's four streams among them."""

    heads: int
    head: int
    rope: int
    window: int
    ratio: int
    index: int
    whole: tuple[Linear, ...]
    columns: tuple[Linear, ...]
    out: Linear
    plain: tuple[Linear, ...]
    tables: int

    def own(self) -> Iterator[Weight]:
        yield Weight(name=f"{self.name}.tables", shape=(self.tables // 4,))


def gated(width: int, inner: int, name: str = "mlp") -> MLP:
    return MLP(
        name=name,
        gate=Linear(name=f"{name}.gate_proj", inputs=width, outputs=inner),
        up=Linear(name=f"{name}.up_proj", inputs=width, outputs=inner),
        down=Linear(name=f"{name}.down_proj", inputs=inner, outputs=width),
    )


def plain(name: str, up: str, down: str, sizes: tuple[int, int], *, bias: bool) -> MLP:
    """Two matrices of these names with a function between them; `sizes`: outside, and between."""
    width, inner = sizes
    return MLP(
        name=name,
        up=Linear(name=up, inputs=width, outputs=inner, bias=bias),
        down=Linear(name=down, inputs=inner, outputs=width, bias=bias),
        style="plain",
    )


def layer_norm(name: str, width: int, *, bias: bool = True) -> Norm:
    return Norm(name=name, width=width, style="layer", bias=bias)


def norm(name: str, width: int) -> Norm:
    return Norm(name=name, width=width)


def decoder(
    config: Mapping[str, Any], layers: list[Layer], extra: tuple[Module, ...] = ()
) -> Model:
    width, vocab = int(config["hidden_size"]), int(config["vocab_size"])
    return Model(
        name=str(config["model_type"]),
        family=str(config["model_type"]),
        prefix="model.layers",
        embed=(Embedding(name="model.embed_tokens", rows=vocab, width=width), *extra),
        layers=tuple(layers),
        final=(norm("model.norm", width),),
        head=Linear(name="lm_head", inputs=width, outputs=vocab),
        tied=bool(config.get("tie_word_embeddings", False)),
        vocab=vocab,
        width=width,
        positions=int(config.get("max_position_embeddings") or 0),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
    )


def heads_of(
    config: Mapping[str, Any],
    heads: int,
    pairs: int,
    size: int,
    *,
    window: int = 0,
    gate: int = 1,
    rotary: int = 0,
) -> Attention:
    """Attention with a norm on queries and keys; `gate` 2 where a gate comes with the queries."""
    width = int(config["hidden_size"])
    bias = bool(config.get("attention_bias"))
    sizes = (("q", heads * size * gate), ("k", pairs * size), ("v", pairs * size))
    return Attention(
        name="self_attn",
        heads=heads,
        kv_heads=pairs,
        head=size,
        project=tuple(
            Linear(name=f"self_attn.{one}_proj", inputs=width, outputs=outputs, bias=bias)
            for one, outputs in sizes
        ),
        out=Linear(name="self_attn.o_proj", inputs=heads * size, outputs=width, bias=bias),
        q_norm=norm("self_attn.q_norm", size),
        k_norm=norm("self_attn.k_norm", size),
        rotary=rotary or size,
        window=window,
    )


def layer(mixer: Any, second: Any, width: int) -> Layer:
    return Layer(
        blocks=(
            Block(norm=norm("input_layernorm", width), mixer=mixer),
            Block(norm=norm("post_attention_layernorm", width), mixer=second),
        )
    )


def sparse(config: Mapping[str, Any], width: int) -> MoE:
    shared = int(config.get("shared_expert_intermediate_size") or 0)
    return MoE(
        name="mlp",
        experts=int(config["num_experts"]),
        active=int(config.get("num_experts_per_tok") or config.get("top_k_experts") or 1),
        inputs=width,
        width=int(config["moe_intermediate_size"]),
        shared=gated(width, shared, "mlp.shared_expert") if shared else None,
        shared_gate=Linear(name="mlp.shared_expert_gate", inputs=width, outputs=1)
        if shared
        else None,
    )
