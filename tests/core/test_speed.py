"""Predicted speeds against published ones: reading what a row says of its speed, and the record
itself."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from memfit.api.published import speeds as asked
from memfit.errors import InputError
from memfit.estimate import estimate
from memfit.hardware import Cluster, find_gpu, find_link
from memfit.hardware.collectives import PORT, Group, seconds
from memfit.job import Job
from memfit.report import speed as report
from memfit.truth.case import Case, Refused
from memfit.truth.models import built
from memfit.truth.regret import ALLOWED, regrets
from memfit.truth.rows import Row
from memfit.truth.speed import Speeds, correlation, predict, said, speeds
from memfit.truth.statistics import figures

ROW = {
    "id": "one",
    "source": (
        "foundation-model-stack/fms-acceleration:scripts/benchmarks/refs/a100_80gb.csv line 2"
    ),
    "model": "mistralai/Mistral-7B-v0.1",
    "task": "train",
    "engine": "fms-hf-tuning / TRL SFTTrainer",
    "gpu": "NVIDIA A100-SXM4-80GB",
    "gpus": 1,
    "batch": 4,
    "seq": 4096,
    "dtype": "weights bfloat16; no autocast",
    "method": "full",
    "optimizer": "AdamW (HF default adamw_torch)",
    "grad_checkpointing": True,
    "attention": "flash_attn2",
    "parallel": "none",
    "extra": {"plugin": "", "grad_accum": 1},
    "metric": "throughput_only",
    "confidence": "high",
}


def test_a_row_without_memory_tells_a_speed():
    found = said(Row(**ROW, speed={"tokens_per_s_per_gpu": 3447.0}))
    assert found.measured == 3447.0
    assert abs(found.error) < 0.15


@pytest.mark.parametrize(
    ("speed", "measured"),
    [
        ({"tokens_per_s": 3000}, 3000),
        ({"step_ms": 4000}, 4 * 4096 / 4),
        ({"tokens_per_s_per_gpu": 1, "step_ms": 9}, 1),
    ],
)
def test_units_of_speed(speed, measured):
    assert said(Row(**ROW, speed=speed)).measured == measured


@pytest.mark.parametrize(
    "speed", [{}, {"samples_per_s": 3.0}, {"tokens_per_s": "fast"}, {"tokens_per_s": float("nan")}]
)
def test_what_is_no_speed_in_tokens_is_refused_by_name(speed):
    assert said(Row(**ROW, speed=speed)).reason == "the speed is not in tokens of full sequences"


def test_serving_is_refused():
    assert (
        said(Row(**ROW | {"engine": "vllm"}, speed={"tokens_per_s": 1})).reason
        == "serving engines: not yet"
    )


GENERATION = ROW | {
    "source": "QwenLM/Qwen3:docs/source/benchmark/speed_benchmark.rst",
    "task": "inference",
    "engine": "transformers",
    "batch": 1,
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "seq": {"input": 6144, "new_tokens": 2048},
    "dtype": "BF16",
}


@pytest.mark.parametrize(
    ("speed", "measured"),
    [
        ({"tokens_per_s": 30}, 30),
        ({"tok_s": 30}, 30),
        ({"tokens_per_s_prompt_plus_generated": 40}, 10),
    ],
)
def test_generation_is_in_new_tokens(speed, measured):
    found = said(Row(**GENERATION, speed=speed))
    assert found.measured == measured
    assert not found.case.job.training
    assert 20 < found.predicted < 60
    both = Speeds(found=(found, said(Row(**ROW, speed={"tokens_per_s": 3000}))), refused=())
    assert both.only(training=False).found == (found,)
    assert [title for title, _ in report.kinds(both)] == ["Training", "Generation"]


def test_generation_that_is_compiled_or_in_other_units_is_refused_by_name():
    assert (
        "compiled"
        in said(
            Row(**GENERATION | {"extra": {"compile": "True"}}, speed={"tokens_per_s": 30})
        ).reason
    )
    assert "new tokens" in said(Row(**GENERATION, speed={"seconds": 30})).reason


def test_rank_correlation():
    assert correlation([(1, 10), (2, 20), (3, 25)]) == 1
    assert correlation([(1, 3), (2, 2), (3, 1)]) == -1
    assert correlation([(1, 1), (2, 1), (3, 1)]) == 1  # nothing to put in order
    assert 0 < correlation([(1, 1), (2, 3), (3, 2), (4, 4)]) < 1


def test_a_file_that_is_not_there():
    with pytest.raises(InputError, match="is not a file"):
        asked("no such file", confidence="highest")


def test_collectives_by_hand():
    node = Cluster(gpu=find_gpu("h100-sxm"), gpus_per_node=8)
    eight = Group(size=8, stride=1, per_node=8)
    (small, quick), *_, (large, slow) = find_link("nvlink4").measured["all_gather"][8]
    assert seconds("all_gather", large, eight, node) == pytest.approx(slow)
    assert seconds("all_gather", 4 * large, eight, node) == pytest.approx(4 * slow)
    assert seconds("all_gather", small // 2, eight, node) == quick
    assert seconds("all_gather", large // 2, eight, node) == pytest.approx(slow / 2, rel=0.1)
    six = seconds(
        "all_gather", large, Group(size=6, stride=1, per_node=8), node
    )  # 5/6 of it travels where 7/8 did
    assert six == pytest.approx(slow * (5 / 6) / (7 / 8), rel=0.01)
    assert seconds("all_gather", 10**9, Group(size=1, stride=1, per_node=8), node) == 0
    two = Cluster(
        gpu=find_gpu("h100-sxm"), gpus_per_node=8, nodes=2, network=find_link("ethernet-100")
    )
    wire = PORT * 12.5e9 * 8  # eight ports of the node share the ring
    assert seconds(
        "all_gather", 16 * 10**9, Group(size=16, stride=1, per_node=8), two
    ) == pytest.approx(15 * 10**9 / wire, rel=1e-3)
    apart = Group(size=2, stride=8, per_node=8)  # one rank a node
    assert seconds("all_reduce", 10**9, apart, two) == pytest.approx(
        2 * 10**9 / 2 / (PORT * 12.5e9), rel=1e-3
    )


@pytest.fixture(scope="module")
def record() -> Speeds:
    return speeds()


@pytest.mark.slow
def test_the_record_stays_within_its_bounds(record: Speeds):
    """Not one constant is fitted to these runs."""
    fms, training, generation = (
        "foundation-model-stack/fms-acceleration",
        record.only(training=True),
        record.only(training=False),
    )
    assert len(training.sources()[fms]) >= 150
    assert training.figures(fms).median <= 0.06
    assert training.order(fms) >= 0.9
    assert training.figures("pytorch/torchtune").median <= 0.04
    assert training.figures("mosaicml/llm-foundry").median <= 0.045
    assert training.order("mosaicml/llm-foundry") >= 0.85
    assert training.figures("MooreThreads/SimuMax").median <= 0.11
    assert training.figures("pytorch/torchtitan").median <= 0.16
    assert training.figures().median <= 0.08
    assert figures(one.error for one in training.found).median <= 0.06
    assert generation.figures("huggingface/optimum").median <= 0.16
    assert generation.figures("QwenLM/Qwen3").median <= 0.25


def test_the_quickest_source_stays_within_its_bound():
    """The same bound as in the whole record, which is compared less often."""
    assert len(found := speeds(source="huggingface/optimum").found) == 50
    assert figures(one.error for one in found).median <= 0.16


def test_a_generation_is_judged_by_the_time_that_an_estimate_tells():
    """Not by a search's, which writes fewer passes."""
    gpu, name = find_gpu("rtx-4090"), "Qwen/Qwen3-0.6B"
    job = Job(task="inference", batch=16, seq=512, new_tokens=256)
    case = Case(id="one", source="", model=name, job=job, gpu=gpu, metric="", value=None)
    told = estimate(built(name, "", ""), job, Cluster(gpu=gpu)).generation
    assert told is not None
    assert predict(case) == pytest.approx(told.tokens_per_second, rel=1e-12)


