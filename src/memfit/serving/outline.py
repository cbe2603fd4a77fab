"""Models that memfit has no formulas for yet, as far as serving needs them: their linear layers,
what they cache, and the rest as a count.

Weights and caches of an engine need no activations, so that an outline from the config is enough
here where the formulas of training are not. Parameter names are those of transformers 5.23
(modeling_qwen3_next.py, modeling_qwen3_5.py, modeling_gemma4.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from memfit.errors import InputError
from memfit.model.families import build
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
    Weight,
)
from memfit.serving.compressed import deepseek_v4
from memfit.serving.gemma3n import gemma3n
from memfit.serving.hybrids import HYBRIDS
from memfit.serving.more_models import MORE
from memfit.serving.parts import (
    Indexer,
    Recurrent,
    decoder,
    gated,
    heads_of,
    layer,
    norm,
    sparse,
)
from memfit.serving.speech import SPEECH
from memfit.serving.text_encoders import TEXT_ENCODERS

# Text models whose layers are those of another family, by `model_type`.
SAME_TEXT = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "kimi_k2": "deepseek_v3",
    "glm4v_text": "glm4",
    "iquestcoder": "llama",
}
INNER = ("text_config", "llm_config", "language_config")
TOWER = "towers"


def outline(
    config: Mapping[str, Any], parameters: int | None, name: str, origin: str
) -> Model | None:
    """The model as far as an engine needs it; None where nothing is known of its type."""
    text = next((config[key] for key in INNER if isinstance(config.get(key), Mapping)), config)
    tied = config.get("tie_word_embeddings")
    inner = {"tie_word_embeddings": tied, **text} if tied is not None else dict(text)
    inner.pop("quantization_config", None)
    if config.get("model_type") in MAKERS:  # MiniMax-M3's text names no type
        inner.setdefault("model_type", config["model_type"])
    kind = str(inner.get("model_type") or "")
    maker = MAKERS.get(kind)
    try:
        if maker is not None:
            made = maker(inner)
        else:
            made = build({**inner, "model_type": SAME_TEXT.get(kind, kind)})
            if any(one.captured is not None for one in made.layers):
                return None  # an engine has to know what to split, and what a request keeps
    except (InputError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    rest = (parameters or 0) - made.parameters + uncounted(inner, made)
    if rest > 0 and (text is not config or isinstance(config.get("vision_config"), Mapping)):
        made = replace(made, towers=(Weight(name=TOWER, shape=(rest,)),))
    return replace(made, name=name or kind, origin=origin, config=config)


def uncounted(config: Mapping[str, Any], made: Model) -> int:
    """Numbers of Gemma 3n's and 4's layers that engines keep beyond the model's parameters: values
    that are the keys once more, and keys and values of layers that read the cache of earlier ones
    (vLLM `models/gemma4.py` Gemma4Attention qkv_proj, 0.19.1 to 0.24.0)."""
    if not str(config.get("model_type")).startswith(("gemma3n", "gemma4")):
        return 0
    twice = bool(config.get("attention_k_eq_v"))
    own = len(made.layers) - int(config.get("num_kv_shared_layers") or 0)
    found = 0
    for number, one in enumerate(made.layers):
        for mixer in (block.mixer for block in one.blocks if isinstance(block.mixer, Attention)):
            _, key, value = (each.inputs * each.outputs for each in mixer.project)
            if number >= own:
                found += key + value
            elif twice and not mixer.window:
                found += value
    return found


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


def indexed(config: Mapping[str, Any]) -> Model:
    """DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with an indexer in each layer, which picks the tokens
    that attention sees."""
    made = build({**config, "model_type": "deepseek_v3"})
    width = int(config["hidden_size"])
    heads, size = int(config["index_n_heads"]), int(config["index_head_dim"])
    name = "self_attn.indexer"
    indexer: Any = Indexer(
        name=name,
        queries=Linear(
            name=f"{name}.wq_b", inputs=int(config["q_lora_rank"]), outputs=heads * size
        ),
        keys=Linear(name=f"{name}.wk", inputs=width, outputs=size),
        scores=Linear(name=f"{name}.weights_proj", inputs=width, outputs=heads),
        key_norm=norm(f"{name}.k_norm", 2 * size),  # a weight and a bias
    )
    kinds = config.get("indexer_types") or ["full"] * len(made.layers)  # GLM-5.2 shares some
    layers = tuple(
        replace(one, blocks=(*one.blocks, Block(norm=None, mixer=indexer)))
        if kind == "full"
        else one
        for one, kind in zip(made.layers, kinds, strict=True)
    )
    return replace(made, layers=layers)


MAKERS: dict[str, Callable[[Mapping[str, Any]], Model]] = {
    "qwen3_next": qwen_hybrid,
    "qwen3_5_text": qwen_hybrid,
    "qwen3_5_moe_text": qwen_hybrid,
    "gemma4_text": gemma4,
    "gemma4_unified_text": gemma4,
    "diffusion_gemma_text": gemma4,
    "gemma3n_text": gemma3n,
    "deepseek_v32": indexed,
    "glm_moe_dsa": indexed,
    **HYBRIDS,
    "deepseek_v4": deepseek_v4,
    **MORE,
    **TEXT_ENCODERS,
    **SPEECH,
}

__all__ = ["outline"]
