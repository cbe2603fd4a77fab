"""Fused losses, kernels and evaluations under layouts that cut sequences, matrices or experts, in
the table of layouts: what the engines run of them."""

from __future__ import annotations

from typing import Any

FULL: dict[str, Any] = {"checkpointing": "full"}
TRL: dict[str, Any] = {"framework": "trl"}
LIGER: dict[str, Any] = {"loss": "liger", "liger": True}
SPREAD: dict[str, Any] = {"method": "lora", "targets": "q_proj,v_proj"}
HEADS = "style=ulysses"
SMALL = "reduce-bucket=600000"
PACKED: dict[str, Any] = {
    "method": "qlora",
    "attention": "flash-attn-2",
}  # fp32 norms over packed weights: queries are cast for the package

FUSED: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("tp trl", "llama", "tp=2", TRL),
    ("tp trl", "llama-tied", "tp=2", TRL | FULL | SPREAD),
    ("tp trl", "qwen2", "tp=4 fsdp=2", TRL | {"precision": "autocast-bf16"}),
    ("tp trl", "qwen2-tied", "tp=2 fsdp=2,wrap=layers", TRL | {"evaluate": True}),
    ("tp liger_kernel", "llama", "tp=2", {"liger": True}),
    ("tp liger_kernel", "qwen3", "tp=2 fsdp=2", FULL | {"liger": True, "loss": "liger-ce"}),
    ("tp liger_kernel", "gemma", "tp=2", SPREAD | {"liger": True}),
    ("tp", "llama", "tp=2,sequence", {"evaluate": True}),
    ("cp trl", "llama", "cp=2 fsdp=2", TRL),
    ("cp trl", "qwen2", "cp=4,style=allgather fsdp=2", TRL | FULL | {"evaluate": True, "seq": 512}),
    ("cp trl", "llama-biased", "cp=2 fsdp=2", TRL | SPREAD | {"precision": "autocast-bf16"}),
    ("cp liger_kernel", "llama", "cp=2 fsdp=2", LIGER),
    ("cp", "llama", "cp=2 fsdp=2", {"evaluate": True, "checkpointing": "selective"}),
    ("zero trl", "llama", f"cp=2,{HEADS} zero=2,stage=3,{SMALL}", TRL),
    ("zero trl", "qwen2", f"cp=2,{HEADS} zero=2,stage=2,{SMALL}", TRL | FULL | {"evaluate": True}),
    (
        "zero liger_kernel",
        "llama",
        f"cp=2,{HEADS} zero=2,stage=3,{SMALL}",
        LIGER | FULL | {"attention": "flash-attn-2"},
    ),
    ("zero liger_kernel", "llama", f"cp=2,{HEADS} zero=2,stage=2,{SMALL}", LIGER | FULL | PACKED),
    ("zero", "llama", f"cp=2,{HEADS} zero=2,stage=3,{SMALL}", {"longest": 256}),
    ("ep trl", "mixtral", "fsdp=4 ep=2", TRL | FULL),
    ("tp", "llama-tied", "tp=2 fsdp=2", FULL | {"method": "freeze", "trainable": "layers.1."}),
    ("pp", "qwen3", "pp=2 fsdp=2", {"method": "freeze", "trainable": "norm"}),
    ("cp trl", "llama", "cp=2 fsdp=2", TRL | {"packing": False}),
    (
        "zero",
        "llama",
        f"cp=2,{HEADS} zero=2,stage=3,{SMALL}",
        {"packing": False, "evaluate": True, "checkpointing": "full"},
    ),
    (
        "zero",
        "qwen2",
        f"cp=2,{HEADS} zero=2,stage=2,{SMALL}",
        {"packing": False, "attention": "flash-attn-2"},
    ),
    ("fsdp2", "llama", "fsdp=2", PACKED),
    ("ddp", "llama", "ddp=2", PACKED | FULL | {"packing": False}),
)

__all__ = ["FUSED"]
