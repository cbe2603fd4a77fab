"""Small models of many architectures, written as GGUF files for llama.cpp itself to load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.serving.llamacpp.convert import converted
from memfit.serving.llamacpp.model import GgufModel

SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "intermediate_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
WIDE: dict[str, Any] = {
    **SMALL,
    "vocab_size": 3072,
    "hidden_size": 128,
    "num_hidden_layers": 5,
    "intermediate_size": 1536,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ROUTED = {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
LATENT = {
    **ROUTED,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
INDEXED = {
    **LATENT,
    "q_lora_rank": 24,
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 256,
    "num_nextn_predict_layers": 1,
    "num_hidden_layers": 5,
}
ENCODED = {"d_kv": 48, "num_key_value_heads": 4, "feed_forward_proj": "gated-gelu"}
NO_HEADS = {"hidden_size": 256, "num_attention_heads": 0, "num_key_value_heads": 0}
DELTA = {
    "head_dim": 64,
    "num_hidden_layers": 4,
    "linear_key_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
}
ALL_HEADS = {"num_key_value_heads": 4}


def searched(heads: int | None, factor: float | None, linear: bool = False) -> dict[str, Any]:
    """One entry of the `block_configs` of Nemotron's searched models."""
    attention = {"n_heads_in_group": heads, "replace_with_linear": linear}
    return {"attention": attention, "ffn": {"ffn_mult": factor}}


