"""The parts of a whole run, each worked out by hand: batches, lengths, lines of files, the chance
to run out of memory, and steps of several lengths through one allocator."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import InputError, TapeError
from memfit.job import Job
from memfit.runs.batches import Batches, Sampling, batches, epoch_steps, longest_batches
from memfit.runs.lengths import Lengths, of_lognormal, read_lengths
from memfit.runs.risk import Risk, checkpoints, half_of, records
from memfit.runs.texts import Counting, length_of
from memfit.runs.walker import Given, Walker, interpolated
from memfit.runs.whole_run import texts_of, usual
from memfit.simulate.run import Course, Cut, Replayed, Step, cut, replay_run
from memfit.simulate.settings import Settings
from memfit.tape import LONGEST, Alloc, Event, Free, Mark, Phase, Repeat, Tape, check

M = 2**20


# ------------------------------------------------------------------------------------ batches
@pytest.mark.parametrize(
    ("tokens", "how", "total", "steps"),
    [
        ([9] * 10, Sampling(batch=2, limit=9), 0, 5),
        ([9] * 11, Sampling(batch=2, limit=9), 0, 5),  # what fills no batch is left out
        ([9] * 16, Sampling(batch=2, limit=9, accumulate=2, ranks=2), 0, 2),
        ([9], Sampling(batch=2, limit=9), 0, 1),
        ([9] * 10, Sampling(batch=2, limit=9), 300, 150),
        # 100 + 200 + 700 tokens are 2.5 rows of 400, of which the long text's rest is cut: 700
        ([100, 200, 900], Sampling(batch=1, limit=400, packing=True), 0, 2),
        ([100, 200, 900], Sampling(batch=1, limit=400, packing=True), 300, 175),
        ([100, 200, 900], Sampling(batch=5, limit=400, packing=True), 300, 35),
        ([1], Sampling(batch=1, limit=400, packing=True), 0, 1),
    ],
)
def test_steps_of_an_epoch(tokens: list[int], how: Sampling, total: int, steps: int) -> None:
    assert epoch_steps(tokens, how, total) == steps


def test_padding_is_to_the_longest_and_to_a_multiple() -> None:
    """Texts of 5 and 3 tokens are 8 each, one of 9 is cut at 8: 18 tokens of 32."""
    made = batches([5, 3, 9, 2], Sampling(batch=2, limit=8, multiple=4, order="as-is"), 2, 0)
    assert (made.steps, made.longest, made.texts) == (((8,), (8,)), (8, 8), (0, 2))
    assert (made.real, made.padded) == (18, 32)
    assert made.padding == 1 - 18 / 32
    # a limit that is no multiple is rounded up, as the texts are
    made = batches([3, 9], Sampling(batch=1, limit=6, multiple=4, order="as-is"), 2, 0)
    assert made.longest == (4, 8)


def test_micro_batches_are_dealt_to_ranks_in_turn() -> None:
    """Two ranks with two micro-batches of one text: the first has the first and the third."""
    how = Sampling(batch=1, limit=99, accumulate=2, ranks=2, order="as-is")
    made = batches([1, 2, 3, 4, 8, 7, 6, 5], how, 2, 0)
    assert made.steps == ((1, 3), (8, 6))
    assert (made.longest, made.texts) == ((4, 8), (3, 4))
    assert (made.real, made.padded) == (36, 36)
    assert made.padding == 0


def test_packed_rows_are_full() -> None:
    made = batches([5], Sampling(batch=3, limit=10, packing=True, accumulate=2, ranks=4), 5, 0)
    assert made.steps == ((10, 10),) * 5
    assert (made.longest, made.texts) == ((10,) * 5, (-1,) * 5)
    assert made.real == made.padded == 5 * 2 * 4 * 3 * 10


def test_texts_that_fill_no_batch_come_several_times() -> None:
    made = batches([7, 9], Sampling(batch=8, limit=99), 3, 0)
    assert set(made.longest) <= {7, 9}
    assert made.padded == sum(8 * size for size in made.longest)


@pytest.mark.parametrize("texts", [5, 6, 7, 40])
@pytest.mark.parametrize("order", ["shuffled", "as-is", "sorted", "grouped", "bucketed"])
def test_the_longest_batches_are_those_of_the_batches(order: str, texts: int) -> None:
    tokens = [3 * number % 17 + 1 for number in range(texts)]
    for accumulate, ranks in ((1, 1), (2, 1), (1, 2)):
        how = Sampling(
            batch=2, limit=12, order=order, multiple=4, accumulate=accumulate, ranks=ranks
        )
        for seed in range(3):
            made = batches(tokens, how, 7, seed)
            assert tuple(longest_batches(tokens, how, 7, seed)) == made.longest
            assert all(size % 4 == 0 and size <= 12 for size in made.longest)


def test_buckets_hold_texts_up_to_the_same_power_of_two() -> None:
    tokens = [3, 100, 2, 101, 5, 6]
    made = batches(tokens, Sampling(batch=2, limit=999, order="bucketed"), 3, 0)
    assert sorted(made.longest) == [3, 6, 101]
    # what is left of the buckets forms batches by length
    made = batches([3, 100, 9, 20], Sampling(batch=2, limit=999, order="bucketed"), 2, 0)
    assert sorted(made.longest) == [9, 100]


# ------------------------------------------------------------------------------------ lengths
@pytest.mark.parametrize(
    "values",
    [
        {"mean": 400.0, "p99": 2000.0},
        {"median": 300.0, "p99": 2000.0},
        {"median": 300.0, "mean": 400.0},
    ],
)
def test_a_lognormal_has_what_it_was_given(values: dict[str, float]) -> None:
    """Mean exp(m + s²/2), median exp(m), and z = 2.3263 at 99 % (any table of the normal)."""
    middle, spread = of_lognormal(dict(values))
    known = {
        "mean": math.exp(middle + spread**2 / 2),
        "median": math.exp(middle),
        "p99": math.exp(middle + 2.3263478740408408 * spread),
    }
    assert {name: known[name] for name in values} == pytest.approx(values)
    assert 0 < spread < 2.33


def test_no_lognormal_has_a_quantile_too_far_from_its_mean() -> None:
    """exp(z²/2) = 14.97 times, at most; the median may be farther off."""
    of_lognormal({"mean": 100.0, "p99": 1496.0})
    with pytest.raises(InputError, match=r"p99` of 15 times its mean"):
        of_lognormal({"mean": 100.0, "p99": 1498.0})
    of_lognormal({"median": 100.0, "p99": 9000.0})
    with pytest.raises(InputError, match="`p99` must be above `mean`"):
        of_lognormal({"mean": 100.0, "p99": 100.0})


def test_quantiles_and_what_is_cut() -> None:
    lengths = Lengths(tokens=range(1, 201), origin="made up", total=200, empty=3)
    assert [lengths.quantile(share) for share in (0, 0.5, 0.99, 1)] == [1, 101, 199, 200]
    assert (lengths.mean, lengths.longest) == (100.5, 200)
    said = texts_of(Given(lengths=lengths, sampling=Sampling(batch=1, limit=150)))
    assert (said.median, said.p99, said.longest, said.cut) == (101, 199, 200, 0.25)
    assert (said.empty, said.limit, said.total) == (3, 150, 200)
    assert (
        usual(Batches(steps=(), longest=(5, 9, 7), texts=(), real=1, padded=1)),
        usual(Batches(steps=(), longest=(5, 9, 7, 8), texts=(), real=1, padded=1)),
    ) == (7, 8)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("uniform:min=0,max=9", "`min=0`: must be a number of tokens, at least 1"),
        ("uniform:min=1,max=4294967296", "must be a number of tokens"),
        ("uniform:min=1,min=2,max=9", "`min` is given twice"),
        ("uniform:min=9,max=8", "`min` is above `max`"),
        ("uniform:min", "`min`: must be"),
        ("uniform:mean=4", "`uniform` has no `mean`"),
        ("lognormal:mean=nan,p99=9", "`mean=nan`: must be"),
        ("gaussian:mean=4", "unknown distribution `gaussian`"),
    ],
)
def test_distributions_that_cannot_be(spec: str, said: str) -> None:
    with pytest.raises(InputError) as found:
        read_lengths(spec, Counting())
    assert said in str(found.value)


@pytest.mark.parametrize(
    "spec",
    [
        ",".join(["512"] * 400),
        "x" * 2000 + ":mean=4",
        "uniform:" + "x" * 2000,
        "uniform:min=" + "9" * 2000,
        "lognormal:mean=4," + "y" * 2000 + "=7",
    ],
)
def test_a_long_specification_is_cut_in_what_is_said(spec: str) -> None:
    with pytest.raises(InputError) as found:
        read_lengths(spec, Counting())
    assert all(len(problem.message) < 120 for problem in found.value.problems)


def test_distributions_at_their_ends() -> None:
    found = read_lengths("uniform:min=5,max=5", Counting())
    assert set(found.tokens) == {5}
    assert (found.total, found.origin) == (10_000, "10,000 texts drawn from uniform")
    assert set(read_lengths("uniform:min=1,max=1", Counting(), examples=3).tokens) == {1}
    last = 2**32 - 1
    assert set(read_lengths(f"uniform:min={last},max={last}", Counting(), examples=3).tokens) == {
        last
    }
    some = read_lengths("uniform:min=1,max=3", Counting(), examples=500)
    assert set(some.tokens) == {1, 2, 3}
    limited = read_lengths("lognormal:median=400,p99=2000,max=500", Counting(), examples=500)
    assert limited.longest == 500
    assert min(read_lengths("lognormal:median=1,p99=2", Counting(), examples=99).tokens) == 1


# ------------------------------------------------------------------------------------ files
def lines(path: Path, *texts: Any) -> Path:
    path.write_text("\n".join(map(str, texts)))
    return path


def test_of_many_bad_lines_eight_are_said(tmp_path: Path) -> None:
    def said(*texts: Any) -> list[str]:
        with pytest.raises(InputError) as found:
            read_lengths(str(lines(tmp_path / "a.txt", *texts)), Counting())
        return [problem.message for problem in found.value.problems]

    assert said(*["x"] * 8) == ["`x` is not a length"] * 8
    assert said(*["x"] * 9)[8:] == ["and 1 more lines like these"]
    assert said(1, *["x"] * 150)[8:] == ["and 142 more lines like these"]
    # of a file without any good line the first hundred say enough
    assert said(*["x"] * 150)[8:] == ["and 92 more lines like these"]
    assert said(*["x"] * 100)[8:] == ["and 92 more lines like these"]
    assert said(*["x"] * 99)[8:] == ["and 91 more lines like these"]


def test_the_line_of_each_text_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = lines(tmp_path / "a.txt", 10, "", 30, "null", 50, 60, 70, 80, 90, 100)
    found = read_lengths(str(file), Counting())
    assert list(found.tokens) == [10, 30, 50, 60, 70, 80, 90, 100]
    assert list(found.lines) == [1, 3, 5, 6, 7, 8, 9, 10]
    assert (found.empty, found.total, found.origin) == (1, 8, "a.txt: 8 texts")
    monkeypatch.setattr("memfit.runs.lengths.KEPT", 3)
    kept = {
        tuple(zip(some.tokens, some.lines, strict=True))
        for some in (read_lengths(str(file), Counting(), seed=seed) for seed in range(30))
    }
    assert all(len(one) == 3 and all(tokens == 10 * line for tokens, line in one) for one in kept)
    assert {tokens for one in kept for tokens, _ in one} == set(found.tokens)  # any may be kept
    sampled = read_lengths(str(file), Counting())
    assert (sampled.total, sampled.origin) == (8, "a.txt: 8 texts, 3 of them sampled")


def test_a_zero_byte_in_the_head_and_a_line_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    for place, binary in ((4095, True), (4096, False)):
        file.write_bytes(b"1\n" * (place // 2) + b"1" * (place % 2) + b"\0")
        with pytest.raises(InputError, match="is a binary file" if binary else "is not a length"):
            read_lengths(str(file), Counting())
    monkeypatch.setattr("memfit.runs.lengths.LONGEST_LINE", 64)
    file.write_text("7" + " " * 62)
    assert list(read_lengths(str(file), Counting()).tokens) == [7]
    file.write_text("7" + " " * 63)
    with pytest.raises(InputError, match=r"line 1 of `a\.txt` is longer than 64 bytes"):
        read_lengths(str(file), Counting())


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    for path, said in ((tmp_path, "is a folder"), (tmp_path / "no.txt", "does not exist")):
        with pytest.raises(InputError, match=said):
            read_lengths(str(path), Counting())
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(InputError, match=r"`empty\.txt` has no texts"):
        read_lengths(str(tmp_path / "empty.txt"), Counting())
    marked = tmp_path / "marked.txt"
    marked.write_bytes("7\n8\n".encode("utf-8-sig"))
    assert list(read_lengths(str(marked), Counting()).tokens) == [7, 8]


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("1", 1),
        (str(2**32 - 1), 2**32 - 1),
        ("null", 0),
        ('""', 0),
        ('"abcd"', 2),
        ('"a"', 1),  # a text has a token at least
        ("[5, 6, 7]", 3),
        ("[]", 0),
        ({"n_tokens": 9, "text": "abcd"}, 9),
        ({"input_ids": [], "text": "abcd"}, 2),
        ({"input_ids": [True]}, "not a list of token ids"),
        ({"messages": "abcd"}, 2),
        ({"messages": [{"content": "abcd"}]}, 7),  # five around it
        ({"messages": [{"content": ""}]}, 5 + 0),
        ({"messages": [{"content": None}]}, 5),
        ({"messages": [{"content": [{"text": "abcd"}, {"image": 1}, {"text": "ab"}]}]}, 8),
        ({"prompt": "abcd", "completion": None}, 2),
        ({"text": None, "messages": []}, 0),
        ({"text": None}, 0),
        ({"input_ids": []}, 0),
        ("0", "at least 1 token"),
        (str(2**32), "below 2^32"),
        ("12.5", "`12.5` is not a length"),
        ("x" * 99, f"`{'x' * 40}` is not"),
        ("[1, 2.5]", "not a JSON object"),
        ("[true]", "not a JSON object"),
        ({"messages": [{"role": "user"}]}, "is not a message"),
        ({"messages": ["x" * 99]}, f"`{'x' * 40}` is not a message"),
        ({"length": True}, "`length` is not an integer"),
        ({"txet": "abcd"}, "did you mean `text`"),
        ({"a": "abcd", "b": "abcdef"}, "`b` has the longest text"),
        ({"a": 1}, "name it with `--text-key`"),
        ({}, "no keys"),
        (dict.fromkeys("abcdef", 1), "it has `a`, `b`, `c`, `d`, `e`, `f`"),
        (dict.fromkeys("abcdefg", 1), "`f` and 1 more"),
        (dict.fromkeys("abcdefghi", 1), "`f` and 3 more"),
    ],
)
def test_a_line(line: Any, tokens: int | str) -> None:
    """Half a token for each character."""
    text = line if isinstance(line, str) else json.dumps(line)
    if isinstance(tokens, int):
        assert length_of(text, Counting(tokens_per_char=0.5)) == tokens
        return
    with pytest.raises(InputError) as found:
        length_of(text, Counting(tokens_per_char=0.5))
    (problem,) = found.value.problems
    assert tokens in f"{problem.message} {problem.hint}"
    assert ("more" in problem.message) == ("more" in tokens)


def test_a_column_by_its_name() -> None:
    counting = Counting(tokens_per_char=0.5, column="body")
    assert length_of('{"text": "ab", "body": "abcdefgh"}', counting) == 4
    assert length_of('{"body": 7}', counting) == 7
    assert length_of('{"body": [1, 2]}', counting) == 2
    assert length_of('{"body": null}', counting) == 0
    for line, said in (
        ('{"text": "ab"}', "no key `body`"),
        ('{"body": 0}', "at least 1"),
        ('{"body": true}', "`True` is neither a text nor messages"),
    ):
        with pytest.raises(InputError, match=said):
            length_of(line, counting)


# ------------------------------------------------------------ lengths of a run
def given(tokens: list[int], **more: Any) -> Given:
    sampling = Sampling(**{"batch": 1, "limit": 10**6, "order": "as-is", **more.pop("how", {})})
    lengths = Lengths(tokens=tokens, origin="made up", total=len(tokens))
    return Given(lengths=lengths, sampling=sampling, **more)


def test_an_epoch_is_looked_at_and_no_more_than_a_thousand_steps() -> None:
    assert [given([9] * texts).count for texts in (7, 1000, 1001)] == [7, 1000, 1000]
    assert given([9] * 7, steps=5000).count == 5000
    assert given([9, 70], how={"multiple": 64}).top == 128
    assert given([9, 70], how={"multiple": 64, "limit": 60}).top == 64
    assert given([9, 70], how={"limit": 64, "packing": True}).top == 64


def test_lines_between_lengths_are_straight() -> None:
    asked: list[int] = []

    def value(tokens: int) -> float:
        asked.append(tokens)
        return 100 + 3 * tokens

    between = interpolated(value, 600, 1)
    assert [between(tokens) for tokens in (1, 100, 101, 350, 599, 600, 700)] == pytest.approx(
        [103, 400, 403, 1150, 1897, 1900, 2200]
    )
    assert sorted(asked) == [100, 200, 300, 400, 500, 600]  # a sixth, and each only once
    assert [interpolated(value, 64, 64)(tokens) for tokens in (1, 64)] == [292, 292]
    square = interpolated(lambda tokens: tokens**2, 600, 1)
    assert (square(250), square(450)) == ((200**2 + 300**2) / 2, (400**2 + 500**2) / 2)


# ------------------------------------------------------------------------------------ the chance
def test_steps_whose_chance_is_reported() -> None:
    assert checkpoints(1) == (1,)
    assert checkpoints(2) == (1, 2)
    assert checkpoints(60) == (1, 2, 5, 10, 20, 50, 60)
    assert checkpoints(1000) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def test_half_of_the_runs_that_fail() -> None:
    assert half_of([]) is None
    assert half_of([0.0, 0.0]) is None
    assert half_of([0.1, 0.3, 0.6]) == 2
    assert half_of([0.1, 0.2, 0.6]) == 3
    assert half_of([0.6]) == 1


def test_records_are_the_batches_that_are_longer_than_all_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert records(given([5, 9, 7, 9, 12])) == (((0, 5), (1, 9), (4, 12)),)
    assert records(given([5, 9, 7, 9, 12], steps=3)) == (((0, 5), (1, 9)),)
    assert records(given([5, 5], how={"packing": True, "limit": 8}))[0][0] == (0, 8)
    for order in ("sorted", "as-is"):
        assert len(records(given([5, 9], how={"order": order}))) == 1
    texts = list(range(1, 50))
    grouped = records(given(texts, how={"order": "grouped"}))
    assert grouped == (((0, 49),),) * 100  # whose longest text comes first
    found = records(given(texts, how={"order": "shuffled"}))
    assert len(found) == 100
    assert len(set(found)) > 90
    again = records(given(texts, seed=1, how={"order": "shuffled"}))
    assert again[:-1] == found[1:]  # the next seed's orders, one further
    for looked_at, orders in ((49 * 12, 12), (49 * 3 - 1, 3), (1, 3), (49 * 200, 100)):
        monkeypatch.setattr("memfit.runs.risk.LOOKED_AT", looked_at)
        for order in ("shuffled", "bucketed"):
            assert len(records(given(texts, how={"order": order}))) == orders
    # where texts are sorted all of them are looked at, whatever the number of steps
    assert len(records(given(texts, steps=1, how={"order": "shuffled"}))) == 100
    monkeypatch.setattr("memfit.runs.risk.LOOKED_AT", 490)
    assert len(records(given(texts, steps=1, how={"order": "bucketed"}))) == 10


class Known(Risk):
    """Chances by hand: a batch of so many per cent of tokens."""

    def __init__(self, course: Course, evaluation: float = 0.0, merge: float = 0.0) -> None:
        self.course = course
        self.chance = lambda tokens: tokens / 100
        self.of_evaluation = lambda tokens: evaluation * tokens
        self.of_merge = lambda: merge


def test_the_chance_after_each_step_is_that_of_the_orders() -> None:
    risk = Known(Course(steps=((1,),)))
    orders = (((0, 10), (2, 30)), ((0, 20), (1, 50)))
    assert risk.by(orders, 4) == pytest.approx([0.15, 0.30, 0.40, 0.40])
    assert risk.by(orders, 4, limit=25) == pytest.approx([0.15, 0.175, 0.25, 0.25])
    # the first evaluation comes after its steps, the merge behind the last
    ends = Known(
        Course(steps=((1,),), evaluate_every=2, longest=50, merged=True),
        evaluation=0.008,
        merge=0.9,
    )
    assert ends.ends(4, None) == [(1, pytest.approx(0.4)), (3, 0.9)]
    assert ends.ends(4, 25) == [(1, pytest.approx(0.2)), (3, 0.9)]
    assert ends.ends(2, None)[0] == (1, pytest.approx(0.4))
    assert ends.ends(1, None) == [(0, 0.9)]
    assert ends.by(orders, 4) == pytest.approx([0.15, 0.45, 0.45, 0.90])
    assert Known(Course(steps=((1,),), evaluate_every=0)).ends(4, None) == []


# ------------------------------------------------------------------------------------ steps
def tape(tokens: int) -> Tape:
    """Weights of 12 MiB; inputs of 2 and activations of a MiB a token; gradients of 12 and states
    of 24, which the first step makes; an evaluation of 40, and a merge of 60."""
    events: list[Event] = [Mark("load"), Alloc(0, 12 * M, "weights", "w", "parameter")]

    def step(number: int, id: int, phase_step: int) -> None:
        events.extend(
            [
                Mark("forward", "", phase_step),
                *([Free(id - 10)] if number else []),
                Alloc(id + 1, tokens * M, "activations", "w", "act"),
                Alloc(id, 2 * M, "inputs", "", "batch"),
                Mark("backward", "", phase_step),
                Alloc(id + 2, 12 * M, "gradients", "w", "grad"),
                Free(id + 1),
                Mark("step", "", phase_step),
                *([] if number else [Alloc(id + 3, 24 * M, "optimizer", "w", "state")]),
                Free(id + 2),
            ]
        )

    step(0, 10, 0)
    step(1, 20, 1)
    for phase, size, id in (("evaluate", 40, 90), ("save", 60, 91)):
        events += [Mark(phase, "", 1), Alloc(id, size * M, "logits"), Free(id)]  # type: ignore[arg-type]
    made = Tape(events=tuple(events), source="handwritten")
    check(made)
    return made


def cuts(tokens: int, first: bool) -> Cut:
    return cut(tape(tokens), first=first)


def ran(*lengths: int, capacity: int | None = None, **more: Any) -> Replayed:
    course = Course(steps=tuple((one,) for one in lengths), **more)
    return replay_run(cuts, course, Settings(), capacity)


def test_what_each_step_of_a_run_needs() -> None:
    """12 + 2 + 20 + 12 in the first backward, but 12 + 12 + 24 in its step; later 12 + 24 for
    weights and states, 2 + 30 + 12 for the batch."""
    found = ran(20, 30, 16, 30, evaluate_every=2, merged=True)
    assert [one.allocated // M for one in found.steps] == [48, 80, 66, 80]
    assert (found.load.allocated, found.load.reserved) == (12 * M, 12 * M)
    assert found.evaluation is not None
    assert found.merge is not None
    assert (found.evaluation.allocated, found.merge.allocated) == (76 * M, 96 * M)
    assert found.allocated == 96 * M
    assert (found.oom, found.died, found.died_in, found.retries) == (None, None, "", 0)
    assert ran(20, 30).evaluation is ran(20, 30).merge is None
    assert ran(20, 30, evaluate_every=3).evaluation is None
    assert ran(20, 30, evaluate_every=2).evaluation is not None


@pytest.mark.parametrize(
    ("capacity", "died", "phase", "steps"),
    [(11, 0, "load", 0), (47, 0, "step", 0), (79, 1, "step", 1), (95, 2, "merge", 3)],
)
def test_where_a_run_ends(capacity: int, died: int, phase: str, steps: int) -> None:
    found = ran(20, 30, 16, capacity=capacity * M, evaluate_every=1, merged=True)
    assert (found.died, found.died_in, len(found.steps)) == (died, phase, steps)
    assert found.oom is not None
    enough = ran(20, 30, 16, capacity=96 * M, evaluate_every=1, merged=True)
    assert enough.died is None


def test_retries_are_those_of_each_step() -> None:
    """Where a longer batch finds no room beside what is cached, it is given back, once a step."""
    found = ran(20, 30, 40, 50, capacity=106 * M)
    assert [one.allocated // M for one in found.steps] == [48, 80, 90, 100]
    assert found.retries == sum(one.retries for one in found.steps) == 2
    assert max(one.retries for one in found.steps) == 1
    whole = cut(tape(5))
    assert whole.load is not None
    assert (len(whole.began), len(whole.micro), len(whole.evaluate), len(whole.merge)) == (1,) * 4
    later = cut(tape(5), first=False)
    assert (later.load, later.began, later.begin) == (None, (), None)
    assert later.micro == whole.micro


def test_an_evaluation_of_the_longest_texts() -> None:
    assert ran(2, 2, evaluate_every=1, capacity=75 * M).died_in == "evaluation"
    assert ran(2, 2, evaluate_every=1, capacity=75 * M).died == 0
    assert ran(2, 2, evaluate_every=2, capacity=75 * M).died == 1
    assert ran(2, 2, evaluate_every=2, capacity=76 * M).died is None


def test_several_micro_batches_of_a_step() -> None:
    """Gradients stay from one to the next: the second makes none."""
    events: list[Event] = [Mark("load"), Alloc(0, 12 * M, "weights", "w", "parameter")]
    for step in (0, 1):
        for micro in (0, 1):
            at = 100 * step + 10 * micro + 10
            events += [
                Mark("forward", "", step),
                Alloc(at, 16 * M, "activations", "w", "act"),
                Mark("backward", "", step),
                *([] if micro else [Alloc(at + 1, 12 * M, "gradients", "w", "grad")]),
                Free(at),
            ]
        events += [Mark("step", "", step), Free(100 * step + 11)]
    made = Tape(events=tuple(events), source="handwritten")
    check(made)
    course = Course(steps=((1, 1),) * 6)
    found = replay_run(lambda tokens, first: cut(made, first=first), course, Settings())
    assert [one.allocated // M for one in found.steps] == [40] * 6
    assert found.replays < 6
    three = replay_run(
        lambda tokens, first: cut(made, first=first), Course(steps=((1, 1, 1),)), Settings()
    )
    assert [one.allocated // M for one in three.steps] == [40]


def test_a_step_on_a_layout_that_it_leaves_as_it_was_is_not_replayed_again() -> None:
    found = ran(*[20, 30] * 20)
    assert [one.allocated // M for one in found.steps] == [48, *([80, 70] * 20)[:39]]
    assert found.replays <= 6
    assert ran(20).replays == 1


def test_tapes_that_are_no_run() -> None:
    phases: tuple[Phase, ...] = ("load", "forward")
    without = Tape(events=tuple(map(Mark, phases)), source="handwritten")
    with pytest.raises(TapeError, match="needs a tape with an optimizer step"):
        cut(without)
    again = Tape(
        events=(Mark("load"), Alloc(0, 1, "weights")),
        source="handwritten",
        repeats=(Repeat(0, 2, 2),),
    )
    with pytest.raises(TapeError, match="compact tape"):
        cut(again)
    longest = Tape(events=(Mark("load"), Mark("step", "", LONGEST)), source="handwritten")
    with pytest.raises(TapeError, match="needs a tape with an optimizer step"):
        cut(longest)


def test_what_steps_need_together() -> None:
    some = Replayed(
        steps=(Step(5, 7, 1), Step(6, 6, 2)),
        load=Step(1, 9),
        evaluation=Step(8, 8, 4),
        merge=None,
        oom=None,
        died=None,
        died_in="",
        replays=2,
    )
    assert (some.allocated, some.reserved, some.retries) == (8, 9, 7)


def test_lengths_are_rounded_up_to_few_shapes() -> None:
    walker = Walker(None, Job(), 4800)
    assert [walker.shape(tokens) for tokens in (1, 100, 101, 4701, 4800)] == [
        100,
        100,
        200,
        4800,
        4800,
    ]
    assert Walker(None, Job(), 4801).quantum == 101
    assert Walker(None, Job(), 10).quantum == 1
    assert Walker(None, Job(), 4800, 64).quantum == 128
