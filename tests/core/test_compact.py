"""What the formulas write compactly is what they write in full: same peak, same parts, same blocks, same moments."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.simulate.memory import memory
from memfit.tape import check

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 9, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
JOBS: tuple[dict[str, Any], ...] = (
    {},
    {"batch": 3, "seq": 77},
    {"checkpointing": "full"},
    {"method": "lora"},
    {"method": "lora", "checkpointing": "full", "reentrant": True},
    {"method": "qlora"},
    {"precision": "autocast-bf16"},
    {"precision": "fp32", "optimizer": "sgd"},
    {"accumulate": 3},
    {"optimizer": "adamw_fused"},
    {"optimizer": "adafactor"},
    {"evaluate": True},
    {"packing": False, "batch": 2},
    {"task": "inference"},
    {"task": "inference", "cache": "static", "batch": 4},
)


@pytest.mark.parametrize("options", JOBS, ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()) or "plain")
def test_compact_is_flat_in_fewer_events(options: dict[str, Any]) -> None:
    model, job = build(LLAMA), Job(**{"seq": 128, **options})
    compact, flat = lower(model, job, compact=True), lower(model, job)
    check(compact)
    check(flat)
    assert compact.repeats
    assert len(compact) < len(flat)
    one, other = memory(compact), memory(flat)
    assert one.allocated == other.allocated
    assert one.parts == other.parts
    assert one.groups == other.groups
    assert one.timeline == other.timeline
    assert one.end == other.end
