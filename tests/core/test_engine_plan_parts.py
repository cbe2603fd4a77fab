"""The parts of a plan for a serving engine by hand: candidates, users, speeds, goals and order."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from memfit.hardware import parse_cluster
from memfit.plan import engine_search
from memfit.plan.engine_goals import EngineRow, Load, Speed, users_fit


# ------------------------------------------------------------------------- engines
def row(
    speed: float | None = None,
    weights: str = "own",
    cache: str = "auto",
    users: int = 8,
    tensor: int = 1,
    missed: tuple[str, ...] = (),
    failure: str = "",
) -> EngineRow:
    told = None
    if speed is not None:
        told = Speed(first=1.0, token=0.1, tokens_per_second=speed, measured=True)
    return EngineRow(
        weights=weights,
        cache=cache,
        tensor=tensor,
        replicas=1,
        users=users,
        length=100,
        answer=SimpleNamespace(failure=failure),
        options={},
        command="",
        speed=told,
        missed=missed,
    )


def test_rows_in_order_of_speed_and_of_what_costs_no_quality() -> None:
    fast, slow = row(1000, weights="awq-4bit"), row(900)
    near, far = row(980), row(979)
    assert engine_search.ranked([slow, fast]) == [fast, slow]
    assert engine_search.ranked([fast, near]) == [near, fast]  # within 2 % of the fastest
    assert engine_search.ranked([fast, far]) == [fast, far]
    eighths = row(1000, cache="fp8")
    assert engine_search.ranked([eighths, near, fast]) == [near, eighths, fast]
    assert engine_search.ranked([row(), fast, slow]) == [fast, slow, row()]
    unknown = [row(users=1), row(users=9), row(weights="fp8", users=99), row(users=9, tensor=2)]
    assert engine_search.ranked(unknown) == [unknown[1], unknown[3], unknown[0], unknown[2]]
    assert engine_search.ranked([]) == []


def test_what_is_nearest_misses_fewest_goals() -> None:
    two, one = row(9000, missed=("a", "b")), row(10, missed=("a",))
    stopped = row(missed=("a",), failure="no memory")
    quick = row(20, missed=("b",))
    assert sorted([two, stopped, one, quick], key=engine_search.nearness) == [
        quick,
        one,
        stopped,
        two,
    ]
    assert (row().fits, one.fits) == (True, False)


def test_goals_that_are_missed_in_words() -> None:
    speed = Speed(first=0.5, token=0.0251, tokens_per_second=1.0, measured=True)
    starts: Any = SimpleNamespace(failure="")

    def said(load: Load, users: int = 9, speed: Speed | None = speed, why: str = "") -> list[str]:
        return list(engine_search.missed(load, users, starts, speed, why))

    assert said(Load(users=9, first=0.5, token=0.0251)) == []
    assert said(Load(users=10)) == ["9 users fit"]
    assert said(Load(users=10), why=", since it is so") == ["9 users fit, since it is so"]
    assert said(Load(users=2), users=1) == ["1 user fits"]
    assert said(Load(), users=0) == ["0 users fit"]
    assert said(Load(), users=1) == []
    assert said(Load(first=0.4)) == ["time to first token 500 ms"]
    assert said(Load(token=0.025)) == ["time per output token 25 ms"]
    assert said(Load(first=9.0), speed=None) == ["time to first token is not known on this GPU"]
    assert said(Load(), speed=None) == []
    failed: Any = SimpleNamespace(failure="no memory")
    assert list(engine_search.missed(Load(users=99), 0, failed, None, "")) == [
        "the engine does not start"
    ]
    assert [users_fit(count) for count in (0, 1, 2, 1234)] == [
        "0 users fit",
        "1 user fits",
        "2 users fit",
        "1,234 users fit",
    ]


def test_the_table_of_lengths_and_users() -> None:
    lengths, users = engine_search.LENGTHS, engine_search.USERS
    assert (lengths[0], lengths[-1], users[0], users[-1]) == (2 * 1024, 2**20, 1, 256)
    for some in (lengths, users):
        assert all(after == 2 * one for one, after in pairwise(some))


def test_what_a_load_says() -> None:
    assert not Load().given
    for one in (Load(users=1), Load(prompt=1), Load(output=1), Load(first=0.1), Load(token=0.1)):
        assert one.given
    assert Load(prompt=30, output=4).length == 34


def test_a_prompt_goes_in_pieces_beside_those_that_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 100 tokens, less those that decode; a step takes a second for each ten tokens of
    the prompt."""
    steps: list[tuple[int, int, int, int]] = []

    def seconds(engine: Any, step: Any) -> float | None:
        steps.append((step.decoding, step.context, step.prompt, step.before))
        return None if step.before >= 500 else step.prompt / 10

    monkeypatch.setattr(engine_search, "step_seconds", seconds)
    engine: Any = None
    assert engine_search.prompt_seconds(engine, 250, 100, 0, 7) == 25
    assert steps == [(0, 7, 100, 0), (0, 7, 100, 100), (0, 7, 50, 200)]
    steps.clear()
    assert engine_search.prompt_seconds(engine, 250, 100, 40, 7) == 25
    assert [prompt for _, _, prompt, _ in steps] == [60, 60, 60, 60, 10]
    assert engine_search.prompt_seconds(engine, 250, 100, 99, 7) is not None
    assert engine_search.prompt_seconds(engine, 250, 100, 100, 7) is None
    assert engine_search.prompt_seconds(engine, 700, 100, 0, 7) is None
    assert engine_search.prompt_seconds(engine, 0, 100, 0, 7) == 0


