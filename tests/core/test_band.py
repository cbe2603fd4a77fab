"""The band: nine tenths of comparable measured cases, every source by at most so many, and covered where it never looked."""

from __future__ import annotations

import pytest

from memfit import band
from memfit.band import EACH, EVERY, MOST, Residual, coverage, ends, groups, of, residuals, spread
from memfit.report import write


def one(
    ratio: float, source: str = "a", technique: str = "inference bf16", confidence: str = "high", metric: str = "peak_allocated"
) -> Residual:
    return Residual("x", source, metric, confidence, technique, round(ratio * 10**6), 10**6, 10**6, 10**6)


def many(source: str, *ratios: float, technique: str = "inference bf16") -> list[Residual]:
    return [one(ratio, source, technique) for ratio in ratios]


def test_the_ends_leave_a_twentieth_out_on_each_side() -> None:
    steps = [0.9 + 0.01 * number for number in range(20)]  # 0.90 .. 1.09, one twentieth each
    assert ends(many("a", *steps)) == (pytest.approx(0.91), pytest.approx(1.08))


def test_the_estimate_itself_lies_within() -> None:
    assert ends(many("a", *[1.2] * 30)) == (1.0, 1.2)
    assert ends(many("a", *[0.8] * 30)) == (0.8, 1.0)
    assert ends([]) == (1.0, 1.0)


def test_a_long_table_counts_like_a_short_one() -> None:
    few, lots = many("a", *[1.5] * MOST), many("b", *[1.0] * 50 * MOST)
    assert ends(few + lots)[1] == 1.5
    assert ends(many("a", *[1.5]) + lots)[1] == 1.0  # one case is no table


def test_the_narrowest_group_with_enough_cases_speaks() -> None:
    plain = many("a", *[1.1] * 20) + many("b", *[1.1] * 20)
    quantized = many("a", *[1.3] * 30, technique="inference over gptq")
    assert groups("inference over gptq") == ("inference, quantized weights", "inference", "all")
    assert groups("lora over nf4, checkpointing") == ("training, quantized weights", "training", "all")
    assert of("inference bf16", plain + quantized).group == "inference, plain weights"
    assert of("inference over gptq", plain + quantized).group == "inference"  # thirty cases, but of one source
    assert of("full", plain + quantized).group == "all"
    assert (of("inference fp16", plain).low, of("inference fp16", plain).high) == (1.0, 1.1)


def test_what_the_allocator_and_the_context_may_do_is_no_error() -> None:
    wide = Residual("x", "a", "nvidia-smi", "high", "full", 12 * 10**6, 10**7, 8 * 10**6, 11 * 10**6)
    assert ends([wide]) == (1.0, pytest.approx(12 / 11))
    assert ends([wide._replace(measured=9 * 10**6)]) == (1.0, 1.0)
    assert ends([wide._replace(measured=6 * 10**6)]) == (0.75, 1.0)


def test_what_is_not_described_completely_says_nothing() -> None:
    assert [one(1, confidence="medium").counts, one(1, metric="weights").counts, one(1, metric="peak_unspecified").counts] == [False] * 3
    assert of("full", [one(9.0, confidence="low")]).cases == 0


def test_coverage_is_of_what_the_band_never_saw() -> None:
    known = many("a", *[1.0] * 20) + many("b", *[1.0] * 20) + many("c", *[1.0] * 5, *[2.0] * 5)
    found = coverage(known)
    assert (found["a"].covered, found["c"].covered) == (1.0, 0.5)
    assert found[EACH].covered == pytest.approx(2.5 / 3)
    assert (found[EVERY].cases, found[EVERY].covered) == (50, 0.9)


def test_the_bundled_residuals_are_legal() -> None:
    known = residuals()
    assert len(known) > 300
    assert len({row.id for row in known}) == len(known)
    assert sum(row.counts for row in known) > 200
    assert all(row.measured > 0 and row.predicted > 0 for row in known)
    assert band.TABLE.stat().st_size < 200_000


@pytest.mark.parametrize("technique", ["full", "lora, checkpointing", "qlora over nf4", "inference bf16", "inference over gptq"])
def test_every_technique_has_a_spread(technique: str) -> None:
    found = spread(technique)
    assert 0.5 < found.low <= 1 <= found.high < 2
    assert found.cases >= 20
    assert found.sources >= 2


def test_the_working_says_what_the_band_rests_on() -> None:
    from memfit.verbs import estimate as ask

    found = ask("openai-community/gpt2", gpu="t4", seq=128)
    said = spread("full")
    assert f"nine tenths of {said.cases} published peaks of {said.sources} sources ({said.group})" in found.band.origin
    words = " ".join(write(found, explain=True).split())
    assert " ".join(found.band.origin.split()) in words
