"""Kept answers of the trace: they stand beside the rows that they were given to, and beside no
other question."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.errors import InputError
from memfit.job import Job
from memfit.truth import traced
from memfit.truth.case import Case
from memfit.truth.published import read

CASES = {row.id: row for row in read() if isinstance(row, Case)}


def test_every_kept_answer_is_to_what_the_row_asks() -> None:
    known = traced.stored()
    assert len(known) >= 40
    assert [name for name in known if name not in CASES or traced.kept(CASES[name]) is None] == []


def test_what_the_trace_does_not_answer_is_listed_by_its_reason() -> None:
    refused = traced.refusals()
    assert len(refused) > 300
    assert not refused.keys() & traced.stored().keys()
    assert set(refused) <= set(CASES)
    assert sum("Unsloth" in reason for reason in refused.values()) > 200


def test_an_answer_to_another_question_does_not_count() -> None:
    case = CASES["fms-0001"]
    assert traced.kept(case) is not None
    assert traced.kept(replace(case, job=case.job.replace(batch=case.job.batch + 1))) is None
    assert traced.kept(replace(case, metric="peak_reserved")) is None


def test_other_versions_answer_only_where_the_formulas_see_no_difference() -> None:
    case = replace(CASES["fms-0001"], job=Job(versions="transformers=4.48.1,torch=2.4.1"))
    here = {"torch": "2.13.0", "transformers": "4.48.3"}
    assert traced.here(case.job, here)[1] == ("torch",)
    assert traced.here(case.job, {**here, "torch": "2.4.0"})[1] == ()
    assert traced.asked_here(case, lambda one: 7, here).version("torch") == (2, 13)
    with pytest.raises(InputError, match="an environment with torch"):
        traced.asked_here(case, lambda one: one.job.version("torch")[1], here)
