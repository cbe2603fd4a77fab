"""`memfit plan --engine`: what holds a load, the questions turned round, and how fast it is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from memfit.api.engine import serve, subject_of
from memfit.api.engine_plan import plan_engine
from memfit.cli import main
from memfit.errors import InputError
from memfit.hardware import Cluster, find_gpu
from memfit.hardware.prices import price
from memfit.model.modules import MoE
from memfit.plan import engine_search
from memfit.plan.engine_goals import EnginePlan, EngineQuestion, EngineRow
from memfit.report.engine_plan import write
from memfit.serving.pace import Engine, Step, bytes_read, step_seconds
from memfit.serving.parts import Indexer
from memfit.serving.weights import Rank

LOAD = {"in": "8k", "out": "1k"}


def test_the_command_answers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "qwen3-8b", "--engine", "vllm", "--gpu", "h100-sxm", "--users", "64"]
    assert main([*words, "--in", "8k", "--out", "1k", "--task", "inference"]) == 0
    told = capsys.readouterr().out
    assert "with 8,192 tokens in and 1,024 out" in told
    assert "vllm serve Qwen/Qwen3-8B --max-model-len 9216" in told
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


def test_tokens_in_and_out_mean_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "qwen3-8b", "--in", "8k", "--out", "1k", "--users", "4", "--json"]
    assert main([*words, "--task", "inference"]) == 0
    out, err = capsys.readouterr()
    assert "`--in` and `--out` mean `--engine vllm --gpu cheapest` here" in err
    cheapest = plan_engine("qwen3-8b", engine="vllm", gpu="cheapest", users=4, **LOAD)
    assert json.loads(out)["gpu"] == cheapest.cluster.gpu.id
    users = ["plan", "qwen3-8b", "--users", "4", "--gpu", "l40s", "--json"]
    assert main(users) == 0
    assert "`--users` means `--engine vllm` here" in capsys.readouterr().err
    main([*users, "--task", "inference"])  # transformers', which has that option, too
    assert "means" not in capsys.readouterr().err
    assert main([*words, "--gpu", "l40s"]) == 0
    out, err = capsys.readouterr()
    assert "mean `--engine vllm` here" in err
    assert json.loads(out)["gpu"] == "l40s"


@pytest.mark.parametrize("words", [["--model", "qwen3-8b"], ["--", "vllm", "serve", "qwen3-8b"]])
def test_the_engines_own_words_name_the_model(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--engine", "vllm", "--gpu", "l40s", "--users", "4", *words]) == 0
    assert "vllm serve Qwen/Qwen3-8B" in capsys.readouterr().out


def row_of(rows: tuple[EngineRow, ...], **wanted: object) -> EngineRow:
    return next(
        row for row in rows if all(getattr(row, key) == value for key, value in wanted.items())
    )


def test_a_plan_says_what_the_engine_says() -> None:
    """The users that fit are the concurrency that the engine prints with the plan's options."""
    plan = plan_engine("qwen3-8b", engine="vllm", gpu="h100-sxm", users=16, top=9, **LOAD)
    row = row_of(plan.rows, weights="own", cache="auto")
    again = serve("qwen3-8b", engine="vllm", gpu="h100-sxm", **row.options)
    assert row.users == int(again.figures["max_concurrency"])
    assert again.figures["max_concurrency_len"] == row.length == 9216
    # a million output tokens for what an hour of the GPU costs
    known = price(plan.cluster.gpu)
    assert known is not None
    assert row.speed is not None
    seconds = 10**6 / row.speed.tokens_per_second
    assert row.dollars == pytest.approx(seconds / 60 / 60 * known.dollars)
    assert plan.dollars == known.dollars


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_context_at_a_number_of_users(engine: str) -> None:
    """So many requests of the longest length fit, and a block more does not."""
    plan = plan_engine("qwen3-8b", engine=engine, gpu="rtx-4090", users=8, top=9)
    row = row_of(plan.rows, weights="own", cache="auto")
    assert row.users == 8
    length = plan.question.planned.length
    longer = serve(
        "qwen3-8b", engine=engine, gpu="rtx-4090", **{**row.options, length: row.length + 16}
    )
    assert longer.figures["max_concurrency"] < 8


