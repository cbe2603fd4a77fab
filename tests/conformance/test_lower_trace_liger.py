"""Liger's kernels: the formulas against Liger-Kernel's own Python code, run by the trace with
Triton left out."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("liger_kernel")

from memfit.job import Job
from memfit.libraries.liger.check import PATCHES
from memfit.lower import lower
from memfit.model.families import build, find
from memfit.simulate.memory import memory
from memfit.trace import trace_config

JOBS: tuple[dict[str, Any], ...] = (
    {"loss": "liger"},
    {"loss": "liger-ce"},
    {"liger": True, "loss": "liger-ce"},
    {"liger": True, "loss": "liger", "precision": "autocast-bf16"},
    {"liger": True, "method": "lora", "checkpointing": "full"},
)


@pytest.mark.parametrize("options", JOBS, ids=str)
@pytest.mark.parametrize("family", sorted(PATCHES))
def test_formulas_equal_ligers_own_code(family: str, options: dict[str, Any]) -> None:
    patch = PATCHES[family]
    if (options.get("liger") and patch.experts) or (
        options.get("loss") == "liger" and not patch.loss
    ):
        pytest.skip("Liger has no such patch, or it cannot be followed")
    config = dict(find(family).examples[0])
    job = Job(seq=256, batch=2, **options)
    ours, real = (
        memory(lower(build(config), job)).allocated,
        memory(trace_config(config, job)).allocated,
    )
    assert abs(ours / real - 1) < 0.002


@pytest.mark.parametrize("family", ["gemma3", "hunyuan_v1_dense", "llama"])
def test_nothing_of_it_stays(family: str) -> None:
    """A plain trace is the same before and after, and so is transformers' code."""
    config, plain = dict(find(family).examples[0]), Job(seq=64)
    before = trace_config(config, plain)
    trace_config(config, Job(seq=64, liger=True, loss="liger"))
    assert memory(trace_config(config, plain)) == memory(before)
