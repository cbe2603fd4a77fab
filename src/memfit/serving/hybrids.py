"""Outlines of models with state-space layers or short convolutions: Mamba 1 and 2, Jamba, Bamba,
Granite 4, Nemotron-H, LFM2.

Parameter names and sizes are those of transformers 5.23 (modeling_mamba.py, modeling_mamba2.py,
modeling_jamba.py, modeling_bamba.py, modeling_granitemoehybrid.py, modeling_nemotron_h.py,
modeling_lfm2.py); what a request keeps is as in vLLM 0.12.0
(`model_executor/layers/mamba/mamba_utils.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from memfit.model.model import Model
from memfit.model.modules import MLP, Attention, Block, Layer, Linear, MoE
from memfit.serving.parts import Recurrent, decoder, gated, heads_of, layer, norm

Config = Mapping[str, Any]
LETTERS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}  # nemotron_h


def whole(config: Config, key: str, default: int = 0) -> int:
    """An integer of a config; a missing key without a default is an error of the caller."""
    value = config.get(key)
    return int(config[key]) if value is None and not default else int(value or default)


def attention(config: Config, size: int = 0) -> Attention:
    """Attention without norms on queries and keys."""
    heads = whole(config, "num_attention_heads")
    size = size or int(config.get("head_dim") or whole(config, "hidden_size") // heads)
    made = heads_of(config, heads, whole(config, "num_key_value_heads", heads), size)
    return replace(made, q_norm=None, k_norm=None)


def mamba_one(config: Config, inner: int, state: int, steps: int, kernel: int) -> Recurrent:
    """Mamba 1: a state of `state` numbers for each of `inner` channels. `x_proj` is split by its
    inputs, which takes the same bytes as a split by its outputs."""
    width = whole(config, "hidden_size")
    name = "mixer"
    return Recurrent(
        name=name,
        columns=(
            Linear(name=f"{name}.in_proj", inputs=width, outputs=2 * inner),
            Linear(name=f"{name}.x_proj", inputs=inner, outputs=steps + 2 * state),
            Linear(name=f"{name}.dt_proj", inputs=steps, outputs=inner, bias=True),
        ),
        out=Linear(name=f"{name}.out_proj", inputs=inner, outputs=width),
        conv=inner * (kernel - 1),
        state=inner * state,
        vectors=inner * state + 2 * inner,
        kernel=inner * kernel,
    )


def mamba_two(
    config: Config, heads: int, head: int, state: int, groups: int, kernel: int
) -> Recurrent:
    """Mamba 2: a state of `state` numbers for each channel of each head."""
    width, inner = whole(config, "hidden_size"), heads * head
    mixed = inner + 2 * groups * state
    name = "mixer"
    return Recurrent(
        name=name,
        columns=(Linear(name=f"{name}.in_proj", inputs=width, outputs=inner + mixed + heads),),
        out=Linear(name=f"{name}.out_proj", inputs=inner, outputs=width),
        conv=mixed * (kernel - 1),
        state=inner * state,
        vectors=3 * heads + inner + mixed,
        kernel=mixed * kernel,
    )


def alone(mixer: Any, width: int) -> Layer:
    """A layer of one mixer."""
    return Layer(blocks=(Block(norm=norm("norm", width), mixer=mixer),))


def mamba(config: Config) -> Model:
    """Mamba and Falcon-Mamba."""
    width, count = whole(config, "hidden_size"), whole(config, "num_hidden_layers")
    inner = whole(config, "intermediate_size", whole(config, "expand", 2) * width)
    rank = config.get("time_step_rank")
    steps = int(rank) if isinstance(rank, int) else -(-width // 16)
    mixer = mamba_one(config, inner, whole(config, "state_size"), steps, conv_of(config))
    return decoder(config, [alone(mixer, width)] * count)


def mamba2(config: Config) -> Model:
    width, count = whole(config, "hidden_size"), whole(config, "num_hidden_layers")
    mixer = mamba_two(
        config,
        whole(config, "num_heads"),
        whole(config, "head_dim"),
        whole(config, "state_size"),
        whole(config, "n_groups", 1),
        conv_of(config),
    )
    return decoder(config, [alone(mixer, width)] * count)


def conv_of(config: Config) -> int:
    """Taps of the convolution."""
    return whole(config, "conv_kernel", 4)


def jamba(config: Config) -> Model:
    """Jamba: Mamba 1, every so many layers attention, every other feed-forward a mixture."""
    width, count = whole(config, "hidden_size"), whole(config, "num_hidden_layers")
    state, steps = whole(config, "mamba_d_state"), whole(config, "mamba_dt_rank")
    inner = whole(config, "mamba_expand", 2) * width
    first = mamba_one(config, inner, state, steps, whole(config, "mamba_d_conv", 4))
    first = replace(first, vectors=first.vectors + steps + 2 * state)  # norms of dt, B and C
    full = attention(config)
    dense = gated(width, whole(config, "intermediate_size"))
    experts = MoE(
        name="feed_forward",
        experts=whole(config, "num_experts"),
        active=whole(config, "num_experts_per_tok"),
        inputs=width,
        width=whole(config, "intermediate_size"),
    )
    return decoder(
        config,
        [
            layer(
                full if hits(config, "attn_layer", index) else first,
                experts if hits(config, "expert_layer", index) else dense,
                width,
            )
            for index in range(count)
        ],
    )


def hits(config: Config, name: str, index: int) -> bool:
    """Whether a layer is one of every `NAME_period`, from `NAME_offset` on."""
    return index % whole(config, f"{name}_period") == int(config[f"{name}_offset"])


def bamba(config: Config) -> Model:
    """Bamba: Mamba 2, a few layers of attention, a dense feed-forward in all."""
    width, count = whole(config, "hidden_size"), whole(config, "num_hidden_layers")
    dense = gated(width, whole(config, "intermediate_size"), "feed_forward")
    state, full = granite_state(config), attention(config)
    places = config.get("attn_layer_indices") or ()
    return decoder(
        config, [layer(full if index in places else state, dense, width) for index in range(count)]
    )


def granite_state(config: Config) -> Recurrent:
    return mamba_two(
        config,
        whole(config, "mamba_n_heads"),
        whole(config, "mamba_d_head"),
        whole(config, "mamba_d_state"),
        whole(config, "mamba_n_groups", 1),
        whole(config, "mamba_d_conv", 4),
    )


def granite_hybrid(config: Config) -> Model:
    """Granite 4: Mamba 2 or attention, then a shared feed-forward and, in some, experts."""
    width, count = whole(config, "hidden_size"), whole(config, "num_hidden_layers")
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["attention"] * count
    shared = gated(width, whole(config, "shared_intermediate_size"), "shared_mlp")
    experts = int(config.get("num_local_experts") or 0)
    second: MLP | MoE = shared
    if experts:
        second = MoE(
            name="block_sparse_moe",
            experts=experts,
            active=whole(config, "num_experts_per_tok"),
            inputs=width,
            width=whole(config, "intermediate_size"),
            shared=shared,
        )
    full, state = attention(config), granite_state(config)
    return decoder(
        config,
        [layer(state if kind == "mamba" else full, second, width) for kind in kinds[:count]],
    )


def plain(width: int, inner: int, name: str) -> MLP:
    """A feed-forward without a gate."""
    return MLP(
        name=name,
        up=Linear(name=f"{name}.up_proj", inputs=width, outputs=inner),
        down=Linear(name=f"{name}.down_proj", inputs=inner, outputs=width),
        style="plain",
    )


def nemotron_h(config: Config) -> Model:
    """Nemotron-H and Nemotron 3: layers of one mixer each, in the order of a pattern."""
    width, inner = whole(config, "hidden_size"), int(config.get("intermediate_size") or 0)
    pattern = config.get("hybrid_override_pattern")
    listed = config.get("layers_block_type") or [LETTERS[one] for one in str(pattern)]
    made = {
        "mamba": alone(nemotron_state(config), width),
        "attention": alone(attention(config, int(config.get("attention_head_dim") or 0)), width),
        "mlp": alone(plain(width, inner, "mixer"), width),
        "moe": nemotron_experts(config, width) if "moe" in listed else Layer(),
    }
    return decoder(config, [made[kind] for kind in listed])


def nemotron_state(config: Config) -> Recurrent:
    return mamba_two(
        config,
        whole(config, "mamba_num_heads"),
        whole(config, "mamba_head_dim"),
        whole(config, "ssm_state_size"),
        whole(config, "n_groups", 1),
        conv_of(config),
    )


def nemotron_experts(config: Config, width: int) -> Layer:
    """Experts without gates, each token's scores corrected by a bias, beside a shared one. In some
    models the experts work on fewer values (`moe_latent_size`), and two matrices lead there and
    back."""
    experts, latent = whole(config, "n_routed_experts"), int(config.get("moe_latent_size") or 0)
    inner = whole(config, "moe_intermediate_size")
    shared = int(config.get("moe_shared_expert_intermediate_size") or 0)
    mixer = MoE(
        name="mixer",
        experts=experts,
        active=whole(config, "num_experts_per_tok"),
        inputs=latent or width,
        width=inner,
        gate=Linear(name="mixer.gate", inputs=width, outputs=experts),
        each=tuple(
            plain(latent or width, inner, f"mixer.experts.{index}") for index in range(experts)
        ),
        shared=plain(width, shared, "mixer.shared_experts") if shared else None,
        correction_bias=True,
    )
    made = alone(mixer, width)
    if not latent:
        return made
    there = Block(norm=None, mixer=plain(width, latent, "mixer.latent"))
    return replace(made, blocks=(*made.blocks, there))


def lfm2(config: Config) -> Model:
    """LFM2: gated short convolutions, and attention with norms on queries and keys."""
    width, count = whole(config, "hidden_size"), whole(config, "num_hidden_layers")
    inner = whole(config, "intermediate_size")
    if config.get("block_auto_adjust_ff_dim", True):  # modeling_lfm2.py Lfm2MLP
        step = whole(config, "block_multiple_of", 256)
        inner = int(float(config.get("block_ffn_dim_multiplier") or 1.0) * int(2 * inner / 3))
        inner = step * -(-inner // step)
    heads, taps = whole(config, "num_attention_heads"), whole(config, "conv_L_cache", 3)
    full = heads_of(config, heads, whole(config, "num_key_value_heads", heads), width // heads)
    short = Recurrent(
        name="conv",
        columns=(Linear(name="conv.in_proj", inputs=width, outputs=3 * width),),
        out=Linear(name="conv.out_proj", inputs=width, outputs=width),
        conv=width * (taps - 1),
        state=0,
        kernel=width * taps,
    )
    places = config.get("full_attn_idxs") or ()
    kinds = config.get("layer_types") or [
        "full_attention" if index in places else "conv" for index in range(count)
    ]
    dense = gated(width, inner, "feed_forward")
    return decoder(
        {"tie_word_embeddings": True, **config},
        [layer(full if kind == "full_attention" else short, dense, width) for kind in kinds],
    )


HYBRIDS: dict[str, Callable[[Config], Model]] = {
    "mamba": mamba,
    "falcon_mamba": mamba,
    "mamba2": mamba2,
    "jamba": jamba,
    "bamba": bamba,
    "granitemoehybrid": granite_hybrid,
    "nemotron_h": nemotron_h,
    "lfm2": lfm2,
}

__all__ = ["HYBRIDS"]
