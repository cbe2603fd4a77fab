"""The figures in README and docs/accuracy.md are those of the residuals, the residuals are what
memfit says, and nothing gets worse."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest
from tests.sampling import WHOLE, sampled

from memfit.band import EACH, Residual, coverage, residuals
from memfit.processes import answers
from memfit.report.markdown import table
from memfit.truth import Case, read
from memfit.truth.accuracy import (
    CERTAIN,
    Outcome,
    accuracy,
    answered,
    figures,
    gathered,
)
from memfit.truth.answers import asker, outcome
from memfit.truth.case import METRICS
from memfit.truth.causes import OPEN
from memfit.truth.statistics import averaged

ROOT = Path(__file__).resolve().parents[2]
SLACK = 0.002  # of the measured value; what libraries' rounding may do
DRIFT = 0.02  # of it; beyond that the docs tell another story
# Per cent: the median and the p95 of the errors' size that a source's figures may have, and the
# average over sources of those of rows that are described completely. Lower them when an estimate
# gets better.
BOUNDS = {
    ("AnswerDotAI/fsdp_qlora", "peak_reserved"): (4.0, 13.5),
    ("Lightning-AI/litgpt", "peak_allocated"): (0.5, 1.0),
    ("MooreThreads/SimuMax", "peak_allocated"): (0.1, 0.3),
    ("MooreThreads/SimuMax", "peak_reserved"): (0.4, 1.6),
    ("QwenLM/Qwen3", "peak_allocated"): (0.6, 4.0),
    ("QwenLM/Qwen3", "allocated_end_of_generation"): (0.2, 14.5),
    ("foundation-model-stack/fms-acceleration", "peak_allocated"): (0.2, 1.65),
    ("foundation-model-stack/fms-acceleration", "allocated_end_of_step"): (0.2, 4.5),
    ("foundation-model-stack/fms-acceleration", "nvidia-smi"): (
        2.0,
        11.5,
    ),
    ("huggingface/optimum", "peak_allocated_plus_context"): (4.5, 14.0),
    ("huggingface/peft", "allocated_end_of_step"): (0.1, 0.2),
    ("huggingface/transformers", "peak_allocated"): (1.5, 26.0),
    ("pytorch/ao", "peak_reserved"): (0.5, 0.5),
    ("pytorch/torchtitan", "peak_reserved"): (6.0, 15.0),
    ("pytorch/torchtitan", "peak_active"): (1.4, 1.4),
    ("pytorch/torchtune", "peak_active"): (0.5, 0.5),
}
AVERAGE = (1.3, 4.5)  # batches of one length; 3 and 10 are what memfit set out to reach
WITH_VARYING = (4.0, 8.0)  # all rows of confidence `high`: 3.5 and 7.0 on 2026-11-24
FAR_OFF = (15, 31)  # rows farther off than 10 %: batches of one length, and whose lengths vary


def tool() -> ModuleType:
    given = importlib.util.spec_from_file_location("accuracy_tool", ROOT / "tools" / "accuracy.py")
    assert given is not None
    assert given.loader is not None
    module = importlib.util.module_from_spec(given)
    sys.modules["accuracy_tool"] = module
    given.loader.exec_module(module)
    return module


def rows() -> list[list[object]]:
    return [list(one) for one in residuals()]


def test_the_tables_of_the_docs_are_those_of_the_residuals() -> None:
    """`make docs` writes them anew."""
    made = tool()
    page, text = (
        (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8"),
        (ROOT / "README.md").read_text(encoding="utf-8"),
    )
    words = made.report.WORDS
    assert "\n".join(table(made.report.HEAD, made.by_source(rows()), words)) in page
    assert "\n".join(table(made.HEADLINE_HEAD, made.headline(rows()), words)) in page
    for known in (made.certain(rows()), made.fixed(made.certain(rows()))):
        assert "\n".join(table(made.report.HEAD, made.by_source(known), words)) in page
    assert (
        "\n".join(
            table(
                ("source left out", "cases", "covered %", "from %", "to %"), made.coverage(rows())
            )
        )
        in page
    )
    summary = text.partition(made.BEGIN)[2].strip().partition("\n\n")[0]
    assert "\n".join(table(made.PEER_HEAD, made.peers(rows()), words)) in page
    assert made.readme(text, rows(), summary) == text
    assert summary in page


def test_the_whole_page_has_the_speeds_of_serving_engines() -> None:
    """Which a run of the serving part alone writes, too."""
    made = tool()
    one = {"rows": 3, "answered": 2, "median": 0.1, "p95": 0.2, "pairs": 4, "pairs_in_order": 0.5}
    (logs, _, _), (unseen, _, held_out), (speeds, head, lines) = made.serving_tables(
        {}, {"vllm": one}
    )
    assert unseen.startswith("### ")
    assert {line[0] for line in held_out} == {
        *("llama.cpp", "ollama", "sglang", "tensorrt-llm", "vllm")
    }
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert logs in page
    assert speeds in page
    assert lines == [("vllm", "2 of 3", "10.0", "20.0", "4", "50.0")]
    assert len(head) == len(lines[0])


def test_every_row_that_is_far_off_stands_under_what_is_known_of_it() -> None:
    """Described completely and more than 10 % off: with its own cause, in the page."""
    made = tool()
    lines = made.far(rows())
    assert "\n".join(table(made.FAR_HEAD, lines, made.report.WORDS)) in (
        ROOT / "docs" / "accuracy.md"
    ).read_text(encoding="utf-8")
    assert OPEN not in [cause for _, _, cause in lines]
    far = [
        one
        for one in residuals()
        if one.confidence == CERTAIN and abs(one.predicted / one.measured - 1) > made.FAR
    ]
    assert sum(int(count) for _, count, _ in lines) == len(far)
    varying = sum(one.lengths_vary for one in far)
    assert len(far) - varying <= FAR_OFF[0]  # lower them when one is explained
    assert varying <= FAR_OFF[1]


@pytest.mark.parametrize(("source", "metric"), sorted(BOUNDS))
def test_no_source_is_further_off_than_it_was(source: str, metric: str) -> None:
    found = figures(
        one.predicted / one.measured - 1
        for one in residuals()
        if (one.source, one.metric) == (source, metric)
    )
    assert found is not None
    median, p95 = BOUNDS[source, metric]
    assert 100 * found.median <= median
    assert 100 * found.p95 <= p95


@pytest.mark.parametrize(("varying", "most"), [(False, AVERAGE), (True, WITH_VARYING)])
def test_the_average_over_sources_is_within_what_was_set_out_for(
    varying: bool, most: tuple[float, float]
) -> None:
    groups: dict[str, dict[str, list[float]]] = {}
    for one in residuals():
        if one.confidence == CERTAIN and (varying or not one.lengths_vary):
            groups.setdefault(one.source, {}).setdefault(one.metric, []).append(
                one.predicted / one.measured - 1
            )
    found = averaged(
        [one for errors in metrics.values() if (one := figures(errors))]
        for metrics in groups.values()
    )
    assert found is not None
    assert found.cases > 350
    assert 100 * found.median <= most[0]
    assert 100 * found.p95 <= most[1] <= 10


def test_one_rule_says_whose_lengths_vary() -> None:
    """It reads the row, whatever the source and whatever the error."""
    known = {one.id: one for one in read() if isinstance(one, Case)}
    assert [one.id for one in residuals() if one.lengths_vary != known[one.id].lengths_vary] == []
    assert {one.source for one in residuals() if one.lengths_vary} == {
        "huggingface/peft",
        "modelscope/ms-swift",
    }


def test_every_case_of_the_residuals_is_a_case_still() -> None:
    known = {one.id: one for one in read() if isinstance(one, Case)}
    for one in residuals():
        assert known[one.id].value == one.measured
        assert known[one.id].source == one.source
    assert set(METRICS) >= {one.metric for one in residuals()}


def test_rows_of_several_gpus() -> None:
    """What memfit set out to reach: a median of 4 % over the sources that measured several GPUs,
    and 3 % of SimuMax's stages."""
    known = {one.id: one for one in read() if isinstance(one, Case)}
    errors: dict[str, list[float]] = {}
    for one in residuals():
        if known[one.id].strategy.ranks > 1:
            errors.setdefault(one.source, []).append(abs(one.predicted / one.measured - 1))
    medians = {source: median(each) for source, each in errors.items()}
    assert set(medians) == {
        "AnswerDotAI/fsdp_qlora",
        "MooreThreads/SimuMax",
        "foundation-model-stack/fms-acceleration",
        "modelscope/ms-swift",
        "pytorch/torchtitan",
    }
    texts = medians.pop("modelscope/ms-swift")  # whose lengths vary from batch to batch
    assert all(one <= 0.04 for one in medians.values())
    assert texts <= 0.08
    assert (sum(medians.values()) + texts) / (len(medians) + 1) <= 0.03
    assert max(errors["MooreThreads/SimuMax"]) <= 0.015


