"""FSDP1: the formulas' rank beside the traced one, torch's own wrapper under a process group that sends nothing."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

from tests.conformance.models import SMALL  # noqa: E402

from memfit.job import Job  # noqa: E402
from memfit.lower import lower  # noqa: E402
from memfit.model.families import build  # noqa: E402
from memfit.simulate.memory import memory  # noqa: E402
from memfit.simulate.replay import replay  # noqa: E402
from memfit.strategy import strategy_from  # noqa: E402

CONFIGS = {name: SMALL[name] for name in ("llama", "qwen2", "mistral", "mixtral", "gpt2")}
FULL = {"checkpointing": "full"}
OLD = FULL | {"reentrant": True}
MIXED = {"precision": "autocast-bf16"}
MIXED16 = {"precision": "bf16-autocast"}
LORA = {"method": "lora", "targets": "q_proj,k_proj,v_proj,o_proj"}
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "fsdp=8", {}),
    ("qwen2", "fsdp=8", MIXED | FULL),
    ("mistral", "fsdp=8,backward-prefetch=pre", OLD),
    ("mixtral", "fsdp=8", {}),
    ("llama", "fsdp=3,orig-params=no", FULL),
    ("mistral", "fsdp=8,reshard=no", {}),
    ("mistral", "fsdp=8,forward-prefetch,backward-prefetch=pre", MIXED),
    ("gpt2", "fsdp=4 ddp=2", {}),
    ("llama", "fsdp=8,shard=no", MIXED),
    ("llama", "fsdp=8", {"method": "lora"}),
    ("mistral", "fsdp=8", LORA | MIXED16 | OLD),
    ("llama", "fsdp=8", LORA | FULL),
    ("llama", "fsdp=8,backward-prefetch=pre", LORA | OLD),
    ("mistral", "fsdp=8,backward-prefetch=pre", LORA | MIXED16),
    ("mistral", "fsdp=8,backward-prefetch=post", LORA | MIXED16 | FULL),
    ("llama", "fsdp=8,adapters=ignored", LORA),
    ("mistral", "fsdp=8,adapters=layer", LORA | {"adapter_dtype": "base"}),
    ("mistral", "fsdp=8,orig-params=no", LORA | MIXED16 | OLD),
    ("mistral", "fsdp=8,reshard=no", LORA | FULL),
    ("qwen2", "fsdp=2 ddp=2", LORA | MIXED16 | FULL | {"accumulate": 2}),
    ("qwen2", "fsdp=8", {}),
    ("gpt2", "fsdp=8", {}),
    ("mistral", "fsdp=8,backward-prefetch=pre", {}),
    ("mistral", "fsdp=8,backward-prefetch=post", {}),
    ("mistral", "fsdp=8,forward-prefetch", {}),
    ("llama", "fsdp=8,backward-prefetch=pre", FULL),
    ("qwen2", "fsdp=8,param-dtype=bf16,reduce-dtype=fp32", {}),
    ("llama", "fsdp=8,param-dtype=bf16,reduce-dtype=fp32", {"precision": "fp32"}),
    ("llama", "fsdp=8", {"precision": "fp32", "optimizer": "sgd"}),
    ("llama", "fsdp=8", {"accumulate": 2}),
    ("llama", "fsdp=8,sync=no", {"accumulate": 2}),
    ("llama", "fsdp=8,sync=no,reshard=no", {"accumulate": 2}),
    ("qwen2", "fsdp=8,sync=no", MIXED | OLD | {"accumulate": 2}),
    ("llama", "fsdp=8", {"clip": 1.0, "optimizer": "adamw_fused"}),
    ("llama", "fsdp=4,reshard=no ddp=2", MIXED),
    ("llama", "fsdp=8,wrap=none", {}),
    ("mixtral", "fsdp=8", OLD),
    ("llama", "fsdp=8,shard=no", {}),
    ("llama", "fsdp=8", {"evaluate": True, "optimizer": "adamw_loop"}),
    ("llama", "fsdp=8", {"precision": "bf16-autocast"}),
    ("llama", "fsdp=8,sync=no", {"zero_grad": "before_backward", "accumulate": 2}),
    ("llama", "fsdp=3,orig-params=no,reshard=no", MIXED),
)
QUICK = 11


def cases() -> list[Any]:
    found = []
    for place, (name, use, options) in enumerate(CASES):
        told = " ".join(f"{key}={value}" for key, value in options.items()) or "plain"
        found.append(pytest.param(name, use, options, id=f"{name} {use} {told}", marks=[] if place < QUICK else [pytest.mark.slow]))
    return found


@pytest.mark.parametrize(("name", "use", "options"), cases())
def test_a_layout(name: str, use: str, options: dict[str, Any]) -> None:
    from memfit.trace import trace_config

    first, *rest = use.split()
    config, job = CONFIGS[name], Job(**{"batch": 2, "seq": 128, **options})
    strategy = strategy_from([f"{first},version=1", *rest], None)
    traced, written = trace_config(config, job, strategy=strategy), lower(build(config), job, strategy)
    truth, found = memory(traced), memory(written)
    assert abs(found.allocated - truth.allocated) <= 0.001 * truth.allocated, (found.parts, truth.parts)
    held, reserved = replay(written).peak_reserved, replay(traced).peak_reserved
    assert abs(held - reserved) <= max(0.01 * reserved, 2 * 2**20), (held, reserved)