@pytest.mark.slow
def test_the_page_shows_the_record(record: Speeds):
    page = (Path(__file__).parents[2] / "docs" / "speed.md").read_text(encoding="utf-8")
    assert report.markdown(record).replace("\n", "") in page.replace("\n", "")
    data = report.data(record)
    assert len(json.dumps(data)) > 1000
    assert report.text(record).splitlines()[1].startswith("source")


@pytest.mark.slow
def test_the_first_choice_is_near_the_best_of_nine_published_sweeps_in_ten(record: Speeds):
    found = list(regrets(record))
    assert len(found) >= 15
    assert sum(one.lost <= ALLOWED for one in found) >= 0.9 * len(found)
    turned = Speeds(
        found=tuple(replace(one, predicted=1 / one.measured) for one in record.found), refused=()
    )  # the slowest called quickest
    assert sum(one.lost <= ALLOWED for one in regrets(turned)) < 0.5 * len(found)


@pytest.mark.parametrize(
    "speed",
    [
        {"tokens_per_s": -5},
        {"step_ms": -3.0},
        {"tokens_per_s_per_gpu": 0},
        {"tokens_per_s_per_gpu": "x"},
        {},
    ],
)
def test_a_speed_that_is_none_has_no_answer(speed):
    assert isinstance(said(Row(**ROW, speed=speed)), Refused)
