"""Composites on the CPU's fake device: whether a training step fills a cache of keys and values."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.errors import InputError
from memfit.estimate import estimate
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build, find
from memfit.simulate.memory import memory
from memfit.tape import Alloc, Tape
from memfit.trace import trace_config
from memfit.uses import strategy_from

FILLS = {
    "llava": True,
    "qwen2_vl": True,
    "qwen3_vl": True,
    "mllama": True,
    "mistral3": False,
    "lighton_ocr": False,
    "internvl": True,
    "llava_next": False,
    "llava_onevision": False,
    "idefics3": False,
    "smolvlm": False,
}
JOB = Job(checkpointing="none", precision="fp32", batch=2, seq=128, optimizer="sgd")


def joined(tape: Tape) -> int:
    """How many tensors are put together, as caches put keys and values."""
    return sum(isinstance(one, Alloc) and one.op.startswith("cat") for one in tape.events)


@pytest.mark.parametrize("kind", FILLS)
def test_training_fills_a_cache_where_the_real_code_does(kind: str) -> None:
    config = find(kind).examples[0]
    model, traced = build(config), trace_config(config, JOB)
    ours = lower(model, JOB)
    assert model.caching is FILLS[kind]
    # Sections of rotary tables are put together, too: a few more in the real code.
    assert 0 <= joined(traced) - joined(ours) < 4 * len(model.layers)
    assert memory(ours).allocated == pytest.approx(memory(traced).allocated, rel=5e-4)


@pytest.mark.parametrize(
    "case",
    [
        {"checkpointing": "full", "use": "fsdp=4"},
        {"checkpointing": "full", "use": "ddp=4,find_unused=yes"},
        {"method": "lora", "use": "ddp=4,static_graph=yes"},
        {"method": "lora"},
        {"method": "qlora", "checkpointing": "full"},
        {"task": "inference", "new_tokens": 3},
    ],
    ids=str,
)
def test_layers_that_text_passes_by_stand_idle(case: dict[str, Any]) -> None:
    """Llama 3.2 Vision's cross-attention: not gathered, not recomputed, without a cache."""
    config = {**find("mllama").examples[0], "dtype": "bfloat16"}
    given = {**case}
    use = given.pop("use", "")
    strategy = strategy_from([use] if use else [], None)
    job = Job(**{"batch": 2, "seq": 128, "optimizer": "sgd", **given})
    ours = memory(lower(build(config), job, strategy))
    theirs = memory(trace_config(config, job, strategy=strategy))
    assert ours.allocated == pytest.approx(theirs.allocated, rel=5e-4)


def test_peft_stops_at_modules_of_a_tower_that_only_hold_a_linear_layer() -> None:
    config = {**find("gemma4").examples[0], "dtype": "bfloat16"}
    job = Job(seq=32, method="lora", targets="q_proj,v_proj")
    with pytest.raises(InputError, match=r"ClippableLinear.* is not supported"):
        trace_config(config, job)
    with pytest.raises(InputError, match=r"PEFT cannot adapt `model.vision_tower.*\.q_proj`"):
        estimate(build(config), job)
    estimate(build(config), job.replace(targets="all-linear"))
