"""Outlines of more models that engines serve: Llama 4, DBRX, Hunyuan-MoE, Baichuan, Jais 2,
ERNIE 4.5 VL, MiMo-V2, MiniMax-M3.

Sizes are those of transformers 5.23 (modeling_llama4.py, modeling_dbrx.py, modeling_jais2.py) and
of the code that ships with the checkpoints (modeling_hunyuan.py, modeling_baichuan.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from memfit.model.model import Model
from memfit.model.modules import MLP, Attention, Block, Layer, Linear, MoE
from memfit.serving.parts import Picking, Uneven, decoder, gated, heads_of, layer, norm

Config = Mapping[str, Any]


def attention(config: Config, *, normed: bool = False) -> Attention:
    """Attention by the usual names of a config."""
    heads = int(config["num_attention_heads"])
    pairs = int(config.get("num_key_value_heads") or heads)
    size = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    made = heads_of(config, heads, pairs, size)
    return made if normed else replace(made, q_norm=None, k_norm=None)


def llama4(config: Config) -> Model:
    """Llama 4: every so many layers a mixture with a shared expert. Three layers in four attend
    within chunks; vLLM caches them in full unless told otherwise
    (VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE), and so does SGLang."""
    width, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    step = int(config.get("interleave_moe_layer_step") or 1)
    experts = MoE(
        name="feed_forward",
        experts=int(config["num_local_experts"]),
        active=int(config["num_experts_per_tok"]),
        inputs=width,
        width=inner,
        shared=gated(width, inner, "feed_forward.shared_expert"),
    )
    dense = gated(width, int(config["intermediate_size_mlp"]), "feed_forward")
    full = attention(config)
    return decoder(
        config,
        [
            layer(full, dense if (index + 1) % step else experts, width)
            for index in range(int(config["num_hidden_layers"]))
        ],
    )


def dbrx(config: Config) -> Model:
    """DBRX: a mixture in every layer."""
    inner, outer = config["ffn_config"], config["attn_config"]
    width = int(config["d_model"])
    common = {
        **config,
        "hidden_size": width,
        "num_hidden_layers": int(config["n_layers"]),
        "num_attention_heads": int(config["n_heads"]),
        "num_key_value_heads": int(outer["kv_n_heads"]),
        "max_position_embeddings": int(config["max_seq_len"]),
    }
    experts = MoE(
        name="ffn",
        experts=int(inner["moe_num_experts"]),
        active=int(inner["moe_top_k"]),
        inputs=width,
        width=int(inner["ffn_hidden_size"]),
    )
    return decoder(common, [layer(attention(common), experts, width)] * int(config["n_layers"]))


def hunyuan(config: Config) -> Model:
    """Hunyuan-MoE: a mixture with a shared expert in every layer, norms on queries and keys."""
    width, inner = int(config["hidden_size"]), int(config["moe_intermediate_size"])
    shared = int(config.get("num_shared_expert") or 0) * inner
    experts = MoE(
        name="mlp",
        experts=int(config["num_experts"]),
        active=int(config["moe_topk"]),
        inputs=width,
        width=inner,
        shared=gated(width, shared, "mlp.shared_mlp") if shared else None,
    )
    full = attention(config, normed=bool(config.get("use_qk_norm")))
    return decoder(config, [layer(full, experts, width)] * int(config["num_hidden_layers"]))


def baichuan(config: Config) -> Model:
    """Baichuan 2: Llama's layers; the 13B has no rotary positions."""
    width = int(config["hidden_size"])
    length = config.get("max_position_embeddings") or config.get("model_max_length") or 4096
    full = attention(config)
    if "max_position_embeddings" not in config:
        full = replace(full, rotary=0)
    dense = gated(width, int(config["intermediate_size"]))
    common = {**config, "max_position_embeddings": length}
    return decoder(common, [layer(full, dense, width)] * int(config["num_hidden_layers"]))


def jais2(config: Config) -> Model:
    """Jais 2: biases everywhere, a feed-forward without a gate."""
    width, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    bias = bool(config.get("mlp_bias"))
    dense = MLP(
        name="mlp",
        up=Linear(name="mlp.up_proj", inputs=width, outputs=inner, bias=bias),
        down=Linear(name="mlp.down_proj", inputs=inner, outputs=width, bias=bias),
        style="plain",
    )
    made = layer(attention(config), dense, width)
    names = ("input_layernorm", "post_attention_layernorm")
    both = tuple(  # a norm has a bias, too
        replace(one, norm=norm(name, 2 * width))
        for one, name in zip(made.blocks, names, strict=True)
    )
    model = decoder(config, [Layer(blocks=both)] * int(config["num_hidden_layers"]))
    return replace(model, final=(norm("model.norm", 2 * width),))


