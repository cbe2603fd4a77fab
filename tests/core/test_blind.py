"""What is calibrated is calibrated again without each source, and no code names a publisher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memfit.band import TAIL, Residual
from memfit.cli import main
from memfit.truth.blind import LEAST, TAILS, Blind, LeftOut, blind, chosen_tail, left_out, places


def residual(number: int, source: str, ratio: float) -> Residual:
    return Residual(
        id=f"{source}-{number}",
        source=source,
        metric="peak_reserved",
        confidence="high",
        technique="full",
        measured=round(1_000_000 * ratio),
        predicted=1_000_000,
        least=900_000,
        most=1_000_000,
    )


def spread(source: str, low: float, high: float, count: int = 50) -> list[Residual]:
    step = (high - low) / (count - 1)
    return [residual(number, source, low + number * step) for number in range(count)]


def test_a_source_has_no_say_in_its_own_line() -> None:
    """Three sources within 2 %, and one that is 20 % above: covered by nobody else, and without it
    the others' ends are narrow."""
    known = [one for name in "abc" for one in spread(name, 0.99, 1.02)]
    lines = {one.source: one for one in left_out([*known, *spread("far", 1.19, 1.21)])}
    assert lines["far"].covered == 0
    assert lines["far"].high < 0.02
    assert lines["a"].covered >= 0.9
    assert lines["a"].high > 0.18


def test_sources_weigh_alike_or_by_their_cases() -> None:
    lines = tuple(
        LeftOut(source=name, cases=cases, tail=0.02, covered=covered, low=-0.1, high=0.1)
        for name, cases, covered in (("a", 30, 1.0), ("b", 10, 0.5))
    )
    found = Blind(left_out=lines, fits=(), places=())
    assert found.over_sources == 0.75
    assert found.over_cases == 0.875


def test_ends_are_shares_beyond_what_is_predicted() -> None:
    (line,) = [
        one
        for one in left_out([*spread("a", 0.9, 1.1), *spread("b", 0.99, 1.01)])
        if one.source == "b"
    ]
    assert -0.11 < line.low < -0.05
    assert 0.05 < line.high < 0.11


def test_the_tail_is_the_largest_with_which_every_regime_is_covered() -> None:
    alike = [one for name in "abc" for one in spread(name, 0.99, 1.02)]
    assert chosen_tail(alike) == max(TAILS)
    # Each source's outermost cases lie beyond what the others have of them
    apart = [
        *spread("a", 0.99, 1.02),
        *spread("b", 1.01, 1.04),
        *spread("c", 1.03, 1.06),
    ]
    assert chosen_tail(apart) == min(TAILS)
    assert 0.5 < LEAST < 1


def test_tails_are_tried_from_the_largest() -> None:
    """The first that covers every regime is taken, so that TAIL stands in its place among them."""
    assert list(TAILS) == sorted(TAILS, reverse=True)
    assert TAIL in TAILS


def test_code_that_names_a_publisher_is_found(tmp_path: Path) -> None:
    (tmp_path / "truth").mkdir()
    (tmp_path / "truth" / "rows.py").write_text('if source == "modelscope/ms-swift":\n    pass\n')
    (tmp_path / "good.py").write_text(
        '"""As modelscope/ms-swift does."""\n'
        "# modelscope/ms-swift 3.0 sft.py\n"
        'X: A[int, counted("rows", "modelscope/ms-swift 3.0")] = 3\n'
        'made = row(cite="foundation-model-stack/fms-acceleration @876e2ed")\n'
        'model = "01-ai/Yi-34B"\n'
    )
    assert list(places(tmp_path)) == []
    (tmp_path / "bad.py").write_text(
        'if source == "modelscope/ms-swift":\n    pass\n\n'
        "def fms_acceleration(x):\n    return x.fsdp_qlora\n"
    )
    assert [one.partition(":")[2][:1] for one in places(tmp_path)] == ["1", "4", "5"]


def test_no_code_outside_of_truth_names_a_publisher() -> None:
    """And constants that were fitted to published figures rest on none of the table's rows."""
    found = blind()
    assert found.places == ()
    assert {one.name.rpartition(".")[2] for one in found.fits} == {"LAUNCHES", "TRAINED"}
    assert [one.rows for one in found.fits] == [0, 0]
    assert len(found.left_out) >= 5
    assert found.over_sources >= 0.85


def test_the_command_shows_each_source_and_takes_no_other_question(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.truth.blind.residuals", lambda: tuple(spread("one", 0.99, 1.02)))
    monkeypatch.setattr("memfit.truth.blind.places", lambda root: iter(("plan/a.py:3: `x/y`",)))
    assert main(["accuracy", "--blind"]) == 0
    said = capsys.readouterr().out
    assert "all, averaged over sources" in said
    assert "code that names a publisher:\nplan/a.py:3" in said
    assert main(["accuracy", "--blind", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["places"] == ["plan/a.py:3: `x/y`"]
    assert main(["accuracy", "--blind", "--format", "markdown"]) == 0
    assert "| one | 50 |" in capsys.readouterr().out
    assert main(["accuracy", "rows.jsonl", "--blind", "--speed"]) == 2
    said = capsys.readouterr().err
    assert "takes no file" in said
    assert "`--speed` has no effect on `--blind`" in said
