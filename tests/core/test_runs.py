"""A whole run over real lengths: steps of several lengths through one allocator, and what the
answer says of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import memfit
from memfit.api.question import Question, question
from memfit.cli import main
from memfit.errors import InputError
from memfit.lower import lower
from memfit.runs.batches import Sampling, batches, longest_batches, ordered
from memfit.runs.lengths import read_lengths
from memfit.runs.texts import Counting
from memfit.simulate.replay import replay
from memfit.simulate.run import Course, Cut, cut, replay_run
from memfit.simulate.settings import Settings

SMALL = "llama-3.2-1b"
FEW = {"prune": "layers=4"}
QUESTIONS: tuple[dict[str, Any], ...] = (
    {"method": "lora", "batch": 4, "seq": 512},
    {"method": "full", "batch": 2, "seq": 512, "framework": "transformers"},
    {"method": "qlora", "batch": 2, "seq": 384, "accumulate": 2},
    {"method": "lora", "batch": 2, "seq": 256, "use": "fsdp=2", "gpu": "2xrtx-4090"},
)


def asked(**given: Any) -> Question:
    return question(SMALL, {"gpu": "rtx-4090", "framework": "trl", **given}, [])


def cuts_of(asked: Question) -> Any:
    def cuts(tokens: int, first: bool) -> Cut:
        job = asked.job.replace(seq=tokens)
        return cut(lower(asked.model, job, asked.strategy, asked.cluster), first=first)

    return cuts


@pytest.mark.parametrize("given", QUESTIONS, ids=lambda one: str(one["method"]))
def test_steps_of_one_length_are_what_the_tape_of_that_length_is(given: dict[str, Any]) -> None:
    one = asked(**given)
    tape = lower(one.model, one.job, one.strategy, one.cluster)
    steps = Course(steps=((one.job.seq,) * min(2, one.job.accumulate),) * 3)
    found, alone = replay_run(cuts_of(one), steps, Settings()), replay(tape)
    # A batch goes at the end of its step here, and when the next one is there in a real run
    slack = 3 * 8 * one.job.batch * one.job.seq + 2**20
    assert abs(found.allocated - alone.peak_allocated) <= slack
    assert abs(found.reserved - alone.peak_reserved) <= 2 * 2**21
    assert found.oom is None
    assert len(found.steps) == 3


def test_a_longer_step_is_what_the_tape_with_a_longest_batch_is() -> None:
    one = asked(method="lora", batch=2, seq=300)
    tape = lower(one.model, one.job.replace(longest=700), one.strategy, one.cluster)
    found, alone = (
        replay_run(cuts_of(one), Course(steps=((300,), (300,), (700,))), Settings()),
        replay(tape),
    )
    assert abs(found.allocated - alone.peak_allocated) <= 2**20
    assert abs(found.reserved - alone.peak_reserved) <= 2 * 2**21


def test_steps_that_change_nothing_are_not_replayed_again() -> None:
    one = asked(method="lora", batch=2, seq=512)
    found = replay_run(cuts_of(one), Course(steps=((512,), (256,)) * 20), Settings())
    assert len(found.steps) == 40
    assert found.replays < 12
    assert found.steps[-1].reserved == found.reserved


def test_different_lengths_leave_gaps_that_one_length_does_not() -> None:
    one = asked(method="lora", batch=2, seq=512)
    lengths = (300, 500, 220, 512, 410, 130, 360, 470, 250, 512, 90, 440)
    varied = replay_run(cuts_of(one), Course(steps=tuple((at,) for at in lengths)), Settings())
    steady = replay_run(cuts_of(one), Course(steps=((512,),) * 3), Settings())
    assert varied.allocated <= steady.allocated + 2**20
    assert varied.reserved > steady.reserved


def test_a_run_ends_in_the_step_that_finds_no_memory() -> None:
    one = asked(method="lora", batch=4, seq=512)
    course = Course(steps=((64,), (128,), (512,), (64,)))
    room = replay_run(cuts_of(one), Course(steps=((128,),) * 3), Settings()).reserved
    found = replay_run(cuts_of(one), course, Settings(), room)
    assert found.died == 2
    assert found.oom is not None
    assert len(found.steps) == 2


# ------------------------------------------------------------------------------------ the answer
def test_the_answer_has_the_curve_the_peak_and_the_probability(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(map(str, [*range(100, 900, 40)] * 6)))
    found = memfit.estimate(
        SMALL, gpu="rtx-4090", method="lora", batch=4, seq=800, lengths=str(file), memory="4500MiB"
    )
    run = found.run
    assert run is not None
    assert run.probability is not None
    assert len(run.steps) == run.epoch == 120 // 4
    reserved = [one.reserved for one in run.steps]
    assert reserved == sorted(reserved)
    assert reserved[-1] == run.reserved > reserved[0]
    assert run.worst.tokens == max(one.tokens for one in run.steps) == 800
    assert int(file.read_text().splitlines()[run.worst.line - 1]) >= 800
    assert [chance for _, chance in run.by] == sorted(chance for _, chance in run.by)
    assert 0 < run.padding < 0.5
    assert run.texts.limit == 800
    assert run.texts.longest > 800
    assert run.texts.cut > 0
    said = found.summary()
    assert "chance of running out of memory in" in said
    assert "reserved memory over" in said
    assert json.loads(memfit.write(found, "json"))["run"]["probability"] == run.probability


def test_the_same_seed_gives_the_same_answer() -> None:
    options: dict[str, Any] = {"gpu": "rtx-4090", "method": "lora", "batch": 4, "steps": 6, **FEW}
    spec = "lognormal:mean=200,p99=800"
    one, again, other = (
        memfit.estimate(SMALL, lengths=spec, seed=seed, **options).run for seed in (1, 1, 2)
    )
    assert one == again != other


def test_more_memory_never_makes_a_run_more_likely_to_fail() -> None:
    chances = []
    for memory in ("2GiB", "12GiB"):
        found = memfit.estimate(
            SMALL, memory=memory, method="lora", batch=8, steps=4, seq=1024, **FEW,
            lengths="uniform:min=900,max=1000",
        )  # fmt: skip
        assert found.run is not None
        chances.append(found.run.probability)
    assert chances == sorted(chances, reverse=True)
    assert chances[0] == 1
    assert chances[-1] == 0


def test_a_run_that_may_fail_says_what_would_change_it() -> None:
    found = memfit.estimate(
        SMALL, gpu="rtx-4090", memory="4400MiB", method="lora", batch=4, steps=8, seq=1024,
        lengths="uniform:min=200,max=1000",
    )  # fmt: skip
    run = found.run
    assert run is not None
    assert found.verdict in ("tight", "no")
    changes = {one.name: one for one in run.changes}
    now, expandable = changes["as it is"], changes["expandable_segments"]
    assert now.probability == run.probability
    assert now.reserved is not None
    assert expandable.reserved is not None
    assert expandable.reserved < now.reserved
    assert changes["packing"].slower is not None
    assert found.next_way is not None
    assert "--lengths uniform:min=200,max=1000 --steps 8" in found.next_way.command


def test_evaluations_and_the_merge_come_at_their_steps() -> None:
    options: dict[str, Any] = {"memory": "24GiB", "method": "lora", "batch": 1, "steps": 4, **FEW}
    spec = "uniform:min=100,max=200"
    plain = memfit.estimate(SMALL, lengths=spec, **options).run
    both = memfit.estimate(
        SMALL, lengths=spec, evaluate=True, evaluate_every=2, eval_batch=32, merge=True, **options
    ).run
    assert plain is not None
    assert both is not None
    assert plain.evaluation is None
    assert both.evaluation is not None
    assert both.evaluation > plain.allocated
    assert both.reserved >= both.evaluation
    assert both.steps[1].reserved <= both.steps[2].reserved


def test_an_evaluation_that_finds_no_memory_does_not_fit() -> None:
    spec = "uniform:min=50,max=2000"
    options: dict[str, Any] = {
        "method": "lora", "batch": 1, "steps": 4, "seq": 2048, "lengths": spec, **FEW
    }  # fmt: skip
    evaluated = {"evaluate": True, "evaluate_every": 2, "eval_batch": 16}
    found = memfit.estimate(SMALL, memory="4784MiB", **evaluated, **options)
    run = found.run
    assert run is not None
    assert (run.died, run.died_in) == (3, "evaluation")
    assert found.verdict == "tight"
    said = found.summary()
    assert "this order runs out of memory in the evaluation after step 4" in said
    assert "fits only because" not in said
    chances = []
    for more in ({}, evaluated):
        less = memfit.estimate(SMALL, memory="3GiB", **more, **options)
        assert less.run is not None
        chances.append([chance for _, chance in less.run.by])
    assert chances[0] == [0, 0, 0]
    assert chances[1] == [0, 1, 1]  # after the first evaluation
    assert less.verdict == "no"


def test_a_merge_that_finds_no_memory_counts() -> None:
    one = asked(method="lora", batch=1, seq=16, merge=True, **FEW)
    course = Course(steps=((16,), (8,)), merged=True)
    free = replay_run(cuts_of(one), course, Settings())
    assert free.merge is not None
    steps = max(step.reserved for step in (free.load, *free.steps))
    short = replay_run(cuts_of(one), course, Settings(), steps)
    assert (short.died, short.died_in, len(short.steps)) == (1, "merge", 2)


def test_checkpoints_are_counted_and_weighed() -> None:
    found = memfit.estimate(
        SMALL, gpu="rtx-4090", method="lora", batch=1, steps=6, save_every=2,
        lengths="uniform:min=100,max=120",
    )  # fmt: skip
    assert found.run is not None
    saved = found.run.checkpoints
    assert saved is not None
    assert saved.count == 3
    assert saved.weights == 4 * found.parameters.trainable
    assert saved.states == pytest.approx(2 * saved.weights, rel=0.01)


def test_adapters_are_saved_in_the_format_that_the_program_gives_them() -> None:
    spec, sizes = "uniform:min=100,max=120", {}
    for peft in ("0.11", "0.18"):
        run = memfit.estimate(
            SMALL, gpu="rtx-4090", method="lora", precision="bf16", batch=1, steps=2, lengths=spec,
            framework="transformers", versions=f"peft={peft}", **FEW,
        ).run  # fmt: skip
        assert run is not None
        assert run.checkpoints is not None
        sizes[peft] = run.checkpoints.weights
    assert sizes["0.18"] == 2 * sizes["0.11"]


@pytest.mark.parametrize(
    ("use", "whole"),
    [("ddp=2", True), ("fsdp=2", False), ("fsdp=2,version=1,shard=no", True), ("zero=2", False)],
)
def test_checkpoints_are_known_where_no_layout_shards(use: str, whole: bool) -> None:
    run = memfit.estimate(
        SMALL, gpus="2xrtx-4090", use=use, method="lora", batch=1, steps=2, **FEW,
        lengths="uniform:min=100,max=120",
    ).run  # fmt: skip
    assert run is not None
    assert (run.checkpoints is not None) == whole


def test_the_bill_of_a_run_has_the_runs_own_time() -> None:
    found = memfit.estimate(
        SMALL, gpu="rtx-4090", method="lora", batch=2, steps=20, examples=4000, **FEW,
        lengths="lognormal:mean=200,p99=900", seq=1024,
    )  # fmt: skip
    run, paid = found.run, found.bill
    assert run is not None
    assert run.seconds is not None
    assert paid is not None
    assert paid.steps == run.epoch == 2000
    assert 3600 * paid.hours == pytest.approx(run.seconds / 20 * run.epoch)
    tokens = memfit.estimate(
        SMALL, gpu="rtx-4090", method="lora", batch=2, steps=20, dataset_tokens=paid.tokens, **FEW,
        lengths="lognormal:mean=200,p99=900", seq=1024,
    )  # fmt: skip
    assert tokens.bill is not None
    assert tokens.run is not None
    assert 3600 * tokens.bill.hours == pytest.approx(
        paid.tokens / tokens.run.tokens_per_second, rel=0.01
    )


def test_a_command_for_the_run_keeps_the_number_of_texts() -> None:
    found = memfit.estimate(
        SMALL, gpu="rtx-4090", memory="4400MiB", method="lora", batch=4, steps=4, seq=1024,
        lengths="uniform:min=600,max=1000", examples=300,
    )  # fmt: skip
    assert found.next_way is not None
    assert "--examples 300" in found.next_way.command


def test_a_rank_of_several_has_batches_of_its_own() -> None:
    one = memfit.estimate(
        SMALL, gpu="rtx-4090", method="full", batch=1, steps=4, accumulate=2, **FEW,
        lengths="uniform:min=100,max=900", seq=900,
    ).run  # fmt: skip
    found = memfit.estimate(
        SMALL, gpus="4xrtx-4090", use="fsdp", method="full", batch=1, steps=4, accumulate=2, **FEW,
        lengths="uniform:min=100,max=900", seq=900,
    )  # fmt: skip
    run = found.run
    assert run is not None
    assert run.checkpoints is None
    assert run.epoch == 10_000 // 8
    assert one is not None
    # The same order of texts, dealt to four ranks: other batches, and more of them in each step
    assert [step.tokens for step in run.steps] != [step.tokens for step in one.steps]
    assert sum(step.tokens for step in run.steps) > sum(step.tokens for step in one.steps)
    assert run.worst.tokens == max(one.tokens for one in run.steps)
    assert found.memory.reserved == max(run.reserved, found.memory.allocated)


def test_the_command_line_takes_the_trainers_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps({"text": "a" * n}) for n in range(100, 900, 50)))
    words = ["estimate", SMALL, "--memory", "24GiB", "--lora", "--lengths", str(file)]
    more = ["--tokens-per-char", "0.5", "--group-by-length", "--pad-to-multiple-of", "32"]
    assert main([*words, *more, "--batch", "2", "--max-steps", "3", "--json"]) == 0
    run = json.loads(capsys.readouterr().out)["run"]
    assert (run["order"], run["steps"], run["epoch"]) == ("grouped", 3, 8)
    assert run["worst"]["step"] == 1
    assert run["worst"]["tokens"] == 448
    assert [one["step"] for one in run["curve"]] == [1, 2, 3]
    assert main([*words, "--batch", "0", "--json"]) == 2
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert len(problems) == 2  # of the batch, and of the tokenizer


# --------------------------------------------------------------------------- batches and lengths
def test_batches_are_what_their_order_says() -> None:
    tokens = [10, 300, 20, 40, 30, 290, 15, 280]
    for order, longest in (("as-is", (300, 40, 290, 280)), ("sorted", (15, 30, 280, 300))):
        made = batches(tokens, Sampling(batch=2, limit=1000, order=order), 4, 0)
        assert made.longest == longest
    made = batches(tokens, Sampling(batch=2, limit=100, multiple=64, order="as-is"), 1, 0)
    assert made.longest == (128,)
    packed = batches(tokens, Sampling(batch=2, limit=100, packing=True), 3, 0)
    assert packed.longest == (100,) * 3
    assert packed.padding == 0


@pytest.mark.parametrize("order", ["shuffled", "as-is", "sorted", "grouped", "bucketed"])
def test_every_text_comes_once_in_an_epoch(order: str) -> None:
    tokens = [7 * number % 101 + 1 for number in range(96)]
    how = Sampling(batch=4, limit=1000, order=order, ranks=2)
    made = batches(tokens, how, 12, 3)
    assert made.real == sum(tokens)
    assert list(longest_batches(tokens, how, 12, 3)) == list(made.longest)
    assert made == batches(tokens, how, 12, 3)


def test_grouping_sorts_so_many_steps_as_the_trainer_does() -> None:
    how = Sampling(batch=2, limit=1000, order="grouped", accumulate=4)
    order = ordered(range(1, 8 * 200 + 1), how, random.Random(0), 0)
    falls = [at for at in range(1, len(order)) if order[at] > order[at - 1]]
    assert min(falls) == 50 * 2 * 4


def test_grouping_by_length_wastes_less_padding() -> None:
    lengths = read_lengths("lognormal:mean=300,p99=1500", Counting())
    found = {
        order: batches(lengths.tokens, Sampling(batch=8, limit=2048, order=order), 500, 0).padding
        for order in ("shuffled", "grouped", "bucketed")
    }
    assert found["shuffled"] > 3 * found["grouped"]
    assert found["shuffled"] > 1.5 * found["bucketed"]


def test_a_distribution_has_the_mean_and_the_quantile_that_it_was_given() -> None:
    lengths = read_lengths("lognormal:mean=400,p99=2000", Counting(), examples=50_000)
    assert lengths.mean == pytest.approx(400, rel=0.02)
    assert lengths.quantile(0.99) == pytest.approx(2000, rel=0.05)
    by_median = read_lengths("lognormal:median=400,p99=2000", Counting(), examples=50_000)
    assert by_median.quantile(0.5) == pytest.approx(400, rel=0.02)


ROWS = (
    ({"text": "abcdefgh"}, 2),
    ({"length": 17}, 17),
    ({"input_ids": [1, 2, 3]}, 3),
    ({"prompt": "abcd", "completion": "abcdefgh"}, 3),
    ({"instruction": "abcd", "input": "", "output": "abcd"}, 2),
    ({"instruction": "abcd", "input": None, "output": "abcd"}, 2),
    ({"text": None, "prompt": "abcd", "completion": "abcdefgh"}, 3),
    ({"messages": [{"role": "user", "content": "abcd"}] * 2}, 2 * (5 + 1)),
    ({"conversations": [{"from": "human", "value": "abcdefgh"}]}, 5 + 2),
)

EMPTY = (
    '{"text": ""}', '{"text": null}', '{"messages": []}', '{"input_ids": []}', "[]", "null", '""',
    '{"prompt": null, "completion": null}',
)  # fmt: skip


def test_lines_of_every_known_kind_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    lines = [json.dumps(row) for row, _ in ROWS]
    file.write_text("\n".join([*lines, "", *EMPTY, ""]))
    found = read_lengths(str(file), Counting(tokens_per_char=0.25))
    assert list(found.tokens) == [length for _, length in ROWS]
    assert found.empty == len(EMPTY)
    assert list(found.lines) == list(range(1, len(ROWS) + 1))


BAD = (
    (b"", "has no texts"),
    (b"12\n-3\n0\nx\n", "line 2"),
    (b"\x00\x01\x02\xff" * 50, "binary file"),
    (b"\xff\xfe\xfa\n", "not a text file"),
    (b'{"body": "a long text", "id": "7"}\n', "`body` has the longest text"),
    (b'{"txet": "a"}\n', "did you mean `text`"),
    (b'{"text": "a"\n', "not valid JSON"),
    (b'{"text": "a"}\n', "need a tokenizer"),
    (b'{"messages": [1.5]}\n', "not a message"),
    (b'{"text": 5}\n', "`text` is neither a text nor messages"),
    (b'{"tokens": ["a", "b"]}\n', "`tokens` is not a list of token ids"),
    (b'{"length": 2.5}\n', "`length` is not an integer"),
    (b"4294967296\n", "below 2^32 tokens"),
    (b'{"length": 9' + b"9" * 4000 + b"}\n", "below 2^32 tokens"),
)


@pytest.mark.parametrize(("raw", "said"), BAD, ids=lambda one: str(one)[:20])
def test_unusable_files_are_refused_with_the_reason(raw: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(raw)
    with pytest.raises(InputError) as found:
        memfit.estimate(SMALL, gpu="rtx-4090", lengths=str(file), optimizer="nothing")
    text = str(found.value)
    assert said in text
    assert "unknown optimizer" in text  # with everything else that is wrong


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("512,2048", "`memfit study --lengths"),
        ("2k", "`memfit study --lengths"),
        ("lognormal:mean=400", "needs `mean` and `p99`"),
        ("lognormal:mean=400,p99=300", "must be above"),
        ("lognormal:mean=10,p99=9000", "at most"),
        ("lognormal:mean=x,p98=3", "has no `p98`"),
        ("normal:mean=3", "unknown distribution"),
        ("missing.jsonl", "does not exist"),
        ("~nosuchuser/x.jsonl", "home folder of an unknown user"),
        ("x" * 5000, "name is too long"),
        ("uniform:" + "x" * 5000, "`uniform` has no"),
        ("a\0b", "not a valid path"),
    ],
)
def test_unusable_specifications_are_refused(spec: str, said: str) -> None:
    with pytest.raises(InputError) as found:
        memfit.estimate(SMALL, gpu="rtx-4090", lengths=spec)
    assert said in str(found.value)


def test_a_tokenizer_of_an_unknown_user_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "a"}\n')
    with pytest.raises(InputError, match="home folder of an unknown user"):
        memfit.estimate(SMALL, gpu="rtx-4090", lengths=str(file), tokenizer="~nosuchuser/t.json")


def test_a_tokenizer_counts_whole_texts(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_truncation(8)
    made.enable_padding(length=6)
    made.save(str(tmp_path / "tokenizer.json"))
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps({"text": "a " * n}) for n in (3, 20)))
    counting = Counting(tokenizer=str(tmp_path))
    assert list(read_lengths(str(file), counting).tokens) == [3, 20]
    file.write_text('{"text": "a \\ud83d"}\n')
    with pytest.raises(InputError, match="not valid Unicode"):
        read_lengths(str(file), counting)


def test_of_very_many_texts_a_sample_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.runs.lengths.KEPT", 500)
    spec = "uniform:min=10,max=20"
    found = read_lengths(spec, Counting(), examples=10**9)
    assert (len(found.tokens), found.total) == (500, 10**9)
    run = memfit.estimate(
        SMALL, memory="24GiB", method="lora", batch=4, steps=2, lengths=spec, examples=10**9, **FEW
    ).run
    assert run is not None
    assert run.epoch == 10**9 // 4


def test_options_of_a_run_need_lengths() -> None:
    with pytest.raises(InputError, match="needs `--lengths`"):
        memfit.estimate(SMALL, gpu="rtx-4090", order="sorted")
    with pytest.raises(InputError, match="needs `--evaluate`"):
        memfit.estimate(SMALL, gpu="rtx-4090", lengths="uniform:min=1,max=9", evaluate_every=5)


def test_context_parallelism_says_how_to_pad() -> None:
    with pytest.raises(InputError, match="add `--pad-to-multiple 4`"):
        memfit.estimate(SMALL, gpus="4xh100", use="cp=2,fsdp=2", lengths="uniform:min=9,max=99")


def test_a_plan_takes_the_length_that_decides() -> None:
    spec = "uniform:min=100,max=400"
    found = memfit.plan(SMALL, gpu="rtx-4090", method="lora", seq=1000, lengths=spec)
    assert 100 < found.work.job.seq <= 400
    assert found.rows[0].cost is not None
    for packing in ("on", "1", "True"):
        packed = memfit.plan(
            SMALL, gpu="rtx-4090", method="lora", seq=300, lengths=spec, packing=packing
        )
        assert packed.work.job.seq == 300
    with pytest.raises(InputError, match="training only"):
        memfit.plan(SMALL, gpu="rtx-4090", task="inference", lengths=spec)
    with pytest.raises(InputError, match="`steps` does not apply to a plan"):
        memfit.plan(SMALL, gpu="rtx-4090", lengths=spec, steps=5)
