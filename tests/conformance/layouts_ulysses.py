"""DeepSpeed's Ulysses attention beside ZeRO in the table of layouts, as accelerate and the Trainer
have it."""

from __future__ import annotations

from typing import Any

FULL: dict[str, Any] = {"checkpointing": "full"}
LORA: dict[str, Any] = {"method": "lora", "targets": "q_proj,k_proj,v_proj,o_proj"}
SMALL, HEADS = "reduce-bucket=600000", "style=ulysses"

ULYSSES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", f"cp=2,{HEADS} zero=2,stage=3,{SMALL}", {}),
    ("llama", f"cp=4,{HEADS} zero=1,stage=3,{SMALL},persistence=0", FULL),
    ("mistral", f"cp=2,{HEADS} zero=2,stage=3,auto", {}),
    ("mistral", f"cp=4,{HEADS} zero=1,stage=3,{SMALL}", {"batch": 1, "seq": 1024}),
    ("llama", f"cp=8,{HEADS} zero=1,stage=3,{SMALL}", {"seq": 256, "batch": 3}),
    ("qwen2", f"cp=2,{HEADS} zero=2,stage=3,{SMALL}", FULL | {"accumulate": 2}),
    ("llama", f"cp=2,{HEADS} zero=2,stage=3,{SMALL}", LORA | FULL | {"seq": 512}),
    ("llama", f"cp=2,{HEADS} zero=2,stage=3,{SMALL}", {"precision": "fp32"}),
    ("qwen2", f"cp=2,{HEADS} zero=2,stage=3,{SMALL}", FULL | {"reentrant": True}),
    ("llama", f"cp=2,{HEADS} zero=2,stage=3,{SMALL},offload-optimizer=cpu", {"clip": 1.0}),
    (
        "llama",
        f"cp=2,{HEADS} zero=2,stage=3,reduce-bucket=50000,contiguous=no",
        {"optimizer": "sgd"},
    ),
    ("llama", f"cp=2,{HEADS} zero=2,stage=2,{SMALL}", {}),
    ("qwen2", f"cp=2,{HEADS} zero=1,stage=1,{SMALL}", {"batch": 1}),
    ("mistral", f"cp=4,{HEADS} zero=2,stage=2,{SMALL}", FULL),
    ("llama", f"cp=2,{HEADS} zero=2,stage=2,{SMALL},overlap", LORA),
    ("llama", f"cp=2,{HEADS} zero=2,stage=2,{SMALL}", {"method": "qlora"} | FULL),
)

__all__ = ["ULYSSES"]
