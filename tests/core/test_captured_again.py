"""Captured layers that are alike run once in a pass of generation, and leave the tape that they
leave one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import memfit.lower as lowering
from memfit.job import Job
from memfit.lower import lower
from memfit.lower.captured import again
from memfit.lower.captured.run import Evaluation
from memfit.lower.walk_cache import remembering
from memfit.model.families import build, families
from memfit.model.model import Model

# Windows and shared keys; a recurrence; experts between them; a short convolution.
TYPES = ("gemma4", "qwen3_5_text", "jamba", "lfm2", "granitemoehybrid", "falcon_h1")
JOBS: tuple[dict[str, Any], ...] = (
    {"batch": 2, "seq": 48, "new_tokens": 6},
    {"batch": 1, "seq": 160, "new_tokens": 40, "quant": "int8"},
    {"batch": 3, "seq": 64, "new_tokens": 3, "quant": "nf4"},
)


def deep(kind: str, layers: int) -> Model:
    """An example of a family with its kinds of layers over and over."""
    config = dict(families()[kind].examples[0])
    if kind == "gemma4":
        return build(shared_keys())
    config["num_hidden_layers"] = layers
    if own := config.get("layer_types"):
        config["layer_types"] = [own[number % len(own)] for number in range(layers)]
    return build(config)


def shared_keys() -> dict[str, Any]:
    """A model whose last layers read keys and values of earlier ones."""
    for config in families()["gemma4"].examples:
        if config["text_config"]["num_kv_shared_layers"] > 0:
            return dict(config)
    raise AssertionError("no example of Gemma 4 shares keys")


CASES = [
    (kind, options)
    for kind in TYPES
    for options in JOBS
    if kind != "jamba" or "quant" not in options  # which has no graph of packed weights
]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_a_repeated_layer_leaves_the_same_tape(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, job = deep(kind, 8), Job(task="inference", **options)
    found = [lower(model, job, compact=compact) for compact in (False, True)]
    monkeypatch.setattr(again, "signature", lambda *_: None)
    alone = [lower(model, job, compact=compact) for compact in (False, True)]
    assert found == alone


def test_each_kind_of_layer_runs_once_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds, each of whose first layer is given an embedding's result or differs from others in
    what holds its input."""
    runs: Counter[int] = Counter()
    own = Evaluation.run

    def counted(self: Evaluation, given: Any, ctx: Any, bound: Any, *rest: Any, **more: Any) -> Any:
        runs[ctx.keys] += bool(bound.prefix)
        return own(self, given, ctx, bound, *rest, **more)

    monkeypatch.setattr(Evaluation, "run", counted)
    monkeypatch.setattr(lowering, "foldable", lambda _: False)  # every layer by itself
    lower(deep("qwen3_5_text", 16), Job(task="inference", batch=1, seq=64, new_tokens=4))
    assert len(runs) == 4
    assert max(runs.values()) <= 4 < 16


def test_a_walk_that_does_not_tell_is_tried_once_in_a_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[Any] = []
    own = lowering.walk

    def noted(model: Any, job: Any, cluster: Any, strategy: Any, given: Any, *rest: Any) -> Any:
        ends.append(given)
        return own(model, job, cluster, strategy, given, *rest)

    monkeypatch.setattr(lowering, "walk", noted)
    config = shared_keys()
    text = dict(config["text_config"], num_hidden_layers=15, num_kv_shared_layers=5)
    text["layer_types"] = (["sliding_attention"] * 4 + ["full_attention"]) * 3
    model = build({**config, "text_config": text})
    with remembering():
        for seq in (64, 128, 192):
            job = Job(task="inference", batch=1, seq=seq, new_tokens=2)
            lower(model, job, compact=True)
    assert len(ends) == 4  # two at the first length, then one at each
