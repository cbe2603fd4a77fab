"""The parts of a plan for a serving engine by hand: candidates, users, speeds, goals and order."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.hardware import parse_cluster
from memfit.hardware.prices import price
from memfit.plan import engine_search
from memfit.plan.engine_goals import EngineQuestion, EngineRow, Load, Speed, users_fit
from memfit.plan.engine_search import Candidate
from memfit.serving.base import Subject
from memfit.units import GIB


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


# ------------------------------------------------------------------------- an engine by a formula
class Ten:
    """An engine whose weights take 10 GiB, and whose cache of 8 GiB holds 32,768 tokens on each of
    its GPUs; it starts where one request has room, and runs 64 at once at most."""

    tokens = 32_768

    def answer(self, asked: Any) -> Any:
        length = asked.options["len"]
        many = self.tokens * len(asked.devices) / length
        return SimpleNamespace(
            failure="" if many >= 1 else "no room",
            figures={"max_concurrency": many, "kv_gib": 8.0},
            device=18 * GIB,
            pools=(
                SimpleNamespace(name="weights", bytes=10 * GIB),
                SimpleNamespace(name="KV cache of all layers", bytes=8 * GIB),
            ),
            problems=(),
        )


def question(load: Load, positions: int | None = 2**20, **fixed: Any) -> EngineQuestion:
    planned: Any = SimpleNamespace(
        engine=Ten(),
        tensor="tp",
        weights="quant",
        cache="kv",
        eighths="fp8",
        length="len",
        users="seqs",
        command=lambda model, options: f"serve {model}",
        on_rank=lambda asked: SimpleNamespace(
            model=None, rank=None, cached=2, host=0.0, chunk=100, requests=64
        ),
    )
    model: Any = SimpleNamespace(positions=positions)
    subject = Subject(name="m", config={}, model=model)
    return EngineQuestion(planned=planned, subject=subject, load=load, fixed=fixed)


def asked(
    load: Load, one: Candidate | None = None, gpu: str = "h100-sxm", **fixed: Any
) -> EngineRow | None:
    known = one or Candidate(weights="own", cache="auto", tensor=1, replicas=1)
    return engine_search.judged(question(load, **fixed), parse_cluster(gpu), known)


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a millisecond for each that decodes, and for each ten tokens of a prompt."""
    monkeypatch.setattr(
        engine_search, "step_seconds", lambda _, step: step.decoding / 1e3 + step.prompt / 1e4
    )


def test_users_are_those_whose_requests_have_room() -> None:
    load = Load(users=30, prompt=1000, output=24)
    found = asked(load)
    assert found is not None
    assert (found.users, found.length, found.fits) == (32, 1024, True)
    assert found.options == {"len": 1024, "seqs": 30}
    over = asked(Load(users=33, prompt=1000, output=24))
    assert over is not None
    assert over.missed == ("32 users fit",)
    two = asked(
        Load(users=33, prompt=1000, output=24),
        Candidate(weights="fp8", cache="fp8", tensor=2, replicas=2),
        "4xh100-sxm",
    )
    assert two is not None
    assert two.users == 2 * 2 * 32
    assert two.options == {"len": 1024, "tp": 2, "seqs": 17, "kv": "fp8", "quant": "fp8"}
    four = asked(load, Candidate(weights="awq-4bit", cache="auto", tensor=1, replicas=1))
    assert four is not None
    assert (four.command, found.command) == ("serve AWQ_CHECKPOINT", "serve m")
    assert four.options == {"len": 1024, "seqs": 30}
    none = asked(Load(prompt=40_000, output=0))
    assert none is not None
    assert (none.users, none.speed, none.missed) == (0, None, ("the engine does not start",))


def test_without_a_number_of_users_the_engine_s_own_limit_counts() -> None:
    many = asked(Load(prompt=60, output=4))  # the cache has room for 512
    assert many is not None
    assert many.users == 64
    fixed = asked(Load(users=8, prompt=1000, output=24), seqs=4)
    assert fixed is not None
    assert fixed.options["seqs"] == 4


