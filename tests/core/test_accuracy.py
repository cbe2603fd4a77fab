"""`memfit accuracy`: what it says of rows, of files that are none, and of wishes that nothing
meets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from memfit.api.published import accuracy as verb
from memfit.cli import main
from memfit.errors import InputError
from memfit.hardware import find_gpu
from memfit.job import Job
from memfit.processes import answers
from memfit.report import accuracy as report
from memfit.report import accuracy_data
from memfit.report.scatter import svg
from memfit.strategy import CP, DDP, FSDP, PP, TP, Strategy
from memfit.strategy import ONE as ONE_GPU
from memfit.truth.accuracy import (
    Accuracy,
    KernelOutcome,
    Outcome,
    accuracy,
    figures,
    over_sources,
    technique,
)
from memfit.truth.case import KERNEL, ONE, SERVED, SEVERAL, SPEED, Case, Refused, Unfit
from memfit.truth.causes import CAUSES, OPEN, why
from memfit.truth.models import built
from memfit.truth.published import kind, understand
from memfit.truth.rows import read_rows
from memfit.truth.single import Kernel, peak
from memfit.truth.single import read as read_kernel

GIB = 2**30
ROW: dict[str, Any] = {
    "id": "made-1",
    "source": "someone/somewhere:table.md",
    "model": "openai-community/gpt2",
    "task": "train",
    "engine": "transformers",
    "engine_version": "",
    "gpu": "NVIDIA A100-SXM4-80GB",
    "gpus": 1,
    "batch": 1,
    "seq": 128,
    "dtype": "bf16",
    "method": "full",
    "optimizer": "AdamW",
    "grad_checkpointing": False,
    "attention": "sdpa",
    "parallel": "none",
    "metric": "peak_allocated",
    "unit": "GiB",
    "value": 1.5,
    "confidence": "high",
}


def file(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(ROW | row) + "\n" for row in rows))
    return path


def case(**changes: Any) -> Case:
    given = {
        "id": "a",
        "source": "s/t",
        "model": "m",
        "job": Job(),
        "gpu": None,
        "metric": "peak_allocated",
        "value": 10 * GIB,
    }
    return Case(**{**given, **changes})


def outcome(predicted: float, **changes: Any) -> Outcome:
    size = round(predicted * GIB)
    return Outcome(
        case=case(**changes),
        predicted=size,
        least=size,
        most=size,
        verdict=None,
        parts={"weights": GIB},
        moment="",
        seconds={"memfit": 0.1},
    )


# --------------------------------------------------------------------------------------- bad input
def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What stands on stderr once the command has ended with 2."""
    assert main(["accuracy", *arguments]) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert out == ""
    return err


def test_every_wrong_wish_is_named_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    err = said(
        capsys,
        str(tmp_path / "none.jsonl"),
        "--by",
        "fromula",
        "--confidence",
        "hihg",
        "--plot",
        str(tmp_path / "no" / "x.svg"),
    )
    for words in (
        "is not a file",
        "unknown producer `fromula`",
        "`formula`",
        "unknown confidence `hihg`",
        "`high`",
        "there is no folder for",
    ):
        assert words in err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file has no rows"),
        (b"\n \n", "the file has no rows"),
        (b"\x89PNG\r\n\x1a\n\x00\x00" * 9, "no line of the file is a row"),
        (b'{"id": "a", "source"', "no line of the file is a row"),
        (b"[1, 2]\n3\n", "no line of the file is a row"),
        (b"x" * (2**20 + 2), "line 1 of `rows.jsonl` is too long"),
    ],
)
def test_files_that_hold_no_rows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert words in said(capsys, str(path))


