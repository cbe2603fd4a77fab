"""Checkpointed layers that are alike are walked once in a backward, and leave the tape that they
leave one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.core.test_captured_again import deep

import memfit.lower as lowering
from memfit.job import Job
from memfit.lower import lower, repeated_backward
from memfit.lower.captured.run import Evaluation

# Windows and shared keys; a recurrence; short convolutions; experts beside a recurrence; layers
# without anything special.
TYPES = ("gemma4", "qwen3_5_text", "lfm2", "granitemoehybrid", "falcon_h1", "jais2")
CHECKPOINTS: dict[str, Any] = {"checkpointing": "full"}
JOBS: tuple[dict[str, Any], ...] = (
    {"method": "full", "batch": 2, "seq": 48},
    {"method": "lora", "batch": 1, "seq": 160, "accumulate": 3, "precision": "autocast-bf16"},
    {"method": "qlora", "batch": 3, "seq": 64, "framework": "trl", "packing": True},
    {"method": "lora", "batch": 2, "seq": 64, "evaluate": True, "keep_outputs": True},
)
CASES = [(kind, options) for kind in TYPES for options in JOBS]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_a_repeated_backward_leaves_the_same_tape(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, job = deep(kind, 9), Job(**{**CHECKPOINTS, **options})
    found = [lower(model, job, compact=compact) for compact in (False, True)]
    monkeypatch.setattr(repeated_backward, "begin", lambda *_: None)
    alone = [lower(model, job, compact=compact) for compact in (False, True)]
    assert found == alone


@pytest.mark.parametrize("kind", ["gemma4", "granitemoehybrid"])
def test_each_kind_of_layer_runs_again_a_few_times(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer runs in the forward; in the backward one of each kind, those that begin to collect
    gradients for earlier layers, and the last ones that read what all layers share."""
    runs: Counter[str] = Counter()
    own = Evaluation.run

    def counted(self: Evaluation, given: Any, ctx: Any, bound: Any, *rest: Any, **more: Any) -> Any:
        runs[ctx.r.phase] += bool(bound.prefix)
        return own(self, given, ctx, bound, *rest, **more)

    monkeypatch.setattr(Evaluation, "run", counted)
    monkeypatch.setattr(lowering, "foldable", lambda _: False)  # every layer by itself
    model = deep(kind, 24)
    lower(model, Job(method="lora", batch=1, seq=64, **CHECKPOINTS))
    assert runs["forward"] == len(model.layers)
    assert 0 < runs["backward"] <= 2 * len({layer for layer, _ in model.kinds}) + 2
    assert runs["backward"] < len(model.layers)