@pytest.mark.parametrize(
    ("engine", "model", "given"),
    [
        ("vllm", "Qwen/Qwen2.5-7B", {}),
        ("vllm", "Qwen/Qwen2.5-7B", {"gpu_memory_utilization": 0.3}),
        ("sglang", "llama-3.2-1b", {}),
    ],
)
def test_every_row_starts(engine: str, model: str, given: dict[str, float]) -> None:
    """The engine starts with the very options of each configuration that a plan shows."""
    plan = plan_engine(model, engine=engine, gpu="rtx-4090", top=9, **given)
    assert plan.rows
    for row in (*plan.rows, *plan.close):
        if row.weights != "awq-4bit":  # a checkpoint of its own
            again = serve(model, engine=engine, gpu="rtx-4090", **row.options)
            assert again.fits, (row.options, again.failure)
            assert again.figures["max_concurrency"] >= 1


def test_no_more_users_than_the_engine_runs() -> None:
    """vLLM runs 256 requests at once on a small card, or as many as `max_num_seqs` says."""
    short = {"in": 64, "out": 64}
    for given, most in (({}, 256), ({"max_num_seqs": 100}, 100)):
        plan = plan_engine("qwen3-0.6b", engine="vllm", gpu="rtx-4090", **short, **given)
        assert max(row.users for row in plan.rows) == most
        assert all(row.speed is not None and row.speed.first < 5 for row in plan.rows)
    late = plan_engine("qwen3-0.6b", engine="vllm", gpu="rtx-4090", users=8, max_num_seqs=4)
    assert not late.fits
    assert late.close[0].missed == ("4 users fit, since `max_num_seqs` is 4",)
    both = [
        plan_engine("qwen3-0.6b", engine="vllm", gpu="rtx-4090", max_num_seqs=4, **short, **given)
        for given in ({"users": 8}, {"users": 4})
    ]
    speeds = [(one.rows or one.close)[0].speed for one in both]
    assert speeds[0] == speeds[1], "those that do not fit wait"


def test_a_step_full_of_decoding_takes_no_prompt() -> None:
    """A step of 128 tokens has no place for a prompt beside 128 that decode."""
    plan = plan_engine(
        "qwen3-0.6b",
        engine="vllm",
        gpu="rtx-4090",
        users=200,
        **{"in": 64, "out": 64},
        max_num_batched_tokens=128,
    )
    assert all(row.speed is None for row in (*plan.rows, *plan.close))


def test_the_grid_has_its_edge_where_the_engine_has() -> None:
    plan = plan_engine("qwen3-8b", engine="vllm", gpu="h100-sxm", **LOAD)
    assert plan.grid is not None
    for cells, most in zip(plan.grid.cells, plan.grid.most, strict=True):
        fits = [size <= plan.grid.limit for size in cells]
        assert fits == [users <= most for users in plan.grid.users]


def test_about_equal_speeds_cost_no_quality() -> None:
    """Within 2 % the model's own weights come first; nobody has to look for a checkpoint."""
    plan = plan_engine("qwen3-0.6b", engine="vllm", gpu="rtx-4090", users=4, top=9, **LOAD)
    one = plan.rows[0]
    assert one.speed is not None

    def row(weights: str, cache: str, speed: float) -> EngineRow:
        assert one.speed is not None
        rate = replace(one.speed, tokens_per_second=speed)
        return replace(one, weights=weights, cache=cache, speed=rate)

    rows = [row("awq-4bit", "fp8", 100), row("own", "auto", 97), row("own", "fp8", 98.5)]
    found = [(one.weights, one.cache) for one in engine_search.ranked(rows)]
    assert found == [("own", "fp8"), ("awq-4bit", "fp8"), ("own", "auto")]


def test_a_checkpoint_that_the_user_must_find_is_a_placeholder() -> None:
    plan = plan_engine("qwen3-0.6b", engine="vllm", gpu="rtx-4090", users=4, top=9, **LOAD)
    row = row_of(plan.rows, weights="awq-4bit")
    assert row.command.startswith("vllm serve AWQ_CHECKPOINT --")
    said = write(replace(plan, rows=(row,)), width=120)
    assert "AWQ_CHECKPOINT: the hub id or folder of an AWQ checkpoint of Qwen/Qwen3-0.6B" in said