def test_without_a_file_the_bundled_rows_are_meant(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wherever the command is started: the empty name is no folder of records."""
    monkeypatch.chdir(tmp_path)
    assert main(["accuracy", "--source", "litgpt", "--limit", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcomes"][0]["source"] == "Lightning-AI/litgpt"


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "is not a file" in said(capsys, str(tmp_path / "none.jsonl"))


def test_a_line_of_a_hundred_megabytes_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as out:
        out.truncate(100 * 2**20)
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))\n"
        "from memfit.cli import main\nsys.exit(main(['accuracy', sys.argv[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "is too long" in done.stderr


def test_a_source_or_confidence_that_no_row_has(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(file(tmp_path, {}))
    assert "no row is from a source with `somehere`" in (
        err := said(capsys, path, "--source", "somehere")
    )
    assert "`someone/somewhere`" in err
    assert "none of these rows has confidence `low`" in said(capsys, path, "--confidence", "low")


def test_a_broken_line_among_rows_is_counted_and_named(tmp_path: Path) -> None:
    path = file(tmp_path, {})
    path.write_text(path.read_text() + '{"id": "cut", "mod\n')
    found = accuracy(path)
    assert [one.case.id for one in found.outcomes] == ["made-1"]
    assert [(one.id, one.reason) for one in found.refused] == [("line 2", "no JSON")]


def test_a_picture_needs_the_name_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "` cannot be drawn" in said(capsys, "--plot", "x.png")


def test_a_negative_limit_is_refused_in_python() -> None:
    with pytest.raises(InputError, match="` is not a number of cases"):
        verb(limit=-1)


# ------------------------------------------------------------------------------------ what is said
def test_a_file_is_answered_in_every_format(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(
        file(
            tmp_path,
            {},
            {"id": "b", "metric": "peak_reserved"},
            {"id": "c", "gpus": 8},
            {"id": "d", "metric": "oom", "value": None},
        )
    )
    assert main(["accuracy", path, "--worst", "1"]) == 0
    text = capsys.readouterr().out
    assert "4 rows: 3 answered, 1 refused" in text
    assert "several GPUs" in text
    assert max(map(len, text.splitlines())) <= 80
    assert main(["accuracy", path, "--format", "markdown", "--worst", "1"]) == 0
    assert "## Rows answered" in capsys.readouterr().out
    assert main(["accuracy", path, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == accuracy_data.SCHEMA
    assert data["shares"]["one GPU"]["high"] == {"answered": 3, "rows": 3}
    assert data["oom"]["memfit"] == {"seen": 0, "asked": 1, "false_no": 0, "fitted": 2}
    assert {one["id"] for one in data["outcomes"]} == {"made-1", "b", "d"}


def test_the_json_format_is_documented_whole(tmp_path: Path) -> None:
    assert [name for name, _, _ in accuracy_data.FIELDS] == list(
        accuracy_data.data(accuracy(file(tmp_path, {})))
    )


def test_limit_and_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    found = accuracy(
        file(tmp_path, {"id": "x", "gpus": 2}, {"id": "y"}, {"id": "z"}),
        limit=1,
        progress=lambda *words: seen.append(words),
    )
    assert ([one.case.id for one in found.outcomes], found.refused, seen) == (
        ["y"],
        (),
        [(0, 1, "y")],
    )


def test_every_row_has_its_kind() -> None:
    counts: dict[str, int] = {}
    for row in read_rows():
        if not isinstance(row, Refused):
            counts[kind(row)] = counts.get(kind(row), 0) + 1
    assert sum(counts.values()) == 2750
    assert (counts[KERNEL], counts[SPEED]) == (388, 355)
    assert counts[ONE] > 600
    assert counts[SEVERAL] > 600
    assert counts[SERVED] > 400


def test_shares_count_what_was_refused() -> None:
    refused = (
        Refused(id="x", source="s", reason="r", confidence="high", kind=ONE),
        Refused(id="y", source="s", reason="r", kind=SPEED),
    )
    found = Accuracy(outcomes=(outcome(10, confidence="high"),), refused=refused)
    assert found.shares() == {
        ONE: {"all": (1, 2), "high": (1, 2)},
        SPEED: {"all": (0, 1), "": (0, 1)},
    }


def test_answered_counts_what_is_described_completely_by_task() -> None:
    """Serving engines are apart, and kernels and speed carry no run's memory."""
    refused = [
        Refused(id="a", source="s", reason="r", confidence="high", kind=ONE, task="train"),
        Refused(id="b", source="s", reason="r", confidence="high", kind=SEVERAL, task="inference"),
        Refused(id="c", source="s", reason="r", confidence="high", kind=SERVED, task="inference"),
        Refused(id="d", source="s", reason="r", confidence="high", kind=SPEED, task="train"),
        Refused(id="e", source="s", reason="r", confidence="medium", kind=ONE, task="train"),
    ]
    found = Accuracy(
        outcomes=(outcome(10, confidence="high"), outcome(10, confidence="low")),
        refused=tuple(refused),
    )
    assert found.tasks() == {"training": (1, 2), "inference": (0, 1), SERVED: (0, 1)}
    assert found.reasons()[ONE, "r"] == (1, 2)
    assert "1/2" in report.text(found)
    assert list(found.groups("high")) == [("s/t", "peak_allocated")]
    assert len(found.groups("high")["s/t", "peak_allocated"]) == 1


def test_processes_say_what_one_says(tmp_path: Path) -> None:
    from memfit.truth.accuracy import answered, gathered, selected

    path = file(
        tmp_path,
        {},
        {"id": "b", "metric": "peak_reserved"},
        {"id": "b2", "batch": 2},
        {"id": "c", "metric": "oom", "value": None, "seq": 2**20},
    )
    questions = list(gathered(selected(path, "", "", 0)))
    assert [[number for number, _ in one] for one in questions] == [[0, 1], [2], [3]]
    alone, shared = {}, {}
    for one in questions:
        alone.update(answered(one))
    for _, some in answers(answered, questions, 2):
        shared.update(some)
    said = [
        {
            number: (one.predicted, one.others, one.verdict)
            for number, one in found.items()
            if isinstance(one, Outcome)
        }
        for found in (alone, shared)
    ]
    assert said[0] == said[1]
    assert len(said[0]) == 4


def test_statistics_by_hand() -> None:
    found = figures([-0.5, 0.01, 0.02, 0.03])
    assert found is not None
    assert (
        found.cases,
        found.median,
        found.p95,
        found.worst,
        found.bias,
        found.under,
        found.deepest,
    ) == (
        4,
        0.025,
        0.5,
        -0.5,
        0.015,
        0.25,
        -0.5,
    )
    groups = {("a", "m"): [outcome(11)], ("b", "m"): [outcome(10), outcome(10), outcome(10)]}
    average = over_sources(groups)
    assert average is not None
    assert (average.cases, round(average.median, 9)) == (
        4,
        0.05,
    )  # a source counts once, however many lines it has


def test_techniques_are_what_readers_look_for() -> None:
    stored = json.dumps({"quant_method": "gptq"})
    assert (
        technique(case(job=Job(method="qlora", quant="nf4", checkpointing="full")))
        == "qlora over nf4, checkpointing"
    )
    assert (
        technique(case(job=Job(method="lora", unsloth="norms"), stored=stored))
        == "lora over gptq, fused kernels"
    )
    assert technique(case(job=Job(task="inference", precision="fp16"))) == "inference fp16"


# ------------------------------------------------------------------------------------- the picture
def test_the_picture_shows_each_case_once() -> None:
    found = Accuracy(
        outcomes=(
            outcome(10),
            outcome(20, id="b<", source="u/v&"),
            outcome(1, id="oom", metric="oom", value=None),
        ),
        refused=(),
    )
    drawn = ElementTree.fromstring(svg(found))
    titles = [one.text or "" for one in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 2
    assert any("b<: m" in one and "predicted 20.0" in one for one in titles)
    places = {float(one.attrib["cx"]) for one in drawn.iter("{http://www.w3.org/2000/svg}circle")}
    assert all(70 <= place <= 860 for place in places)


def test_a_picture_of_nothing_is_one() -> None:
    assert "0 cases" in svg(Accuracy(outcomes=(), refused=()))


# ---------------------------------------------------------------------------------- single kernels
KERNEL_ROW = ROW | {
    "source": "linkedin/Liger-Kernel:all_benchmark_data.csv",
    "model": 'single kernel swiglu {"T": 1024}',
    "engine_version": "liger 0.5.3",
    "unit": "MiB",
    "extra": {
        "provider": "liger",
        "pass": "full",
        "bsz": 4,
        "T": 1024,
        "hidden_size": 4096,
        "intermediate_size": 11008,
    },
}


def kernel(**changes: Any) -> Kernel | Refused:
    from memfit.truth.rows import Row, row

    found = row(json.dumps(KERNEL_ROW | changes).encode(), 1)
    assert isinstance(found, Row)
    answer = understand(found)
    assert isinstance(answer, (Kernel, Refused))
    return answer


def test_published_kernels_test_the_rows_of_kernels() -> None:
    errors: dict[str, list[float]] = {}
    refused: Counter[str] = Counter()
    for row in read_rows():
        if not isinstance(row, Refused) and kind(row) == KERNEL:
            try:
                one = read_kernel(row)
            except Unfit as unfit:
                refused[unfit.reason] += 1
                continue
            errors.setdefault(one.name.rpartition(",")[0], []).append(
                KernelOutcome(kernel=one, predicted=peak(one)).error
            )
    assert sum(map(len, errors.values())) >= 334
    assert sorted(refused.values()) == [4, 50]  # whether Triton or cuTile ran; compiled by inductor
    worst = {name: max(map(abs, found)) for name, found in errors.items()}
    assert worst.pop("fused_moe, huggingface") < 0.02  # routing is random there, and even here
    assert (
        worst.pop("fused_linear_jsd, torch") < 0.0011
    )  # the rest of a block that is not split: which one is free decides
    assert worst.pop("fused_linear_jsd, liger") < 0.0006
    assert worst.pop("fused_linear_cross_entropy, liger") < 0.0004
    assert max(worst.values()) < 0.0001


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "single kernel mhc {}"}, "a kernel without formula"),
        (
            {"model": "single kernel kto_loss {}"},
            "a compiled kernel, or measured behind one: what inductor keeps is in no source",
        ),
        ({"extra": {"provider": "apex"}}, "a kernel's provider without formula"),
        ({"extra": None}, "a kernel's provider without formula"),
        ({"gpu": "a big one"}, "the GPU is not named"),
        ({"engine_version": "liger new"}, "the versions are not known"),
        (
            {"model": "single kernel jsd {}", "engine_version": "liger 0.8.0"},
            "a kernel of a version without formula",
        ),
        (
            {"model": "single kernel fused_moe {}", "extra": {**KERNEL_ROW["extra"], "E": 2**20}},
            "the kernel's sizes are not stated",
        ),
        ({"value": None}, "the unit or the value is not settled"),
        ({"extra": {**KERNEL_ROW["extra"], "T": 2**40}}, "the kernel's sizes are not stated"),
        ({"extra": {**KERNEL_ROW["extra"], "T": -1}}, "the kernel's sizes are not stated"),
    ],
)
def test_kernels_that_cannot_be_expressed(changes: dict[str, Any], reason: str) -> None:
    found = kernel(**changes)
    assert isinstance(found, Refused)
    assert (found.reason, found.kind) == (reason, KERNEL)


