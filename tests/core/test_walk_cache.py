"""What a search keeps of what it asked last: the same walk and never another's, of no more than so
many events."""

from __future__ import annotations

from typing import Any

import pytest

import memfit.lower as lowering
from memfit.job import Job
from memfit.lower import lower
from memfit.lower.walk_cache import Recent, once, remembering
from memfit.model.families import build
from memfit.strategy import Strategy, ZeRO

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SHARED = Strategy(zero=ZeRO(size=2, stage=2))


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The job of every walk."""
    made: list[Job] = []
    own = lowering.walk

    def noted(model: Any, job: Job, *rest: Any) -> Any:
        made.append(job)
        return own(model, job, *rest)

    monkeypatch.setattr(lowering, "walk", noted)
    return made


def test_the_same_is_walked_once_where_it_is_remembered(walks: list[Job]) -> None:
    model, job = build(CONFIG), Job(batch=2, seq=64)
    plain = lower(model, job, SHARED)
    with remembering():
        quick, precise = lower(model, job, SHARED, compact=True), lower(model, job, SHARED)
        assert precise.events is quick.events == plain.events
        assert len(walks) == 2
    assert lower(model, job, SHARED).events == plain.events
    assert len(walks) == 3


def test_another_job_rank_or_model_is_walked_itself(walks: list[Job]) -> None:
    model, job = build(CONFIG), Job(batch=2, seq=64)
    other = build({**CONFIG, "num_hidden_layers": 3})
    asked = [
        (model, job, SHARED),
        (model, job.replace(seq=65), SHARED),
        (other, job, SHARED),
        (model, job, Strategy(zero=ZeRO(size=2, stage=2), rank=1)),
    ]
    alone = [lower(*one).events for one in asked]
    with remembering():
        assert [lower(*one).events for one in asked] == alone
    assert len(walks) == 2 * len(asked)


def test_a_short_walk_stands_for_no_whole_one() -> None:
    model, job, split = build(CONFIG), Job(batch=2, seq=64, framework="transformers"), Strategy()
    with remembering():
        short, whole = lower(model, job, split, compact=True), lower(model, job, split)
    assert short.repeats
    assert not whole.repeats
    assert whole.events == lower(model, job, split).events


def test_the_oldest_go_first() -> None:
    recent, made = Recent(events=10), list[int]()

    def take(number: int) -> int:
        def make() -> int:
            made.append(number)
            return number

        return recent.take((), number, make, lambda _: 4)

    assert [take(number) for number in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert made == [1, 2, 3, 2]
    assert recent.total == 8


def test_one_that_is_larger_than_all_is_kept_alone() -> None:
    recent = Recent(events=10)
    assert recent.take((), "small", lambda: 1, lambda _: 4) == 1
    assert recent.take((), "large", lambda: 2, lambda _: 40) == 2
    assert list(recent.found) == [((), "large")]


def test_nothing_is_kept_outside() -> None:
    made = [once((), "one", lambda number=number: number, lambda _: 1) for number in range(2)]  # type: ignore[misc]
    assert made == [0, 1]
