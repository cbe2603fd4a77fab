"""Tensor parallelism by transformers' own plan: inference by formulas beside the trace, and what is refused (`layouts.py` has training)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

from tests.conformance.models import SPLIT, SPLITTABLE  # noqa: E402

from memfit.errors import InputError  # noqa: E402
from memfit.job import Job  # noqa: E402
from memfit.lower import lower  # noqa: E402
from memfit.model.families import build  # noqa: E402
from memfit.simulate.memory import memory  # noqa: E402
from memfit.strategy import strategy_from  # noqa: E402

ANSWERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "tp=2", {}), ("llama", "tp=4", {"batch": 8, "seq": 256}), ("llama-tied", "tp=2", {"attention": "eager", "batch": 4}),
    ("llama", "tp=4", {"logits": "all", "new_tokens": 0, "batch": 8}), ("llama-biased", "tp=2", {"cache": "static"}), ("qwen2", "tp=2", {"precision": "fp16"}),
    ("gemma2-tied", "tp=2", {"precision": "fp32"}), ("qwen3", "tp=4", {"batch": 16}), ("granite", "tp=2", {"cache": "none", "new_tokens": 3}),
)  # fmt: skip


@pytest.mark.parametrize(("name", "use", "options"), ANSWERS)
def test_a_rank_that_answers(name: str, use: str, options: dict[str, Any]) -> None:
    from memfit.trace import trace_config

    job = Job(**{"task": "inference", "batch": 2, "seq": 128, "new_tokens": 8, **options})
    strategy = strategy_from(use.split(), None)
    truth, found = memory(trace_config(SPLIT[name], job, strategy=strategy)), memory(lower(build(SPLIT[name]), job, strategy))
    assert abs(found.allocated - truth.allocated) <= 0.001 * truth.allocated, (found.parts, truth.parts)


@pytest.mark.parametrize("kind", ["stablelm", "phi3", "gpt_neox"])
def test_families_whose_plan_is_another_are_told(kind: str) -> None:
    with pytest.raises(InputError, match="no formula yet"):
        lower(build({**SPLITTABLE, "model_type": kind}), Job(batch=2, seq=128), strategy_from(["tp=2"], None))