def test_help_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    for page in ("--help", "--help-all"):
        assert main(["plan", page]) == 0
        assert "--engine NAME" in capsys.readouterr().out


def test_one_user_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "Qwen/Qwen2.5-7B", "--engine", "vllm", "--gpu", "rtx-4090"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("1 user fits, each with")


def test_goals_choose_the_cheapest_machine() -> None:
    goals = {"users": 64, "tpot": "50ms", **LOAD}
    plan = plan_engine("llama-3.3-70b", engine="vllm", gpu="cheapest", **goals)
    assert plan.fits
    assert plan.passed
    best = plan.rows[0]
    assert best.speed is not None
    assert best.speed.token <= 0.05
    assert best.users >= 64


def test_a_machine_that_refuses_does_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, refused = engine_search.plan_engine, list[str]()

    def picky(question: EngineQuestion, cluster: Cluster) -> EnginePlan:
        if len(refused) < 2:
            refused.append(cluster.name)
            raise InputError.one("no kernel for this GPU", where="gpu")
        return plain(question, cluster)

    monkeypatch.setattr(engine_search, "plan_engine", picky)
    plan = plan_engine("qwen3-0.6b", engine="vllm", gpu="cheapest", users=2)
    assert plan.fits
    assert [line.partition(": ")[2] for line in plan.passed] == ["no kernel for this GPU"] * 2


def test_cheapest_refuses_what_no_machine_can() -> None:
    with pytest.raises(InputError, match="shares layers over 3 GPUs"):
        plan_engine("qwen3-0.6b", engine="vllm", gpu="cheapest", tensor_parallel_size=3)
    with pytest.raises(InputError, match=r"attention heads \(14\)"):
        plan_engine("qwen2.5-0.5b", engine="vllm", gpu="cheapest", tensor_parallel_size=4)
    with pytest.raises(InputError, match="its own memory"):
        plan_engine("qwen3-0.6b", engine="vllm", gpu="cheapest", memory="24GiB")


def test_cheapest_is_no_hint_where_it_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "qwen3-0.6b", "--engine", "vllm", "--gpu-memory-utilization", "0.005"]
    assert main([*words, "--gpu", "cheapest"]) == 1
    assert "`--gpu cheapest`" not in capsys.readouterr().out
    assert main([*words, "--gpu", "rtx-4090"]) == 1
    assert "`--gpu cheapest`" in capsys.readouterr().out


def test_memory_alone_is_a_gpu() -> None:
    plan = plan_engine("qwen3-0.6b", engine="vllm", memory="24GiB", users=4)
    assert plan.fits
    assert plan.cluster.gpu.memory == 24 * 2**30


def test_goals_that_nothing_reaches_show_the_nearest() -> None:
    plan = plan_engine("llama-3.3-70b", engine="vllm", gpu="2xh100-sxm", tpot="1ms", **LOAD)
    assert not plan.fits
    assert "time per output token" in plan.close[0].missed[-1]


def test_other_spellings_of_a_load(capsys: pytest.CaptureFixture[str]) -> None:
    """Plans with and without an engine take each other's names."""
    words = ["plan", "qwen3-0.6b", "--gpu", "rtx-4090"]
    load = ["--requests", "4", "--seq", "1k", "--new-tokens", "16", "--max-first", "9s"]
    assert main([*words, "--engine", "vllm", *load]) == 0
    assert "with 1,024 tokens in and 16 out" in capsys.readouterr().out
    assert main([*words, "--task", "inference", "--ttft", "abc"]) == 2
    said = capsys.readouterr().err
    assert "abc" in said
    assert "peft" not in said


