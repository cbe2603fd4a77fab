"""Rows of the table of layouts whose experts are spread over ranks by transformers' own plan, on
small models of families that have one."""

from __future__ import annotations

from typing import Any

EXPERTS: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2000,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
}
SPREADABLE: dict[str, dict[str, Any]] = {
    name: {**EXPERTS, "model_type": name, **more}
    for name, more in {
        "qwen3_moe": {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
        },
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "gpt_oss": {
            "head_dim": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "intermediate_size": 128,
        },
        "qwen2_moe": {
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 96,
        },
        "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96},
        "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96},
        "phimoe": {"num_local_experts": 8},
        "minimax_m2": {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "intermediate_size": 96,
        },
        "deepseek_v2": {**LATENT, "topk_method": "greedy"},
        "deepseek_v3": {**LATENT, "n_group": 2, "topk_group": 1},
    }.items()
}
MIXED = "param-dtype=bf16,reduce-dtype=fp32"
FULL: dict[str, Any] = {"checkpointing": "full"}
OLD: dict[str, Any] = FULL | {"reentrant": True}
AUTO: dict[str, Any] = {"precision": "autocast-bf16"}
AUTO16: dict[str, Any] = {"precision": "bf16-autocast"}
LORA: dict[str, Any] = {"method": "lora", "targets": "q_proj,k_proj,v_proj,o_proj"}
QLORA: dict[str, Any] = {"method": "qlora", "targets": "q_proj,v_proj", "prepare_kbit": False}
TWICE: dict[str, Any] = {"accumulate": 2}

EP: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("qwen3_moe", "fsdp=4 ep=4", {}),
    ("qwen3_moe", "fsdp=4 ep=2", {}),
    ("qwen3_moe", "fsdp=8 ep=2", FULL | {"seq": 256}),
    ("qwen3_moe", f"fsdp=4,{MIXED} ep=2", {"precision": "fp32"}),
    ("qwen3_moe", "fsdp=2 ep=2", AUTO),
    ("qwen3_moe", "fsdp=4 ep=4", OLD | AUTO16),
    ("qwen3_moe", "fsdp=2 ddp=2 ep=2", {"optimizer": "sgd"}),
    ("qwen3_moe", "fsdp=4 ep=2,imbalance=1.5", FULL),
    ("mixtral", "fsdp=4 ep=4", TWICE),
    ("mixtral", "fsdp=4,reshard=no ep=2", AUTO | FULL),
    ("gpt_oss", "fsdp=4 ep=4", {"attention": "eager"}),
    ("gpt_oss", "fsdp=4 ep=2", FULL | {"attention": "eager"}),
    ("qwen2_moe", "fsdp=4 ep=4", {}),
    ("qwen2_moe", "fsdp=4,wrap=layers ep=2", FULL),
    ("deepseek_v2", "fsdp=4 ep=2", FULL),
    ("deepseek_v3", "fsdp=4 ep=4", {}),
    ("qwen3_moe", "fsdp=4 ep=2", LORA),
    ("mixtral", "fsdp=4 ep=4", LORA | FULL),
    ("qwen3_moe", "fsdp=4 ep=4", {"clip": 1.0, "optimizer": "adamw_fused"}),
    ("qwen3_moe", "fsdp=4,offload ep=2", FULL),
    ("mixtral", "fsdp=2,sync=no ep=2", TWICE),
    ("qwen3_moe", "fsdp=4 ep=4", {"evaluate": True}),
    ("olmoe", "fsdp=2 ep=2", FULL),
    ("granitemoe", "fsdp=4 ep=4", {}),
    ("phimoe", "fsdp=4 ep=2", FULL),
    ("minimax_m2", "fsdp=2 ep=2", {}),
    ("mixtral", "tp=2 ep=2,tensor=1", {"seq": 512}),
    ("qwen3_moe", "tp=2 fsdp=2 ep=4,tensor=1", FULL),
    ("mixtral", "tp=2 fsdp=4 ep=4,tensor=1", AUTO | FULL),
    ("qwen3_moe", "tp=2 fsdp=4 ep=2,tensor=1", OLD | AUTO16),
    ("qwen3_moe", "tp=2 ep=2,tensor=1", LORA | {"targets": "q_proj,v_proj"}),
    ("qwen3_moe", "fsdp=4 ep=4", QLORA | FULL),
    ("mixtral", "fsdp=4 ep=2", QLORA),
    ("qwen3_moe", "fsdp=4 ep=4,imbalance=2", {"seq": 1024}),
)
# Their loss fused with the head.
EP_FUSED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("qwen3_moe", "fsdp=4 ep=4", FULL | {"loss": "liger"}),
    ("mixtral", "fsdp=4 ep=2", {"loss": "liger"}),
)
