"""DeepSpeed's ZeRO in the table of layouts: its own engine, where it is installed, beside the
formulas."""

from __future__ import annotations

from typing import Any

FULL: dict[str, Any] = {"checkpointing": "full"}
SMALL, EARLY = "reduce-bucket=600000", "persistence=0,prefetch-bucket=0,max-reuse=0"
LORA: dict[str, Any] = {"method": "lora"}
SHORT: dict[str, Any] = {"optimizer": "sgd", "batch": 1, "seq": 64}

ZERO: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", f"zero=4,stage=2,{SMALL}", {}),
    ("llama", f"zero=4,stage=2,overlap,{SMALL}", {"precision": "autocast-bf16"}),
    ("llama", f"zero=4,stage=2,contiguous=no,{SMALL}", {"optimizer": "adamw_fused"}),
    ("qwen2", f"zero=3,stage=2,round-robin,{SMALL}", FULL),
    ("gpt2", f"zero=4,stage=2,{SMALL}", {"accumulate": 2}),
    ("llama", f"zero=4,stage=1,{SMALL}", {"precision": "bf16-master"}),
    ("llama", f"zero=4,stage=1,overlap,{SMALL}", {"accumulate": 2}),
    ("llama", "zero=4,stage=2,reduce-bucket=50000", LORA | FULL),
    ("llama", f"zero=4,stage=2,{SMALL}", {"precision": "fp32"}),
    ("llama", f"zero=4,stage=2,{SMALL}", {"optimizer": "sgd", "precision": "fp16"}),
    ("llama", f"zero=4,stage=2,{SMALL},offload-optimizer=cpu", {}),
    ("llama", f"zero=4,stage=1,{SMALL},offload-optimizer=cpu", {"accumulate": 2, "clip": 1.0}),
    ("llama", f"zero=1,stage=2,{SMALL}", FULL),
    ("llama", f"zero=4,stage=2,{SMALL}", {"method": "qlora"} | FULL),
    ("llama", f"zero=4,stage=2,{SMALL}", FULL | {"reentrant": True}),
    ("qwen2", f"zero=4,stage=2,{SMALL}", {"optimizer": "adamw_8bit", "seq": 256}),
    ("mixtral", f"zero=64,stage=2,{SMALL}", FULL),
    ("llama", f"zero=4,stage=3,{SMALL},{EARLY}", {}),
    ("llama", f"zero=4,stage=3,{SMALL}", {"evaluate": True}),
    ("llama", "zero=4,stage=3,auto", FULL),
    ("gpt2", f"zero=4,stage=3,{SMALL},persistence=1000,prefetch-bucket=0,max-reuse=0", {}),
    ("llama", f"zero=4,stage=3,{SMALL},{EARLY}", {"precision": "fp32"}),
    ("qwen2", f"zero=4,stage=3,{SMALL},{EARLY}", FULL | {"accumulate": 2}),
    ("llama", f"zero=4,stage=3,{SMALL},{EARLY},contiguous=no,sub-group=600000", {"clip": 1.0}),
    (
        "llama",
        f"zero=4,stage=3,{SMALL},persistence=0,max-reuse=0,prefetch-bucket=300000,max-live=1500000",
        {},
    ),
    ("llama", f"zero=4,stage=3,reduce-bucket=50000,{EARLY}", LORA | FULL),
    ("llama", f"zero=4,stage=3,{SMALL},hpz=2", {}),
    ("llama", f"zero=8,stage=3,{SMALL},{EARLY},hpz=2", FULL),
    ("qwen2", f"zero=64,stage=3,{SMALL},hpz=8", {"optimizer": "adafactor"}),
    ("llama", f"zero=4,stage=3,{SMALL},{EARLY},qwz", {}),
    ("llama", f"zero=4,stage=3,{SMALL},qwz", FULL),
    ("llama", f"zero=4,stage=3,{SMALL},qwz,hpz=2", {"precision": "fp16"}),
    ("llama", f"zero=4,stage=3,{SMALL},{EARLY},offload-optimizer=nvme", FULL | {"accumulate": 2}),
    (
        "llama",
        f"zero=4,stage=3,{SMALL},{EARLY},sub-group=600000,offload-optimizer=nvme,offload-param=nvme",
        {},
    ),
    ("llama", f"zero=4,stage=3,{SMALL},{EARLY},offload-optimizer=cpu", {}),
    ("llama", f"zero=4,stage=2,{SMALL},overlap,offload-optimizer=cpu", FULL),
    (
        "llama",
        f"zero=4,stage=3,reduce-bucket=50000,{EARLY},offload-optimizer=nvme,offload-param=nvme",
        FULL,
    ),
    ("llama", f"zero=4,stage=3,{SMALL},{EARLY},offload-optimizer=cpu,offload-param=cpu", FULL),
    ("mixtral", f"zero=4,stage=3,{SMALL}", FULL),
    # Where a partition ends within a feed-forward, which of its matrices are cut decides.
    ("mistral", f"zero=4,stage=2,{SMALL},offload-optimizer=cpu", SHORT),
    ("mistral", f"zero=4,stage=1,{SMALL},overlap", SHORT),
    ("mistral", f"zero=5,stage=2,{SMALL},contiguous=no", SHORT),
    ("mistral", "zero=8,stage=2,reduce-bucket=50000", SHORT),
)

# Heads that multiply by the head's weight themselves, so that no hook of its module gathers it;
# without logits the peak is in a layer's backward.
TRL, LIGER = {"framework": "trl"}, {"loss": "liger"}
ZERO_HEADS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("zero trl", "llama", f"zero=4,stage=3,{SMALL},{EARLY}", TRL),
    ("zero trl", "qwen2", f"zero=4,stage=3,{SMALL},{EARLY}", TRL | FULL),
    ("zero trl", "llama", "zero=4,stage=3,auto", TRL | LORA | FULL),
    ("zero trl", "qwen2", f"zero=2,stage=3,{SMALL}", TRL | {"accumulate": 2}),
    ("zero trl", "llama", f"zero=4,stage=2,{SMALL}", TRL | FULL),
    ("zero liger_kernel", "llama", f"zero=4,stage=3,{SMALL},{EARLY}", LIGER),
    ("zero liger_kernel", "qwen2", f"zero=4,stage=3,{SMALL},{EARLY}", LIGER | FULL),
    ("zero liger_kernel", "llama", f"zero=4,stage=3,{SMALL}", LIGER | FULL),
    ("zero liger_kernel", "gpt2", f"zero=4,stage=3,{SMALL},{EARLY}", FULL),
    (
        "zero liger_kernel",
        "qwen2",
        f"zero=4,stage=3,{SMALL},{EARLY}",
        LIGER | FULL | {"reentrant": True},
    ),
)

__all__ = ["ZERO", "ZERO_HEADS"]