def worse(now: Outcome, before: Residual) -> bool:
    error = now.error()
    return error is None or abs(error) > abs(before.predicted / before.measured - 1) + SLACK


def test_a_sample_is_no_further_off_than_the_residuals_say() -> None:
    """One case of each technique, the quick ones."""
    cases = {one.id: one for one in read() if isinstance(one, Case)}
    chosen: dict[tuple[str, str], Residual] = {}
    for one in residuals():
        if one.technique.startswith(("full", "lora", "qlora")):
            chosen.setdefault((one.source, one.technique), one)
    assert len(chosen) >= 8
    ask = asker(None)
    for one in chosen.values():
        now = outcome(cases[one.id], ask)
        assert isinstance(now, Outcome), one.id
        assert not worse(now, one), (
            f"{one.id}: {now.predicted} now, {one.predicted} before, {one.measured} measured"
        )


@pytest.mark.slow
@pytest.mark.skipif(not WHOLE, reason="asks for every row: MEMFIT_WHOLE")
def test_the_whole_table_is_what_memfit_says_today() -> None:
    """After a change of estimates: `make docs`, and look at what changed."""
    whole = accuracy(processes=2)
    made, page = tool(), (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert "\n".join(table(made.report.TASK_HEAD, made.report.task_rows(whole))) in page
    agree(whole.outcomes, {one.id: one for one in residuals()})


@pytest.mark.slow
def test_every_third_run_is_what_memfit_says_today() -> None:
    runs = sampled(list(gathered(read())), 3)
    chosen = {row.id for run in runs for _, row in run}
    before = {one.id: one for one in residuals() if one.id in chosen}
    assert len(before) > len(residuals()) / 4
    found = [one for _, some in answers(answered, runs, 2) for one in some.values()]
    agree([one for one in found if isinstance(one, Outcome)], before)


def agree(outcomes: Iterable[Outcome], before: Mapping[str, Residual]) -> None:
    found = {one.case.id: one for one in outcomes if one.case.value}
    assert not set(before) - set(found), "cases that were answered and are no more"
    off = [name for name, one in before.items() if worse(found[name], one)]
    assert not off, f"{len(off)} cases are further off: {off[:9]}"
    moved = [
        name
        for name, one in before.items()
        if abs(found[name].predicted - one.predicted) > DRIFT * one.measured
    ]
    assert not moved, f"{len(moved)} cases have moved: {moved[:9]}"


def test_the_band_covers_what_it_never_saw() -> None:
    found = coverage(residuals())
    assert found[EACH].cases > 80
    assert 0.85 <= found[EACH].covered <= 0.97
