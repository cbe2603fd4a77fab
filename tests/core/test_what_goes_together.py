"""The page of combinations says what the formulas do, and gives a reason where they do nothing.
(test_reference.py: it is up to date.)"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.job import Job
from memfit.lower import lower
from memfit.strategy import ONE
from memfit.uses import strategy_from

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "combinations.py"))


def test_every_reason_is_told_once_and_referred_to(tool: dict[str, Any]) -> None:
    table, _, reasons = tool["page"]().partition("## Reasons")
    told = [int(one) for one in re.findall(r"^(\d+)\. .{20,}\.$", reasons, re.MULTILINE)]
    assert (
        told
        == sorted(set(told))
        == sorted({int(one) for one in re.findall(r"(?<=[|,] )\d+(?=,| \|)", table)})
    )


def test_a_yes_is_an_answer_and_a_number_a_refusal(tool: dict[str, Any]) -> None:
    """The page asks what marks the program; here the formulas write the whole tape, of each layout
    with each change."""
    plain = {name: change for name, change in tool["changes"]().items() if " + " not in name}
    wrong = []
    for title, use, needs in tool["LAYOUTS"]:
        for name, change in plain.items():
            said = tool["asked"](use, needs, change)
            try:
                job = Job(**{**tool["USUAL"], **needs, **change})
                model = tool["MODELS"]["experts" if "ep=" in use else "dense"]
                answered = (
                    len(
                        lower(
                            model,
                            job,
                            strategy_from(use.split(), None) if use else ONE,
                            compact=True,
                        )
                    )
                    > 0
                )
            except InputError:
                answered = False
            wrong += [(title, name)] if said is not None and answered is bool(said) else []
    assert not wrong