# What differs from SMALL, by `model_type`.
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "sliding_window": 64, "num_hidden_layers": 4},
    "gemma3_text": {"head_dim": 32, "sliding_window": 64, "num_hidden_layers": 7},
    "gemma3n_text": {
        "num_hidden_layers": 25,
        "head_dim": 32,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 5,
        "sliding_window": 64,
        "laurel_rank": 64,
        "hidden_size_per_layer_input": 256,
    },
    "gemma4": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 64,
        "head_dim": 32,
        "global_head_dim": 64,
        "num_global_key_value_heads": 2,
    },
    "phi3": ALL_HEADS,
    "starcoder2": {},
    "nemotron": {},
    "jais2": ALL_HEADS,
    "nemotron-nas": {
        "num_hidden_layers": 6,
        "block_configs": [
            searched(2, 2.625),
            searched(None, 1.0),
            searched(None, 1.0, linear=True),
            searched(None, None),
            searched(4, 5.25),
            searched(None, 0.5),
        ],
    },
    "mimo_v2_flash": {
        **EXPERTS,
        "num_hidden_layers": 6,
        "head_dim": 48,
        "v_head_dim": 32,
        "num_key_value_heads": 1,
        "swa_num_key_value_heads": 2,
        "sliding_window": 64,
        "hybrid_layer_pattern": [0, 1, 1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1, 1, 1],
        "attention_value_scale": 0.707,
        "add_swa_attention_sink_bias": True,
    },
    "step3p5": {
        "moe_num_experts": 8,
        "moe_top_k": 2,
        "moe_intermediate_size": 48,
        "share_expert_dim": 48,
        "num_hidden_layers": 6,
        "num_attention_groups": 2,
        "head_dim": 32,
        "sliding_window": 64,
        "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2},
        "layer_types": ["full_attention", *["sliding_attention"] * 2] * 2,
        "moe_layers_enum": "2,3,4,5",
        "num_nextn_predict_layers": 2,
    },
    "stablelm": {},
    "olmo": {},
    "olmo2": {},
    "exaone": {},
    "exaone4": {},
    "cohere": {},
    "cohere2": {"sliding_window": 64, "num_hidden_layers": 4},
    "glm": {},
    "glm4": {},
    "arcee": {},
    "seed_oss": {},
    "smollm3": {"num_hidden_layers": 5},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "granite": {
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 3.0,
        "attention_multiplier": 0.1,
    },
    "minicpm": {},
    "baichuan": {},
    "bert": {**ALL_HEADS, "type_vocab_size": 2},
    "nomic_bert": {**ALL_HEADS, "type_vocab_size": 2},
    "modernbert": {**ALL_HEADS, "num_hidden_layers": 5, "local_attention": 128},
    "phi": {},
    "qwen2_vl": {"hidden_size": 512, "head_dim": 128},
    "internlm2": {},
    "qwen": {**ALL_HEADS, "intermediate_size": 1280},
    "mistral3": {},
    "gpt2": {**ALL_HEADS, "n_positions": 1024},
    "gpt_bigcode": {"n_positions": 1024},
    "gpt_neox": ALL_HEADS,
    "bloom": ALL_HEADS,
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "t5": {**ENCODED, "feed_forward_proj": "relu"},
    "mt5": {**ENCODED, "tie_word_embeddings": False},
    "mixtral": LOCAL,
    "phimoe": LOCAL,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 112},
    "qwen3_moe": {**EXPERTS, "head_dim": 32},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, **ALL_HEADS},
    "granitemoe": {
        **LOCAL,
        "shared_intermediate_size": 56,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "logits_scaling": 3.0,
    },
    "gpt_oss": {**LOCAL, "head_dim": 32, "sliding_window": 64, "num_hidden_layers": 4},
    "deepseek": ROUTED,
    "deepseek_v3": {**LATENT, "q_lora_rank": 24, "n_group": 4, "topk_group": 2},
    "deepseek_v2": {**LATENT, "num_hidden_layers": 27},
    "deepseek_v32": {**INDEXED, "n_group": 4, "topk_group": 2},
    "glm_moe_dsa": {**INDEXED, "indexer_types": ["full", "full", "full", "shared", "shared"]},
    "glm4_moe": {**ROUTED, "num_nextn_predict_layers": 1},
    "dots1": {**ROUTED, **ALL_HEADS},
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 48,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "num_shared_expert": 1},
    "dbrx": {
        "d_model": 256,
        "n_heads": 4,
        "n_layers": 3,
        "attn_config": {"kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "grok-1": {"num_experts": 8, "num_experts_per_tok": 2},
    "mamba": {**NO_HEADS, "intermediate_size": 512, "state_size": 16},
    "falcon_mamba": {**NO_HEADS, "intermediate_size": 512, "state_size": 16},
    "mamba2": {**NO_HEADS, "num_heads": 8, "head_dim": 64, "state_size": 32, "n_groups": 2},
    "nemotron_h": {
        "hybrid_override_pattern": "M*EM*E",
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 32,
        "n_groups": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 96,
        "head_dim": 64,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba", "mamba", "attention"],
        "num_hidden_layers": 5,
        "hidden_size": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 32,
        "mamba_n_groups": 1,
        "shared_intermediate_size": 640,
        "position_embedding_type": "rope",
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "logits_scaling": 3.0,
    },
    "jamba": {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 8},
    "lfm2": {
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "num_hidden_layers": 4,
        "block_ff_dim": 960,
    },
    "qwen3_5": DELTA,
    "qwen3_5_moe": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64},
    "llama4": {
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 1280,
        "num_hidden_layers": 4,
    },
}
# Their mapped files would count what lies between tensors that are loaded.
PARTLY_LOADED = ("glm_moe_dsa", "step3p5")
EMBEDDERS = ("bert", "nomic_bert", "modernbert")
# llama-server stops once it has reserved their buffers, and before where slots have caches each.
ENCODERS = ("t5", "mt5")


def small(kind: str, base: dict[str, Any] = SMALL) -> GgufModel:
    """A model of one `model_type`, in 16 bits."""
    model = converted({**base, **CASES[kind], "model_type": kind}, kind, "F16")
    half = model.by_name["token_embd.weight"].type
    tensors = (
        replace(one, type=half) if one.type.name == "MXFP4" else one for one in model.tensors
    )
    return replace(model, tensors=tuple(tensors))


def write(model: GgufModel, path: Path) -> None:
    """The model as a GGUF file full of zeros, without a vocabulary."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, model.arch)
    for name, value in model.facts.items():
        key = name if name.startswith("tokenizer.") else f"{model.arch}.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    for tensor in model.tensors:
        kind = np.float32 if tensor.type.name == "float32" else np.float16
        writer.add_tensor(tensor.name, np.zeros(tensor.sizes[::-1], dtype=kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