@pytest.mark.parametrize("users", [1, 2, 3, 32])
def test_the_longest_request_of_so_many_users(users: int) -> None:
    found = asked(Load(users=users))
    assert found is not None
    assert found.length == 32_768 // users
    assert (found.users, found.speed) == (users, None)
    assert asked(Load(users=4096)) is None  # not even a block of 16 tokens, with one more
    few = engine_search.judged(
        question(Load(users=users), positions=512),
        parse_cluster("h100-sxm"),
        Candidate(weights="own", cache="auto", tensor=1, replicas=1),
    )
    assert few is not None
    assert few.length == 512
    unnamed = engine_search.judged(
        question(Load(users=users), positions=None),
        parse_cluster("h100-sxm"),
        Candidate(weights="own", cache="auto", tensor=1, replicas=1),
    )
    assert unnamed is not None
    assert unnamed.length == min(2048, 32_768 // users)
    stated = asked(Load(users=users), len=777)
    assert stated is not None
    assert stated.length == 777


def test_a_speed_is_that_of_all_users() -> None:
    """Ten users decode in 10 ms; each of their prompts takes 50 ms in between, once for 100 tokens
    of its answer; with nine that decode the first token comes after six steps of 9 ms more."""
    found = asked(Load(users=10, prompt=500, output=100))
    assert found is not None
    assert found.speed is not None
    token = 0.010 + 10 * 0.050 / 100
    assert found.speed.token == pytest.approx(token)
    assert found.speed.first == pytest.approx(0.050 + 6 * 0.009)
    assert found.speed.tokens_per_second == pytest.approx(10 / token)
    copies = asked(
        Load(users=20, prompt=500, output=100),
        Candidate(weights="own", cache="auto", tensor=1, replicas=2),
        "2xh100-sxm",
    )
    assert copies is not None
    assert copies.speed is not None
    assert copies.speed.token == found.speed.token
    assert copies.speed.tokens_per_second == pytest.approx(20 / token)
    prompts = asked(Load(users=10, prompt=500))
    assert prompts is not None
    assert prompts.speed is not None
    assert (prompts.speed.token, prompts.speed.tokens_per_second) == (pytest.approx(0.010), 0)
    assert prompts.dollars is None
    known = price(parse_cluster("h100-sxm").gpu)
    assert known is not None
    for one, gpus in ((found, 1), (copies, 2)):
        assert one.speed is not None
        hours = 10**6 / one.speed.tokens_per_second / 3600
        assert one.dollars == pytest.approx(hours * known.dollars * gpus)
    late = asked(Load(users=100, prompt=500, output=12))  # of whom 64 have room, the others wait
    assert late is not None
    assert late.speed is not None
    assert late.speed.tokens_per_second == pytest.approx(64 / (0.064 + 64 * 0.050 / 12))


def test_the_grid_of_an_engine() -> None:
    """10 GiB of weights, and 8 GiB for 32,768 tokens."""
    load, cluster = Load(users=2, prompt=1000, output=24), parse_cluster("h100-sxm")
    found = asked(load)
    assert found is not None
    grid = engine_search.grid_of(question(load), cluster, found)
    assert grid is not None
    assert grid.lengths[:2] == (2048, 4096)
    assert grid.lengths[-1] == 2**20
    assert grid.most[:5] == (16, 8, 4, 2, 1)
    assert grid.limit == 18 * GIB
    assert grid.cells[0][:3] == (10.5 * GIB, 11 * GIB, 12 * GIB)
    few = engine_search.grid_of(question(load, positions=4096), cluster, found)
    assert few is not None
    assert few.lengths == (2048, 4096)
    assert engine_search.grid_of(question(load, positions=2047), cluster, found) is None
    assert engine_search.grid_of(question(load, len=5), cluster, found) is None


def test_a_plan_of_an_engine_and_the_cheapest_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(users=40, prompt=1000, output=24)
    cluster = parse_cluster("2xa100-sxm-80gb")
    found = engine_search.plan_engine(question(load, kv="auto"), cluster)
    assert found.fits
    assert all(row.fits and row.tensor * row.replicas == 2 for row in found.rows)
    assert found.grid is not None
    assert len(engine_search.plan_engine(replace(question(load), top=1), cluster).rows) == 1
    one = parse_cluster("a100-sxm-80gb")
    missed = engine_search.plan_engine(question(load), one)
    assert (missed.fits, len(missed.close)) == (False, 1)
    known = price(one.gpu)
    assert known is not None
    assert missed.dollars == known.dollars
    some = [(1.0, one), (2.0, parse_cluster("2xt4")), (3.0, cluster), (9.0, cluster)]
    monkeypatch.setattr(engine_search, "machines", lambda: iter(some))
    cheapest = engine_search.cheapest_engine(question(load), 8)
    assert (cheapest.cluster.gpu.id, cheapest.cluster.gpus, cheapest.market) == ("t4", 2, True)
    assert cheapest.passed == (f"$1.00 per hour, {one.name}: 32 users fit",)
    shared = engine_search.cheapest_engine(question(load, tp=2), 8)
    assert (shared.cluster.gpus, shared.passed) == (2, ())
    nowhere = engine_search.cheapest_engine(question(load), 1)
    assert (nowhere.fits, nowhere.market, len(nowhere.passed)) == (False, True, 1)
    with pytest.raises(InputError, match="shares layers over 4 GPUs"):
        engine_search.cheapest_engine(question(load, tp=4), 8)
