"""A compact tape stands for the flat one: same peak and same parts, to the byte, for every family
and kind of run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build, families
from memfit.model.model import Model
from memfit.simulate.memory import memory

RUNS = 4  # a run of fewer is written out
JOBS: dict[str, dict[str, Any]] = {
    "full": {"clip": 1.0, "accumulate": 2},
    "every other": {"checkpointing": "every", "checkpoint_every": 2},
    "lora": {"method": "lora", "checkpointing": "full"},
    "inference": {"task": "inference", "new_tokens": 3},
}
NAMES = sorted({one.name for one in families().values() if not one.graphs})


def deep(config: Any) -> Model:
    """The example with each of its layers repeated, so that there are runs to stand for."""
    model = build(config)
    layers = tuple(layer for layer in model.layers for _ in range(2 * RUNS))
    return replace(model, layers=layers, paths=())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("job", JOBS)
def test_compact_equals_flat(name: str, job: str) -> None:
    model = deep(families()[name].examples[0])
    asked = Job(seq=64, batch=2, **JOBS[job])
    if families()[name].brought and asked.training and asked.checkpointing != "none":
        asked = asked.replace(checkpointing="full", reentrant=True)
    if name == "phimoe" and asked.adapters:
        asked = asked.replace(targets="q_proj,k_proj,v_proj,o_proj")  # PEFT stops at its router
    flat, compact = lower(model, asked), lower(model, asked, compact=True)
    assert len(compact) < len(flat)
    assert memory(compact).allocated == memory(flat).allocated
    assert memory(compact).parts == memory(flat).parts