def test_a_kernel_whose_sizes_are_missing_is_refused(tmp_path: Path) -> None:
    found = accuracy(file(tmp_path, KERNEL_ROW | {"extra": {"provider": "liger"}}))
    assert [one.reason for one in found.refused] == ["the kernel's sizes are not stated"]


# ------------------------------------------------------------------------------------------ causes
def test_causes_are_of_cases_that_exist() -> None:
    cases = [
        one
        for row in read_rows()
        if not isinstance(row, Refused) and isinstance(one := understand(row), Case)
    ]
    for cause in CAUSES:
        assert any(cause.holds(one) for one in cases), cause
    assert why(case()) == OPEN
    assert all(re.match(r"[a-z]", cause.why) and not cause.why.endswith(".") for cause in CAUSES)


# --------------------------------------------------------------------------------------- baselines
def test_baselines_by_hand() -> None:
    """gpt2: 124,439,808 parameters, 12 layers, width 768, 12 heads, 1024 positions, vocabulary
    50257."""
    from memfit.truth.baselines import BASELINES

    model, gpu = built("openai-community/gpt2"), find_gpu("a100-sxm-80gb")
    say = {
        one.name: one.estimate(model, Job(batch=2, seq=100, checkpointing="full"), gpu)
        for one in BASELINES
    }
    served = {
        one.name: one.estimate(
            model, Job(task="inference", seq=100, new_tokens=28, quant="nf4"), gpu
        )
        for one in BASELINES
    }
    assert (say["8X"], say["2X/4X"]) == (8 * 124439808, None)
    assert (served["8X"], served["2X/4X"]) == (None, 124439808 // 2)
    assert say["EleutherAI"] == 124439808 * (2 + 4 + 12) + 200 * 768 * 34 * 12
    tokens = 200
    layer = tokens * (18 * 768 + 4 * 3072)
    assert say["Megatron, 80 %"] == 18 * 124439808 + 2 * tokens * 768 * 12 + layer + 4 * tokens * (
        768 + 50257
    )
    assert say["LLMem"] is not None
    assert 124439808 * 14 < say["LLMem"] < 124439808 * 24
    assert say["DNNMem-style"] is not None
    assert say["DNNMem-style"] > 4 * 2 * 124439808


def test_llmem_chooses_as_it_was_published() -> None:
    """Table 3 of the paper (data/llmem.md), four V100 of 16 GB, 512 tokens: six choices of eight.
    For OPT-2.7b and bloom-3b the paper takes tensor parallelism, since the others do not fit: its
    m_base was measured and is not published."""
    from memfit.plan.llmem import OFFLOAD
    from memfit.truth.baselines.llmem import choice

    published = {
        "facebook/opt-1.3b": "ZeRO-3",
        "bigscience/bloom-1b1": "ZeRO-3",
        "microsoft/BioGPT-Large": "ZeRO-3",
        "bigcode/gpt_bigcode-santacoder": "ZeRO-3",
        "EleutherAI/gpt-neo-1.3B": "ZeRO-3",
        "huggyllama/llama-7b": OFFLOAD,
    }
    gpu = find_gpu("v100-sxm2-16gb")
    assert {name: choice(built(name), 512, gpu, 4) for name in published} == published
    assert {
        choice(built(name), 512, gpu, 4) for name in ("facebook/opt-2.7b", "bigscience/bloom-3b")
    } == {"ZeRO-3", "DP+TP"}


def test_baselines_of_several_gpus_by_hand() -> None:
    """gpt2 again: the embeddings have 38,597,376 + 786,432 weights, and the head is the first of
    them."""
    from memfit.truth.baselines import llmem, megatron

    model, gpu = built("openai-community/gpt2"), find_gpu("a100-sxm-80gb")
    job = Job(batch=2, seq=100, accumulate=1)
    terms = llmem.terms(model, 2, 100, gpu)
    boundary = 2 * 2**20  # 2 x 100 x 768 values of 2 bytes are less than a page
    assert llmem.spread(model, job, gpu, Strategy(fsdp=FSDP(size=4))) == terms.base + terms.half + (
        terms.full + terms.states
    ) // 4 + (terms.outputs + terms.head)
    split = llmem.spread(model, job, gpu, Strategy(tp=TP(size=2)))
    assert (
        split
        == terms.base
        + (terms.half + terms.full + terms.states) // 2
        + terms.outputs
        + terms.head
        + 12 * boundary // 2
    )
    assert llmem.spread(model, job, gpu, Strategy(pp=PP(size=2))) is None
    assert llmem.spread(model, job, gpu, Strategy(fsdp=FSDP(size=4, reshard=False))) is None
    embed, all_of_it = 38_597_376 + 786_432, 124_439_808
    layout = Strategy(
        tp=TP(size=2), pp=PP(size=2), cp=CP(size=2), ddp=DDP(size=2, distributed=True)
    )
    weights = ((all_of_it - embed) // 2 + embed) // 2
    kept = (
        100 * (18 * 768 + 4 * 3072) * 12 // 2
    )  # half of the tokens; one micro-batch in flight of two stages
    assert megatron.spread(model, job, gpu, layout) == weights * 6 + weights * 12 // 4 + kept // 2
    assert megatron.spread(model, job, gpu, Strategy(fsdp=FSDP(size=4))) is None


def test_tools_that_are_not_installed_are_named_and_nothing_breaks(tmp_path: Path) -> None:
    """Nothing is imported to find out; without `--peers` nobody is asked."""
    from memfit.truth.baselines.peers import PEERS, Peer, say

    absent = {one.name for one in PEERS if not one.installed}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({**ROW, "method": "lora r=8 q,v"}) + "\n", encoding="utf-8")
    found = accuracy(file, peers=True)
    assert {line.partition(" (pip install ")[0] for line in found.absent} == absent
    assert all(name in report.text(found, width=10_000) for name in absent)
    assert accuracy(file).absent == ()
    broken = Peer(
        name="broken", package="json", install="", cite="", estimate=lambda model, job, gpu: 1 // 0
    )
    assert (
        say(built("openai-community/gpt2"), Job(), (None, ONE_GPU), broken)
        == "ZeroDivisionError: integer division or modulo by zero"
    )
    assert broken.installed
    assert not Peer(
        name="none", package="no_such_package", install="", cite="", estimate=broken.estimate
    ).installed


# ------------------------------------------------------------------------------------------- every
# method by every axis, and regret
def test_every_method_is_told_by_every_axis(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = file(
        tmp_path,
        {},
        {"id": "b", "metric": "peak_reserved"},
        {"id": "d", "metric": "oom", "value": None, "seq": 2**20},
    )
    found = accuracy(path)
    by = accuracy_data.data(found)["by"]
    assert list(by) == ["metric", "task", "technique", "GPU", "source"]
    assert list(by["metric"]) == ["allocated", "out of memory", "reserved"]
    for axis in ("task", "technique", "GPU", "source"):
        (each,) = by[axis].values()
        assert each["memfit"]["figures"]["cases"] == each["EleutherAI"]["figures"]["cases"] == 2
        assert each["memfit"]["oom"] == {"seen": 1, "asked": 1, "false_no": 0, "fitted": 2}
        assert each["memfit"]["seconds"] > 0
    assert by["metric"]["out of memory"]["memfit"]["figures"] is None
    errors = {one.case.metric: one.error() for one in found.outcomes}
    assert by["metric"]["reserved"]["memfit"]["figures"]["worst"] == errors["peak_reserved"]
    assert main(["accuracy", str(path), "--format", "markdown"]) == 0
    page = capsys.readouterr().out
    for axis in by:
        assert f"## Every method by {axis}" in page
    assert main(["accuracy", str(path)]) == 0
    assert "every method: reserved" in capsys.readouterr().out


def test_what_choosing_by_predicted_speed_costs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Three ways of one model on one GPU: the largest batch is predicted quickest, and
    another was."""
    speeds = {1: 2000, 2: 2500, 4: 2400}
    path = file(
        tmp_path,
        *(
            {"id": f"b{batch}", "batch": batch, "speed": {"tokens_per_s": one}}
            for batch, one in speeds.items()
        ),
    )
    assert main(["accuracy", str(path), "--regret", "--json"]) == 0
    (sweep,) = json.loads(capsys.readouterr().out)["sweeps"]
    assert (sweep["ways"], sweep["choice"], sweep["best"]) == (3, "b4", "b2")
    assert sweep["lost"] == pytest.approx(1 - 2400 / 2500)
    assert main(["accuracy", str(path), "--regret"]) == 0
    text = capsys.readouterr().out
    assert "within 5% of the best measured one in 1 of 1 sweeps; at worst 4.0 % slower" in text
    assert max(map(len, text.splitlines()[:4])) <= 130
    assert main(["accuracy", str(path), "--regret", "--format", "markdown"]) == 0
    assert "| b4 | b2 | 4.0 |" in capsys.readouterr().out
    assert main(["accuracy", str(file(tmp_path, {})), "--regret"]) == 0
    assert "no sweep has 3 runs" in capsys.readouterr().out
