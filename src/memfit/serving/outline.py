"""Models that memfit has no formulas for yet, as far as serving needs them: their linear layers,
what they cache, and the rest as a count.

Weights and caches of an engine need no activations, so that an outline from the config is enough
here where the formulas of training are not. Parameter names are those of transformers 5.23
(modeling_qwen3_next.py, modeling_qwen3_5.py, modeling_gemma4.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from memfit.errors import InputError
from memfit.lazy_dataclass import dataclass
from memfit.model.families import build
from memfit.model.modules import (
    MLP,
    Attention,
    Block,
    Embedding,
    Layer,
    Linear,
    Model,
    Module,
    MoE,
    Norm,
    Weight,
)

# Text models whose layers are those of another family, by `model_type`.
SAME_TEXT = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "deepseek_v32": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "glm_moe_dsa": "deepseek_v3",
}
INNER = ("text_config", "llm_config", "language_config")
TOWER = "towers"


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


def outline(
    config: Mapping[str, Any], parameters: int | None, name: str, origin: str
) -> Model | None:
    """The model as far as an engine needs it; None where nothing is known of its type."""
    text = next((config[key] for key in INNER if isinstance(config.get(key), Mapping)), config)
    tied = config.get("tie_word_embeddings")
    inner = {"tie_word_embeddings": tied, **text} if tied is not None else dict(text)
    inner.pop("quantization_config", None)
    kind = str(inner.get("model_type") or "")
    maker = MAKERS.get(kind)
    try:
        if maker is not None:
            made = maker(inner)
        else:
            made = build({**inner, "model_type": SAME_TEXT.get(kind, kind)})
    except (InputError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    rest = (parameters or 0) - made.parameters
    if rest > 0 and (text is not config or isinstance(config.get("vision_config"), Mapping)):
        made = replace(made, towers=(Weight(name=TOWER, shape=(rest,)),))
    return replace(made, name=name or kind, origin=origin, config=config)


def gated(width: int, inner: int, name: str = "mlp") -> MLP:
    return MLP(
        name=name,
        gate=Linear(name=f"{name}.gate_proj", inputs=width, outputs=inner),
        up=Linear(name=f"{name}.up_proj", inputs=width, outputs=inner),
        down=Linear(name=f"{name}.down_proj", inputs=inner, outputs=width),
    )


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


def qwen_hybrid(config: Mapping[str, Any]) -> Model:
    """Qwen3-Next and Qwen3.5: gated delta nets, every so many layers full attention with a gate."""
    width, count = int(config["hidden_size"]), int(config["num_hidden_layers"])
    every = int(config.get("full_attention_interval") or 4)
    kinds = config.get("layer_types") or [
        "linear_attention" if (index + 1) % every else "full_attention" for index in range(count)
    ]
    size = int(config["head_dim"])
    partial = config.get("partial_rotary_factor") or (config.get("rope_parameters") or {}).get(
        "partial_rotary_factor", 0.25
    )
    full = heads_of(
        config,
        int(config["num_attention_heads"]),
        int(config["num_key_value_heads"]),
        size,
        gate=2,
        rotary=int(size * float(partial)),
    )
    delta = delta_net(config, width)
    second: MLP | MoE = (
        sparse(config, width)
        if config.get("num_experts")
        else gated(width, int(config["intermediate_size"]))
    )
    made = [layer(full if kind == "full_attention" else delta, second, width) for kind in kinds]
    return decoder(config, made)


def layer(mixer: Any, second: Any, width: int) -> Layer:
    return Layer(
        blocks=(
            Block(norm=norm("input_layernorm", width), mixer=mixer),
            Block(norm=norm("post_attention_layernorm", width), mixer=second),
        )
    )


def delta_net(config: Mapping[str, Any], width: int) -> Recurrent:
    keys = int(config["linear_num_key_heads"]) * int(config["linear_key_head_dim"])
    heads = int(config["linear_num_value_heads"])
    values = heads * int(config["linear_value_head_dim"])
    kernel = int(config["linear_conv_kernel_dim"])
    mixed = 2 * keys + values
    return Recurrent(
        name="linear_attn",
        columns=(
            Linear(name="linear_attn.in_proj_qkvz", inputs=width, outputs=mixed + values),
            Linear(name="linear_attn.in_proj_ba", inputs=width, outputs=2 * heads),
        ),
        out=Linear(name="linear_attn.out_proj", inputs=values, outputs=width),
        conv=mixed * (kernel - 1),
        state=heads * int(config["linear_key_head_dim"]) * int(config["linear_value_head_dim"]),
        vectors=2 * heads + int(config["linear_value_head_dim"]),
        kernel=mixed * kernel,
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


def gemma4(config: Mapping[str, Any]) -> Model:
    """Gemma 4: sliding and full layers of two head sizes, per-layer embeddings in the small ones,
    and a mixture of experts beside the feed-forward in the 26B."""
    width, count = int(config["hidden_size"]), int(config["num_hidden_layers"])
    kinds = config.get("layer_types") or []
    heads, pairs = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    small, large = int(config["head_dim"]), int(config.get("global_head_dim") or config["head_dim"])
    wide = pairs
    if config.get("attention_k_eq_v"):
        wide = int(config.get("num_global_key_value_heads") or pairs)
    slides = heads_of(config, heads, pairs, small, window=int(config["sliding_window"]))
    full = heads_of(config, heads, wide, large)
    shared = int(config.get("num_kv_shared_layers") or 0)
    each = int(config.get("hidden_size_per_layer_input") or 0)
    made = []
    for index in range(count):
        double = config.get("use_double_wide_mlp") and index >= count - shared
        inner = int(config["intermediate_size"]) * (2 if double else 1)
        mixer = full if kinds[index] == "full_attention" else slides
        blocks = [
            Block(
                norm=norm("input_layernorm", width),
                mixer=mixer,
                post_norm=norm("post_attention_layernorm", width),
            ),
            Block(
                norm=norm("pre_feedforward_layernorm", width),
                mixer=gated(width, inner),
                post_norm=norm("post_feedforward_layernorm", width),
            ),
        ]
        if config.get("enable_moe_block"):
            moe = replace(sparse(config, width), name="moe")
            blocks.append(Block(norm=norm("pre_feedforward_layernorm_2", width), mixer=moe))
        if each:
            inputs = MLP(
                name="per_layer",
                up=Linear(name="per_layer_input_gate", inputs=width, outputs=each),
                down=Linear(name="per_layer_projection", inputs=each, outputs=width),
                style="plain",
            )
            blocks.append(Block(norm=norm("post_per_layer_input_norm", width), mixer=inputs))
        made.append(Layer(blocks=tuple(blocks)))
    extra: tuple[Module, ...] = ()
    if each:
        rows = int(config.get("vocab_size_per_layer_input") or config["vocab_size"])
        extra = (
            Embedding(name="model.embed_tokens_per_layer", rows=rows, width=each * count),
            Linear(name="model.per_layer_model_projection", inputs=width, outputs=each * count),
        )
    model = decoder({"tie_word_embeddings": True, **config}, made, extra)
    if shared:
        model = replace(model, config=config)
    return model


MAKERS: dict[str, Callable[[Mapping[str, Any]], Model]] = {
    "qwen3_next": qwen_hybrid,
    "qwen3_5_text": qwen_hybrid,
    "qwen3_5_moe_text": qwen_hybrid,
    "gemma4_text": gemma4,
    "gemma4_unified_text": gemma4,
    "diffusion_gemma_text": gemma4,
}

__all__ = ["Recurrent", "outline"]