@pytest.mark.parametrize(
    ("gpu", "fixed", "config", "count"),
    [
        ("4xa100-sxm-80gb", {}, {}, 3 * 2),  # on 1, 2 and 4 GPUs; own weights and 4 bits
        ("4xh100-sxm", {}, {}, 3 * 3 * 2),  # fp8 weights and an fp8 cache, from sm 8.9
        ("l40s", {}, {}, 3 * 2),
        ("h100-sxm", {"quantization": "fp8"}, {}, 2),
        ("h100-sxm", {}, {"quantization_config": {}}, 2),
        ("h100-sxm", {"kv_cache_dtype": "fp8"}, {}, 3),
        ("4xh100-sxm", {"tensor_parallel_size": 2}, {}, 3 * 2),
        ("2xh100-sxm", {"tensor_parallel_size": 4}, {}, 0),
    ],
)
def test_candidates_are_what_the_user_left_open(
    gpu: str, fixed: dict[str, Any], config: dict[str, Any], count: int
) -> None:
    planned = SimpleNamespace(
        tensor="tensor_parallel_size",
        weights="quantization",
        cache="kv_cache_dtype",
        eighths="fp8_e5m2",
    )
    question: Any = SimpleNamespace(
        planned=planned, fixed=fixed, subject=SimpleNamespace(config=config)
    )
    cluster = parse_cluster(gpu)
    found = list(engine_search.candidates(question, cluster))
    assert len(found) == len(set(found)) == count
    assert all(one.tensor * one.replicas == cluster.gpus for one in found)
    caches = {fixed.get("kv_cache_dtype", "auto"), "fp8_e5m2"}
    assert {one.cache for one in found} <= caches


def test_words_for_a_limit_that_is_fixed() -> None:
    planned = SimpleNamespace(users="max_num_seqs")
    for fixed, room, said in (
        ({}, 9.0, ""),
        ({"max_num_seqs": 4}, 9.0, ", since `max_num_seqs` is 4"),
        ({"max_num_seqs": 4}, 4.0, ""),
        ({"max_num_seqs": 4}, 3.0, ""),
    ):
        question: Any = SimpleNamespace(planned=planned, fixed=fixed)
        answer: Any = SimpleNamespace(figures={"max_concurrency": room})
        assert engine_search.limited_by(question, answer) == said