def ernie_vl(config: Config) -> Model:
    """ERNIE 4.5 VL: after the first layer a mixture for text, with shared experts, and a smaller
    one for images (vLLM 0.24.0 ernie45_vl_moe.py)."""
    width, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    sizes, count = config["moe_intermediate_size"], config["moe_num_experts"]
    number = int(count[0] if isinstance(count, list) else count)
    shared = int(config.get("moe_num_shared_experts") or 0) * int(sizes[0])
    both = [
        MoE(
            name=f"mlp.{name}",
            experts=number,
            active=int(config["moe_k"]),
            inputs=width,
            width=int(size),
            correction_bias=True,
            router_format="float32",
            shared=gated(width, shared, "mlp.shared_experts") if shared and not index else None,
        )
        for index, (name, size) in enumerate(zip(("text_moe", "vision_moe"), sizes, strict=True))
    ]
    full = attention(config)
    dense = layer(full, gated(width, inner), width)
    mixed = layer(full, both[0], width)
    mixed = Layer(blocks=(*mixed.blocks, Block(norm=None, mixer=both[1])))
    layers = int(config["num_hidden_layers"])
    kinds = config.get("mlp_layer_types")
    if kinds is None:  # as Baidu's own code has it
        start = config["moe_layer_start_index"]
        first = int(min(start) if isinstance(start, list) else start)
        kinds = ["dense"] * first + ["sparse"] * (layers - first)
    return decoder(config, [mixed if kind == "sparse" else dense for kind in kinds])


def mimo_v2(config: Config) -> Model:
    """MiMo-V2: windows with heads of their own and sinks, values smaller than keys, mixtures
    without shared experts (vLLM 0.24.0 mimo_v2.py)."""
    width = int(config["hidden_size"])
    experts = MoE(
        name="mlp",
        experts=int(config["n_routed_experts"]),
        active=int(config["num_experts_per_tok"]),
        inputs=width,
        width=int(config["moe_intermediate_size"]),
        correction_bias=True,
        router_format="float32",
    )
    dense = gated(width, int(config["intermediate_size"]))
    near = replace(
        uneven(config, "swa_"),
        window=int(config["sliding_window_size"]),
        sinks=bool(config.get("add_swa_attention_sink_bias")),
    )
    full = uneven(config, "")
    made = {
        (window, mixed): layer(near if window else full, experts if mixed else dense, width)
        for window in (0, 1)
        for mixed in (0, 1)
    }
    kinds = zip(config["hybrid_layer_pattern"], config["moe_layer_freq"], strict=True)
    return decoder(config, [made[bool(window), bool(mixed)] for window, mixed in kinds])


def minimax_m3(config: Config) -> Model:
    """MiniMax-M3: after the first layers a mixture with a shared expert, and attention to blocks
    of tokens that small heads pick (vLLM models/minimax_m3, SGLang 0.5.18 minimax_m3.py)."""
    width = int(config["hidden_size"])
    inner = int(config["intermediate_size"])
    shared = int(config.get("n_shared_experts") or 0) * int(config["shared_intermediate_size"])
    experts = MoE(
        name="block_sparse_moe",
        experts=int(config["num_local_experts"]),
        active=int(config["num_experts_per_tok"]),
        inputs=width,
        width=inner,
        correction_bias=bool(config.get("use_routing_bias")),
        router_format="float32",
        shared=gated(width, shared, "block_sparse_moe.shared_experts") if shared else None,
    )
    dense = gated(width, int(config["dense_intermediate_size"]))
    full = attention(config, normed=True)
    sparse = picking(config, full)
    made = {
        (picked, mixed): layer(sparse if picked else full, experts if mixed else dense, width)
        for picked in (0, 1)
        for mixed in (0, 1)
    }
    picked = config["sparse_attention_config"]["sparse_attention_freq"]
    kinds = zip(picked, config["moe_layer_freq"], strict=True)
    return decoder(config, [made[bool(picked), bool(mixed)] for picked, mixed in kinds])


def picking(config: Config, full: Attention) -> Picking:
    """The same attention with the small heads beside it."""
    inner, width, name = config["sparse_attention_config"], int(config["hidden_size"]), "self_attn"
    size, heads = int(inner["sparse_index_dim"]), int(inner["sparse_num_index_heads"])
    return Picking(
        **{one.name: getattr(full, one.name) for one in fields(full)},
        queries=Linear(name=f"{name}.index_q_proj", inputs=width, outputs=heads * size),
        key=Linear(name=f"{name}.index_k_proj", inputs=width, outputs=size),
        query_norm=norm(f"{name}.index_q_norm", size),
        key_norm=norm(f"{name}.index_k_norm", size),
        index=size,
    )


def uneven(config: Config, prefix: str) -> Uneven:
    """Attention whose sizes have this prefix."""
    heads, pairs, size, value = (
        int(config[f"{prefix}{name}"])
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
    )
    width, name = int(config["hidden_size"]), "self_attn"
    parts = (("q", heads * size), ("k", pairs * size), ("v", pairs * value))
    return Uneven(
        name=name,
        heads=heads,
        kv_heads=pairs,
        head=size,
        value=value,
        project=tuple(
            Linear(name=f"{name}.{one}_proj", inputs=width, outputs=outputs)
            for one, outputs in parts
        ),
        out=Linear(name=f"{name}.o_proj", inputs=heads * value, outputs=width),
        rotary=int(size * float(config.get("partial_rotary_factor") or 1)),
    )


MORE: dict[str, Callable[[Config], Model]] = {
    "llama4_text": llama4,
    "dbrx": dbrx,
    "hunyuan_v1_moe": hunyuan,
    "baichuan": baichuan,
    "jais2": jais2,
    "ernie4_5_vl_moe_text": ernie_vl,
    "ernie4_5_moe_vl": ernie_vl,
    "mimo_v2_flash": mimo_v2,
    "minimax_m3": minimax_m3,
    "minimax_m3_vl": minimax_m3,
}

__all__ = ["MORE"]
