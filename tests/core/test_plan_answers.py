"""Plans for inference: the answer is that of trying everything, limits hold, bad input is told at
once, and published speeds agree with the order."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import combinations, product

import pytest

from memfit.api.plan import plan as ask
from memfit.api.verbs import estimate as answer
from memfit.cli import main
from memfit.errors import InputError
from memfit.estimate import estimate
from memfit.hardware import parse_cluster, usable
from memfit.job import Job
from memfit.plan.goals import Limits, pace
from memfit.plan.inference import ALIKE, QUARTERS
from memfit.plan.weights import WEIGHTS, models
from memfit.report.plan import data, job_file, markdown, text
from memfit.report.serving import rate
from memfit.strategy import ONE, TP, Strategy
from memfit.truth.speed import speeds
from memfit.words.models import model_of
from memfit.words.options import Ask

LLAMA = "meta-llama/Llama-3.2-1B"
SHORT = {"task": "inference", "seq": 512, "new_tokens": 32, "framework": "transformers"}
LONG = 4096  # tokens of prompts of which few fit at once
SMALL = {**SHORT, "seq": LONG, "weights": "own,nf4", "cache": "dynamic,static", "attention": "sdpa"}


def tried_one_by_one(gpu, requests, weights, caches):
    """Every way with every number of sequences that the guide names, by whole estimates; what fits,
    with its place."""
    _, model = model_of(LLAMA, Ask(offline=True))
    whole = parse_cluster(gpu)
    found = []
    sizes = [size for size in (1, 2) if whole.gpus % size == 0]
    for (row, form), cache, size in product(models(model, weights, {}), caches, sizes):
        groups = min(whole.gpus // size, requests or whole.gpus)
        strategy = ONE if size == 1 else Strategy(tp=TP(size=size))
        cluster = parse_cluster(f"{size}x{whole.gpu.id}")

        def one(
            batch,
            row=row,
            form=form,
            cache=cache,
            strategy=strategy,
            cluster=cluster,
            groups=groups,
        ):
            job = Job(
                task="inference", seq=LONG, new_tokens=32, cache=cache, quant=row.quant, batch=batch
            )
            try:
                said = estimate(form, job, cluster, strategy)
            except InputError:
                return None
            return (
                None
                if said.verdict != "fits"
                else (
                    row.name,
                    cache,
                    strategy.size("tp"),
                    batch,
                    pace(said.generation, requests or groups * batch),
                )
            )

        batches = [-(-requests // groups)] if requests else [2**power for power in range(8)]
        fitting = [entry for batch in batches if (entry := one(batch))]
        if fitting and not requests:
            top = fitting[-1][3]
            fitting += [entry for quarter in QUARTERS if (entry := one(top * quarter // 4))]
            fitting += [entry for quarter in QUARTERS if (entry := one(2 * top * quarter // 4))]
        found += fitting
    return found


@pytest.mark.parametrize(
    ("gpu", "goal", "requests"),
    [
        ("1xl4", "throughput", 0),
        ("2xl4", "latency", 3),
        ("2xl4", "throughput", 24),
        ("2xrtx-4090", "latency", 64),
    ],
)
def test_the_answer_is_that_of_trying_all(gpu, goal, requests):
    every = tried_one_by_one(gpu, requests, ("own", "nf4"), ("dynamic", "static"))
    found = ask(LLAMA, gpu=gpu, goal=goal, requests=str(requests) if requests else "", **SMALL)
    first = found.rows[0]
    assert first.estimate.verdict == "fits"
    assert first.estimate.band.high <= usable(found.cluster.gpu)
    quickest, most = (
        min(one[-1].seconds for one in every),
        max(one[-1].tokens_per_second for one in every),
    )
    if goal == "latency":
        assert quickest <= first.pace.seconds <= quickest * (1 + ALIKE)
    else:
        assert most >= first.pace.tokens_per_second >= most / (1 + ALIKE)
    known = {(name, cache, size, batch): told for name, cache, size, batch, told in every}
    for row in (*found.rows, *found.trade):
        job = row.estimate.job
        assert (
            known[row.kind.method, job.cache, row.estimate.strategy.size("tp"), job.batch]
            == row.pace
        )
    for *_, told in every:  # the front beats, or is, all
        assert any(
            one.pace.seconds <= told.seconds
            and one.pace.tokens_per_second * (1 + ALIKE) >= told.tokens_per_second
            for one in found.trade
        )
    order = [(one.pace.seconds, one.pace.tokens_per_second) for one in found.trade]
    assert order == sorted(order)


def sweeps():
    """Of one model on one GPU, at one length of prompts: (measured, predicted) tokens per second by
    the form of the weights."""
    found = defaultdict(dict)
    for one in speeds(source="QwenLM/Qwen3").found:
        job, stored = one.case.job, json.loads(one.case.stored or "{}")
        name = f"{stored['quant_method']}-{stored['bits']}bit" if stored else "own"
        found[one.case.model, one.case.gpu.id, job.seq][name] = one.measured, one.predicted
    return {key: ways for key, ways in found.items() if len(ways) > 1}


def test_the_choice_of_weights_is_compared_with_published_speeds():
    """Qwen's pages: 34 sweeps of two or three forms of weights. The plan's choice (of what is alike
    the plainest) is within 5 % of the quickest in 24 of them and 12.5 % behind at worst; where it
    errs, GPTQ's or AWQ's 4 bits are quicker than 16 or than one another, which no count of kernels
    tells."""
    lost, right, told = [], 0, 0
    for ways in sweeps().values():
        most = max(predicted for _, predicted in ways.values())
        choice = next(
            name for name in WEIGHTS if name in ways and ways[name][1] * (1 + ALIKE) >= most
        )
        lost.append(1 - ways[choice][0] / max(measured for measured, _ in ways.values()))
        for one, other in combinations(ways.values(), 2):
            if max(one[1], other[1]) > min(one[1], other[1]) * (1 + ALIKE):
                told += 1
                right += (one[0] > other[0]) == (one[1] > other[1])
    assert len(lost) == 34
    assert sum(one <= 0.05 for one in lost) >= 24
    assert max(lost) < 0.13
    assert (right, told) == (26, 32)


def test_what_is_alike_is_done_the_plainest_way():
    """Small models wait for the host whatever their weights are: those of the checkpoint come
    first, and no other kernels are asked for."""
    first = ask(
        LLAMA, gpu="1xh100-sxm", goal="latency", **{**SMALL, "weights": "awq-4bit,own,gptq-4bit"}
    ).rows[0]
    assert first.kind.method == "own"
    assert not first.gives_up


def test_rows_are_those_that_memfit_answers_the_same_for(tmp_path):
    found = ask(
        LLAMA, gpu="2xl4", requests="4", goal="latency", use="tp=2", **{**SMALL, "weights": "own"}
    )
    row, file = found.rows[0], tmp_path / "job.yaml"
    file.write_text(job_file(found, row))
    said = answer(str(file))
    assert said.device == row.estimate.device
    assert said.generation.seconds == row.pace.seconds
    assert said.cluster.gpus == 2


def test_limits_hold_and_what_nobody_meets_is_told(capsys):
    told = {**SMALL, "weights": "own", "cache": "static"}
    most = ask(LLAMA, gpu="2xl4", **told).rows[0].pace
    held = ask(LLAMA, gpu="2xl4", max_latency=f"{most.seconds * 500:.0f}ms", **told)
    assert held.rows
    assert all(row.pace.seconds <= most.seconds / 2 for row in (*held.rows, *held.trade))
    assert held.rows[0].pace.tokens_per_second < most.tokens_per_second
    few = [
        "--weights",
        "own",
        "--cache",
        "static",
        "--attention",
        "sdpa",
        "--framework",
        "transformers",
    ]
    assert (
        main(
            [
                "plan",
                LLAMA,
                "--task",
                "inference",
                "--gpus",
                "1xl4",
                "--seq",
                "512",
                "--new-tokens",
                "32",
                "--max-token",
                "1ms",
                *few,
            ]
        )
        == 1
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "% of a token's time is matrix multiplications" in said
    assert "the nearest plan that fits," in said
    assert [what for what, _, _ in Limits(first=1e-3, tokens_per_second=1e9).broken(most)] == [
        "time to first token",
        "tokens per second",
    ]


def test_money_is_a_pace():
    """All GPUs are paid for, so that a million tokens for less means more of them a second."""
    told = {**SMALL, "gpu": "2xrtx-4090", "goal": "latency", "requests": "", "price": 1.0}
    alone = ask(LLAMA, **told)
    many = ask(LLAMA, budget_money=alone.rows[0].cost.dollars / 2, **{**told, "requests": "16"})
    assert many.rows[0].cost.dollars <= alone.rows[0].cost.dollars / 2
    broke = ask(LLAMA, budget_money=1e-6, **told)
    assert not broke.rows
    assert "37 tokens per second; the goal is 5" in broke.reason
    assert broke.nearest.rows


@pytest.mark.parametrize(
    ("model", "gpu"),
    [("Qwen/Qwen2.5-14B-Instruct", "1xrtx-4090"), ("meta-llama/Llama-3.1-70B", "1xl4")],
)
def test_the_nearest_where_nothing_fits(model, gpu):
    found = ask(
        model,
        gpu=gpu,
        **{
            **SHORT,
            "requests": "2",
            "goal": "latency",
            "cache": "static",
            "attention": "sdpa",
            "weights": "own",
        },
    )
    assert not found.fits
    assert found.nearest.rows[0].estimate.verdict == "fits"
    assert any(one.needs and one.largest[0] == "weights" for one in found.dropped)
    assert "of which weights" in " ".join(text(found).split())
    assert "the nearest plan that fits," in markdown(found)


def test_no_gpus_and_far_too_many():
    none = ask(LLAMA, gpu="0xl4", **SMALL)
    assert not none.rows
    assert none.nearest.rows
    many = ask(
        LLAMA,
        gpu="12500x8xl4",
        **{**SMALL, "weights": "own", "cache": "static", "goal": "latency", "requests": "7"},
    )
    assert many.rows


def test_the_cheapest_machine():
    found = ask(
        LLAMA,
        gpu="cheapest",
        **{**SMALL, "goal": "latency", "max_latency": "60s", "weights": "own", "cache": "static"},
    )
    assert found.rows
    assert found.cluster.gpus == 1
    few = {"goal": "latency", "weights": "awq-4bit", "cache": "static", "attention": "sdpa"}
    several = ask("meta-llama/Llama-3.1-70B", gpu="cheapest", **{**SHORT, **few})
    assert several.cluster.gpus > 1  # whatever the number of requests
    assert several.rows[0].kind.layout == f"tp {several.cluster.gpus}"
    assert any(one.layout.startswith("1 x ") for one in several.dropped)


def test_weights_that_are_stored_already_or_become_16_bits():
    found = ask(LLAMA, gpu="1xa100-sxm-80gb", **{**SMALL, "weights": "own,fp8", "requests": "1"})
    assert [row.kind.method for row in found.rows] == ["own"]
    assert any(one.method == "fp8" and "16 bits" in one.refused for one in found.dropped)
    with pytest.raises(InputError, match="hint: use `own`, or name the 16-bit checkpoint"):
        ask("Qwen/Qwen3-32B-FP8", gpu="1xh100-sxm", **{**SMALL, "weights": "nf4"})
    assert WEIGHTS["nf4"].quant == "nf4"


def test_what_is_refused_is_told_of_its_own_layouts():
    found = ask(
        LLAMA, gpu="4xl4", **{**SMALL, "goal": "latency", "weights": "own,int8", "cache": "static"}
    )
    assert [(one.method, one.layout) for one in found.dropped if one.refused] == [
        ("int8", "tp 2, tp 4")
    ]
    nothing = ask(LLAMA, gpu="1xa100-sxm-80gb", **{**SMALL, "weights": "fp8"})
    assert not nothing.rows
    assert "this GPU has no kernels for these weights: they are" in nothing.reason
    assert nothing.nearest.rows


def test_a_layout_without_a_size_takes_all():
    (row,) = ask(
        LLAMA,
        gpu="2xl4",
        use="tp",
        **{**SMALL, "weights": "own", "cache": "static", "requests": "2"},
    ).rows
    assert row.kind.layout == "tp 2"


def test_quant_is_a_form_of_weights():
    told = {**SMALL, "weights": "any", "cache": "static", "requests": "2", "goal": "latency"}
    (row,) = ask(LLAMA, gpu="1xl4", quant="nf4", **told).rows
    assert (row.kind.method, row.estimate.job.quant) == ("nf4", "nf4")
    assert row.gives_up[0].startswith("4-bit weights")
    (other,) = ask(LLAMA, gpu="1xl4", quant="fp4", **told).rows
    assert (other.kind.method, other.estimate.job.quant) == ("own", "fp4")


def test_less_than_ten_tokens_a_second_are_no_zero():
    assert [rate(tokens) for tokens in (0.512, 3.26, 10.4, 2683.2)] == [
        "0.51",
        "3.3",
        "10",
        "2,683",
    ]


BAD = (
    ({"seq": 0}, "`0` is out of range"),
    ({"new_tokens": 0}, "a plan for inference must generate at least 1 token"),
    ({"goal": "fastest"}, "unknown goal `fastest`"),
    ({"requests": "-3"}, "`-3` is not a number of requests"),
    (
        {"requests": "as-many-as-fit", "goal": "latency"},
        "the goal `latency` is for one request, not for as many as fit",
    ),
    (
        {"requests": "4", "batch": "2"},
        "`batch` and `requests` both set the number of concurrent requests",
    ),
    ({"max_latency": "0s"}, "`0s` must be more than 0 seconds"),
    ({"max_token": "soon"}, "`soon` is not a duration"),
    (
        {"max_first": "2s", "max_latency": "1s"},
        "the limit of the first token is longer than that of the whole request",
    ),
    ({"weights": "nf5"}, "unknown weight format `nf5`"),
    ({"weights": ","}, "`weights` names no format"),
    ({"weights": "own,fp8", "quant": "nf4"}, "`quant` is nf4, but `weights` allows own, fp8"),
    ({"global_batch": 8}, "applies to plans to train only"),
    ({"use": "tp=2", "gpu": "3xl4"}, "2 ranks do not divide 3 GPUs"),
    ({"use": "ddp=3", "gpu": "2xl4"}, "3 ranks do not divide 2 GPUs"),
    ({"use": "ddp=2 tp=2", "gpu": "8xl4"}, "the layouts take 4 of 8 GPUs"),
    ({"use": "tp=2", "gpu": "2x3xl4"}, "does not divide the 3 GPUs of a node"),
    ({"use": "tp=3", "gpu": "3xl4"}, "3 ranks do not divide 32 query heads"),
    ({"use": "pp=2", "gpu": "2xl4"}, "`pp` is not supported in inference"),
)


@pytest.mark.parametrize(("given", "said"), BAD)
def test_bad_input_is_told(given, said):
    with pytest.raises(InputError) as bad:
        ask(LLAMA, **{"gpu": "1xl4", **SHORT, **given})
    assert any(said in problem.message for problem in bad.value.problems)


def test_all_that_is_wrong_is_told_at_once(capsys):
    given = [
        "--seq",
        "0",
        "--new-tokens",
        "0",
        "--goal",
        "fast",
        "--requests",
        "x",
        "--weights",
        "nf5",
        "--max-first",
        "soon",
        "--use",
        "tp=3",
    ]
    assert main(["plan", LLAMA, "--task", "inference", "--gpus", "3xl4", *given]) == 2
    assert capsys.readouterr().err.count("error: ") >= 9


def test_options_of_answers_are_not_for_training():
    with pytest.raises(InputError, match="`goal` applies to plans to answer only"):
        ask(LLAMA, gpu="1xl4", goal="latency")


def test_what_is_written_is_narrow_and_the_same_each_time():
    first, again = (
        ask(LLAMA, gpu="1xl4", **{**SMALL, "weights": "own,int8,awq-4bit,fp8", "cache": "static"})
        for _ in range(2)
    )
    assert text(first) == text(again)
    assert max(map(len, text(first).splitlines())) <= 80
    known = data(first)
    assert json.loads(json.dumps(known)) == known
    assert known["serving"]["goal"] == "throughput"
    assert known["rows"][0]["pace"]["tokens_per_second"] == first.rows[0].pace.tokens_per_second
    assert len(known["trade"]) > 2
    assert markdown(first).count("|") > 10


def test_an_interrupt_returns_what_was_found():
    seen = []

    def stop(counted):
        seen.append(counted.estimated)
        if counted.estimated > 5:
            raise KeyboardInterrupt

    found = ask(LLAMA, gpu="2xl4", progress=stop, **SMALL)
    assert found.interrupted
    assert found.rows
    assert max(seen) == 6
    assert "(interrupted)" in text(found)
