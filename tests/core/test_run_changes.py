"""The chance to run out of memory and what would change a run, over a walker whose memory is a
formula."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from memfit.answers import COMPARED
from memfit.band import exceeding
from memfit.errors import InputError
from memfit.job import Job
from memfit.runs import changes
from memfit.runs.batches import Batches, Sampling
from memfit.runs.changes import RARE, SHARES, Setting
from memfit.runs.lengths import Lengths
from memfit.runs.risk import NARROW, Risk
from memfit.runs.texts import Counting, length_of
from memfit.runs.walker import Given
from memfit.simulate.run import Course, cut
from memfit.simulate.settings import Settings
from memfit.tape import Alloc, Comm, Compute, Free, Mark, Sync, Tape, Trim


class Formula:
    """A run takes 1,000 bytes and a byte for each token of its longest step, and reserves twice
    that; it goes through in what it needs and `gaps`. Expandable segments reserve half as much. An
    evaluation takes 3,000, a merge 5,000. A step takes a second for 100 tokens."""

    def __init__(self, found: Any, job: Job, top: int, multiple: int = 1, gaps: int = 100) -> None:
        self.found, self.job, self.top, self.gaps = found, job, top, gaps
        self.courses: list[Course] = []

    def shape(self, tokens: int) -> int:
        return tokens

    def live(self, tokens: int) -> float:
        return 1000 + tokens

    def course(self, made: Batches, every: int = 0) -> Course:
        return Course(steps=made.steps, evaluate_every=every, longest=self.top, merged=True)

    def replay(self, course: Course, settings: Settings, capacity: int | None = None) -> Any:
        self.courses.append(course)
        need = 1000 + max(map(max, course.steps))
        need = max(need, 3000 if course.evaluate_every else 0, 5000 if course.merged else 0)
        reserved = need if settings.expandable_segments else 2 * need
        died = None if capacity is None or capacity >= need + self.gaps else 0
        return SimpleNamespace(allocated=need, reserved=reserved, died=died)

    def seconds(self, tokens: int) -> float:
        return tokens / 100


@pytest.mark.parametrize(
    "line",
    [
        "x" * 500,
        json.dumps({"x" * 500: 1}),
        json.dumps({"x" * 500: "a text"}),
        json.dumps({"text" + "x" * 3: "a text", "y" * 500: 2}),
        json.dumps({"messages": ["x" * 500]}),
        json.dumps({"messages": {"x" * 500: 1}}),
        json.dumps({"textt" + " " * 500: 1}),
    ],
)
@pytest.mark.parametrize("column", ["", "z" * 500])
def test_a_long_line_is_cut_in_what_is_said(line: str, column: str) -> None:
    """A message is a line of a terminal; names and values have 40 characters of it."""
    counting = Counting(tokens_per_char=0.5, column=column)
    with pytest.raises(InputError) as found:
        length_of(line, counting)
    (problem,) = found.value.problems
    assert len(problem.message) < 120
    assert len(problem.hint or "") < 160


def test_what_moves_no_memory_is_left_out_of_a_run() -> None:
    """Waits and trims stay, for they give memory back."""
    tape = Tape(
        events=(
            Mark("load"),
            Alloc(0, 512, "weights"),
            Mark("forward"),
            Compute("linear", 1, 1, "bf16", ""),
            Comm("all_gather", 1, 2, "any", "", 1),
            Alloc(1, 512, "activations"),
            Free(1, (1,)),
            Sync(0, 1),
            Mark("step"),
            Trim(),
        ),
        source="handwritten",
    )
    found = cut(tape)
    assert found.begin is not None
    assert [type(event) for event in found.began[0].events] == [Alloc, Free, Sync]
    assert [type(event) for event in found.begin.events] == [Trim]


FOUND: Any = SimpleNamespace(usable=(4000, 4000), outside=500)


def risk(usable: int = 4000, accumulate: int = 1, **course: Any) -> Risk:
    found: Any = SimpleNamespace(usable=(usable, usable), outside=500)
    steps = ((300,) * accumulate,) * 3
    return Risk(
        Formula(found, Job(), 1000),  # type: ignore[arg-type]
        Settings(),
        300,
        Course(steps=steps, **course),
    )


def test_a_step_fails_where_its_memory_and_the_error_of_estimates_are_more_than_there_is() -> None:
    """The longest step lives in 2,000 bytes and goes through in 2,100, found by halves between
    2,000 and 4,000; a step of 500 tokens lives in 1,500, and needs as much more of them."""
    one = risk()
    assert one.gaps == pytest.approx(2100 / 2000, abs=2000 / 2**NARROW / 2000)
    assert one.gaps >= 2100 / 2000
    assert one.chance(500) == exceeding(4000 / (one.gaps * 1500 + 500))
    assert risk(10**9).chance(500) == 0
    assert risk(700).chance(500) == 1
    tight = [risk(usable).chance(500) for usable in range(1600, 3000, 50)]
    assert tight == sorted(tight, reverse=True)
    assert len(set(tight)) > 3


def test_an_evaluation_and_a_merge_have_a_chance_of_their_own() -> None:
    one = risk(evaluate_every=2, longest=800, merged=True)
    step = 3000 / 2**NARROW
    for need, chance in ((3100, one.of_evaluation(800)), (5100, one.of_merge())):
        assert exceeding(4000 / (need + 500)) <= chance
        assert chance <= exceeding(4000 / (need + 2 * step + 500))
    (walker,) = (one.walker,)
    assert isinstance(walker, Formula)
    evaluated = [course for course in walker.courses if course.evaluate_every]
    merged = [course for course in walker.courses if course.merged]
    assert {course.evaluate_every for course in evaluated} == {2}
    assert {len(course.steps) for course in (*evaluated, *merged)} == {2}
    assert {course.longest for course in evaluated} == {800}
    assert risk(accumulate=3).walker.courses[0].steps == (  # type: ignore[attr-defined]
        (300,) * 3,
        (300,) * 3,
        (1000,) * 3,
    )


class Chances:
    """By the limit alone: certain from 500 tokens on, and below that as many in 10,000."""

    usual, course = 300, Course(steps=((1,),))

    def __init__(self, *_: Any) -> None:
        pass

    def by(self, orders: Any, count: int, limit: int | None = None) -> list[float]:
        tokens = max((size for order in orders for _, size in order), default=0)
        tokens = tokens if limit is None else min(tokens, limit)
        return [0.0, tokens / 10_000 if tokens < 700 else 1.0]


def setting(job: Job, tokens: int = 1000, steps: int = 3, real: int = 3000, **more: Any) -> Setting:
    made = Batches(
        steps=((tokens,),) * steps,
        longest=(tokens,) * steps,
        texts=(0,) * steps,
        real=real,
        padded=4000,
    )
    given = Given(
        lengths=Lengths(tokens=[tokens], origin="", total=1),
        sampling=Sampling(batch=2, limit=1000, accumulate=3),
        steps=steps,
    )
    values: dict[str, Any] = {
        "walker": Formula(FOUND, job, tokens),
        "given": given,
        "made": made,
        "risk": Chances(),
        "orders": (((0, tokens),),),
        "seconds": 30.0,
    }
    return Setting(**{**values, **more})


@pytest.fixture(autouse=True)
def formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "Walker", Formula)
    monkeypatch.setattr(changes, "Risk", Chances)


def named(one: Setting) -> dict[str, Any]:
    return {change.name: change for change in changes.changes(one, Settings())}


def test_other_settings_packing_and_shorter_texts() -> None:
    """3,000 real tokens are half a step of 2 · 3 rows of 1,000, which takes 10 seconds."""
    found = named(setting(Job(packing=False)))
    assert list(found) == [
        "as it is",
        "expandable_segments",
        "max_split_size_mb",
        "packing",
        "shorter texts",
    ]
    # cut at nothing, the run ends with the merge, which takes most
    assert (found["as it is"].reserved, found["as it is"].probability) == (10_000, 1.0)
    assert found["expandable_segments"].reserved == 5000
    assert found["packing"].reserved == 4000
    assert found["packing"].probability == 1.0
    assert found["packing"].slower == pytest.approx(10 * 0.5 / 30 - 1)
    assert found["shorter texts"].flags == "--seq 500"
    assert found["shorter texts"].probability == RARE == 0.05
    unknown = named(setting(Job(packing=False), seconds=None))
    assert unknown["packing"].slower is None


def test_changes_that_a_run_has_already_are_none() -> None:
    assert "packing" not in named(setting(Job(packing=True)))
    conf = named(setting(Job(packing=False, alloc_conf="expandable_segments:True")))
    assert list(conf) == ["as it is", "packing", "shorter texts"]
    for tokens, shorter in ((500, False), (501, True)):
        assert ("shorter texts" in named(setting(Job(packing=True), tokens=tokens))) is shorter
    none = named(setting(Job(packing=False), risk=None))
    assert "shorter texts" not in none
    assert {one.probability for one in none.values()} == {None}


def test_so_many_steps_are_compared() -> None:
    """The end of a longer run is not one of them."""
    for steps, merged in ((COMPARED, True), (COMPARED + 1, False)):
        one = setting(Job(packing=True), steps=steps)
        named(one)
        courses = one.walker.courses  # type: ignore[attr-defined]
        assert {(len(some.steps), some.merged) for some in courses} == {(COMPARED, merged)}
    assert list(SHARES) == sorted(SHARES, reverse=True)
    assert (max(SHARES), min(SHARES)) == (7 / 8, 1 / 4)
