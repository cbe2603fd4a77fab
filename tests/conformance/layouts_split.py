"""Rows of the table of layouts whose experts' matrices are shared by ranks of tensor parallelism,
by transformers' own plan, and answers of such ranks."""

from __future__ import annotations

from typing import Any

FULL: dict[str, Any] = {"checkpointing": "full"}
OLD: dict[str, Any] = FULL | {"reentrant": True}
AUTO: dict[str, Any] = {"precision": "autocast-bf16"}
LORA: dict[str, Any] = {"method": "lora", "targets": "q_proj,v_proj"}

SHARED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("mixtral", "tp=2", {"seq": 512}),
    ("qwen3_moe", "tp=2 fsdp=2", AUTO | FULL),
    ("qwen2_moe", "tp=2", OLD | {"optimizer": "sgd"}),
    ("deepseek_v2", "tp=2", {"seq": 512}),
    ("deepseek_v3", "tp=4", FULL | {"batch": 4}),
    ("granitemoe", "tp=2 fsdp=2,wrap=layers", {}),
    ("phimoe", "tp=2", FULL | {"seq": 256}),
    ("gpt_oss", "tp=2", {"attention": "eager"}),
    ("mixtral", "tp=2 fsdp=2", LORA | FULL),
    ("deepseek_v3", "tp=2 fsdp=2 ep=4,tensor=1", FULL),
    ("deepseek_v2", "tp=2 ep=2,tensor=1", {}),
    ("qwen2_moe", "tp=2 fsdp=4 ep=4,tensor=1", AUTO | FULL),
    ("gpt_oss", "tp=2 fsdp=2 ep=2,tensor=1", {"attention": "eager"}),
    ("olmoe", "tp=2", {}),
    ("olmoe", "tp=2 fsdp=2 ep=2,tensor=1", FULL),
    ("minimax_m2", "tp=4", AUTO | FULL),
    ("minimax_m2", "tp=2 fsdp=2", OLD | {"optimizer": "sgd"}),
)
# By inference: experts that ranks share, and experts that are spread over the same ranks.
ANSWERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("qwen3_moe", "tp=2", {"batch": 8, "seq": 256}),
    ("mixtral", "tp=2", {"seq": 512}),
    ("qwen2_moe", "tp=2", {"attention": "eager", "batch": 4}),
    ("deepseek_v2", "tp=4", {"batch": 8}),
    ("deepseek_v3", "tp=2", {"cache": "static"}),
    ("gpt_oss", "tp=2", {"attention": "eager"}),
    ("qwen3_moe", "tp=2 ep=2,tensor=1", {"batch": 8, "seq": 256}),
    ("mixtral", "tp=2 ep=2,tensor=1", {"precision": "fp16", "batch": 16}),
    ("deepseek_v3", "tp=4 ep=4,tensor=1", {"new_tokens": 0, "seq": 512}),
    ("gpt_oss", "tp=2 ep=2,tensor=1", {"attention": "eager", "batch": 4}),
    ("olmoe", "tp=4", {"batch": 8, "seq": 256}),
    ("minimax_m2", "tp=2", {"cache": "static"}),
    ("olmoe", "tp=2 ep=2,tensor=1", {"attention": "eager"}),
    ("olmo2", "tp=4", {"precision": "fp32", "batch": 4}),
    ("granitemoe", "tp=2 ep=2,tensor=1", {"beams": 2}),
    ("phimoe", "tp=2", {"precision": "fp32"}),
    ("qwen2_moe", "tp=2 ep=2,tensor=1", {"cache": "none"}),
)
