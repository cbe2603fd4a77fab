"""Activations on the host beside every engine, in the table of layouts: TRL's hooks, torch's
wrapper around each layer and its hooks around the step."""

from __future__ import annotations

from typing import Any

FULL: dict[str, Any] = {"checkpointing": "full"}
OLD = FULL | {"reentrant": True}
LORA: dict[str, Any] = {"method": "lora"}
QLORA: dict[str, Any] = {"method": "qlora"}
TWICE: dict[str, Any] = {"accumulate": 2}
AUTO: dict[str, Any] = {"precision": "autocast-bf16"}
TRL: dict[str, Any] = {"framework": "trl", "activation_offload": "streams"}
LAYERS: dict[str, Any] = {"activation_offload": "wrapper"}
ALL: dict[str, Any] = {"activation_offload": "all"}
SMALL = "reduce-bucket=600000,allgather-bucket=600000"

AWAY: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("trl", "llama", "ddp=4", TRL | AUTO),
    ("ddp", "gpt2", "ddp=2,bucket-view", ALL | FULL),
    ("ddp", "llama", "ddp=2", LAYERS | QLORA),
    ("trl", "llama", "fsdp=4", TRL),
    ("trl", "qwen2", "fsdp=8,wrap=layers", TRL | FULL | LORA),
    ("trl", "gpt2", "fsdp=2", TRL),
    ("trl", "gpt2", "ddp=2", TRL | AUTO),
    ("trl", "gpt2", "ddp=2", TRL | AUTO | LORA),
    ("trl", "llama", "fsdp=2 ddp=2", TRL | AUTO | FULL | TWICE),
    ("trl", "mistral", "fsdp=2,reshard=no", TRL | OLD),
    ("trl", "qwen2", "fsdp=3", TRL | QLORA),
    ("trl", "llama", "fsdp=2,offload", TRL | FULL),
    ("fsdp2", "mixtral", "fsdp=4", LAYERS),
    ("fsdp2", "llama", "fsdp=4,reshard-to=2", ALL | LORA),
    ("fsdp2", "qwen2", "fsdp=2,offload ddp=2", LAYERS | FULL | {"evaluate": True}),
    ("fsdp2", "llama", "fsdp=8,prefetch=2", LAYERS),
    ("trl", "llama", "fsdp=4,version=1", TRL | FULL),
    ("trl", "qwen2", "fsdp=2,version=1", TRL | LORA | AUTO),
    ("trl", "gpt2", "fsdp=2,version=1", TRL | AUTO),
    ("fsdp1", "mistral", "fsdp=2,version=1 ddp=2", LAYERS),
    ("fsdp1", "llama", "fsdp=4,version=1,orig-params=no", ALL | OLD),
    ("fsdp1", "llama", "fsdp=2,version=1,offload", LAYERS | FULL),
    ("trl zero", "llama", f"zero=4,stage=3,{SMALL}", TRL),
    (
        "trl zero",
        "qwen2",
        f"zero=2,stage=3,{SMALL},offload-param=cpu,offload-optimizer=cpu",
        TRL | FULL,
    ),
    ("trl zero", "llama", f"zero=2,stage=2,{SMALL}", TRL | LORA),
    ("trl zero", "llama", f"zero=4,stage=2,{SMALL},offload-optimizer=cpu", TRL | FULL),
    ("trl zero", "mixtral", f"zero=2,stage=3,{SMALL}", TRL),
    ("trl zero", "llama", f"zero=2,stage=3,{SMALL}", TRL | {"attention": "eager"}),
    ("trl zero", "mistral", f"zero=2,stage=1,{SMALL}", TRL | FULL),
    ("trl zero", "qwen2", f"zero=4,stage=1,{SMALL}", TRL | AUTO),
    ("zero", "llama", f"zero=3,stage=3,{SMALL},persistence=0", LAYERS),
    ("zero", "gpt2", f"zero=2,stage=1,{SMALL}", ALL | FULL),
    ("zero", "llama", f"zero=2,stage=3,{SMALL}", ALL | LORA),
    ("zero", "llama", f"cp=2,style=ulysses zero=2,stage=2,{SMALL}", LAYERS),
    ("zero", "llama", f"zero=2,stage=2,{SMALL}", LAYERS | QLORA),
    ("tp", "llama", "tp=2", LAYERS | FULL),
    ("tp", "qwen3", "tp=2,sequence fsdp=2", LAYERS | FULL),
    ("cp", "llama", "cp=2 fsdp=2", LAYERS | FULL),
    ("cp", "qwen2", "cp=2 fsdp=2", ALL | FULL),
    ("pp", "llama", "pp=2", LAYERS),
    ("pp", "mistral", "pp=3,schedule=interleaved,virtual=2 fsdp=2", LAYERS | FULL),
    ("pp", "llama", "pp=2,schedule=gpipe,micro-batches=4", ALL),
    ("ep", "mixtral", "fsdp=4 ep=2", LAYERS | FULL),
)

__all__ = ["AWAY"]