def test_all_problems_at_once() -> None:
    with pytest.raises(InputError) as bad:
        plan_engine("qwen3-8b", engine="vllm", gpu="rtx-4090", users=0.5, tpot="5ms", top="x")
    assert {problem.where for problem in bad.value.problems} == {"users", "tpot", "top"}
    with pytest.raises(InputError, match="`out` is missing"):
        plan_engine("qwen3-8b", engine="vllm", gpu="rtx-4090", **{"in": "4k"})
    with pytest.raises(InputError) as bad:
        plan_engine(
            "qwen3-8b",
            engine="vllm",
            gpu="8xh100",
            **{"in": "2k", "out": 500, "users": "1e400"},
            max_model_len=1000,
            pipeline_parallel_size=2,
            data_parallel_size=2,
        )
    assert [problem.where for problem in bad.value.problems] == [
        *("users", "max_model_len", "pipeline_parallel_size", "data_parallel_size")
    ]
    with pytest.raises(InputError, match="`users` and `requests`"):
        plan_engine("qwen3-8b", engine="vllm", gpu="rtx-4090", users=4, requests=8)
    with pytest.raises(InputError, match="do not divide"):
        plan_engine("qwen3-8b", engine="vllm", gpu="rtx-4090", tensor_parallel_size=2)
    with pytest.raises(InputError, match="use vllm or sglang"):
        plan_engine("qwen3-8b", engine="llamacpp", gpu="rtx-4090")


@pytest.mark.parametrize(
    ("name", "gpus", "seconds"),
    [
        # tokens per second that Qwen measured with vLLM 0.6.3 on A100 80GB, one request, prompts of
        # one token (QwenLM/Qwen3 docs/source/benchmark/speed_benchmark.rst)
        ("Qwen/Qwen2.5-14B-Instruct", 1, 1 / 46.30),
        ("Qwen/Qwen2.5-32B-Instruct", 1, 1 / 22.13),
    ],
)
def test_decoding_is_as_fast_as_measured(name: str, gpus: int, seconds: float) -> None:
    model = subject_of(name).model
    assert model is not None
    cluster = Cluster(gpu=find_gpu("a100-sxm-80gb"), gpus_per_node=gpus)
    found = step_seconds(
        Engine(model=model, rank=Rank(tensor=gpus), cluster=cluster),
        Step(decoding=1, context=1024),
    )
    assert found == pytest.approx(seconds, rel=0.1)


def test_a_step_of_many_costs_little_more_than_of_one() -> None:
    """Weights are read once for all; a mixture reads more experts the more tokens choose."""
    cluster = Cluster(gpu=find_gpu("h100-sxm"))
    for name, most in (("qwen3-8b", 1.5), ("qwen3-30b-a3b", 12)):
        model = subject_of(name).model
        assert model is not None
        engine = Engine(model=model, rank=Rank(), cluster=cluster)
        one = step_seconds(engine, Step(decoding=1, context=512))
        many = step_seconds(engine, Step(decoding=16, context=512))
        assert one is not None
        assert many is not None
        assert 1 < many / one < most


def test_a_step_reads_shared_experts_whole() -> None:
    """Llama 4 Scout: 16 experts of which a token takes one, and one that all tokens take."""
    model = subject_of("meta-llama/Llama-4-Scout-17B-16E-Instruct").model
    assert model is not None
    block = next(
        block for layer in model.layers for block in layer.blocks if isinstance(block.mixer, MoE)
    )
    expert, router, norm = 3 * 5120 * 8192 * 2, 16 * 5120 * 2, 5120 * 2
    found = bytes_read(block, Rank(), frozenset(), 1)
    assert found == pytest.approx(2 * expert + router + norm, rel=1e-6)


def test_an_indexer_is_whole_on_every_rank() -> None:
    """More ranks neither halve its products nor sum its results."""
    model = subject_of("deepseek-ai/DeepSeek-V3.2").model
    assert model is not None
    plain = replace(
        model,
        layers=tuple(
            replace(
                layer,
                blocks=tuple(one for one in layer.blocks if not isinstance(one.mixer, Indexer)),
            )
            for layer in model.layers
        ),
    )
    step = Step(prompt=4096)
    more = []
    for ranks in (1, 8):
        cluster = Cluster(gpu=find_gpu("h200"), gpus_per_node=ranks)
        both = [
            step_seconds(Engine(model=one, rank=Rank(tensor=ranks), cluster=cluster), step)
            for one in (model, plain)
        ]
        assert both[0] is not None
        assert both[1] is not None
        more.append(both[0] - both[1])
    assert more[0] == pytest.approx(more[1], rel=1e-6)
