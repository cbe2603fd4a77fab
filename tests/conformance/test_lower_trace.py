"""The formulas against the trace of the real code over the grid: peaks, what they consist of, and
when they come.

No family is left out, and of the cases only those that both refuse. `tools/grid.py` prints the same
comparison.
"""

from __future__ import annotations

from statistics import median

import pytest
from tests.conformance import grid
from tests.sampling import sampled

from memfit.errors import InputError
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build, families

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

LEAST = 400  # cases that are compared
FEW = 6  # of one family, all of which are


def judged(cases: list[grid.Case]) -> list[grid.Found]:
    found = [one for one in map(grid.compare, cases) if one is not None]
    wrong = {str(one.case): words for one in found if (words := grid.holds(one))}
    assert not wrong
    return found


@pytest.mark.parametrize("name", grid.NAMES)
def test_a_family(name: str) -> None:
    """Each family's median within the bound, so that the whole grid's is: of many cases every
    third at every commit, all with MEMFIT_WHOLE."""
    cases = list(grid.cases(name))
    found = judged(list(sampled(cases, 3 if len(cases) >= FEW else 1)))
    assert median(abs(one.off) for one in found) <= grid.MEDIAN, found


@pytest.mark.parametrize("case", list(grid.models()), ids=str)
def test_a_model(case: grid.Case) -> None:
    """Real configurations: to what small examples round away."""
    (found,) = judged([case])
    assert abs(found.off) <= grid.MEDIAN


def test_the_grid_is_large_and_holds_every_choice() -> None:
    taken = [case for name in grid.NAMES for case in grid.cases(name) if not refused(case)]
    assert len(taken) >= LEAST
    for option in (
        "method",
        "checkpointing",
        "attention",
        "precision",
        "optimizer",
        "packing",
        "reentrant",
        "accumulate",
        "evaluate",
        "quant",
    ):
        met = {getattr(case.job, option) for case in taken}
        assert met >= WANTED[option], option


WANTED = {
    "method": {"full", "lora", "qlora", "freeze"},
    "checkpointing": {"none", "full", "every"},
    "attention": {"sdpa", "flash", "efficient", "math", "eager"},
    "precision": {
        "bf16",
        "fp16",
        "fp32",
        "autocast-bf16",
        "autocast-fp16",
        "bf16-autocast",
        "fp16-autocast",
    },
    "optimizer": {one["optimizer"] for one in (*grid.RECIPES, *grid.MORE) if "optimizer" in one},
    "packing": {True, False},
    "reentrant": {True, False},
    "accumulate": {1, 2},
    "evaluate": {True, False},
    "quant": {"none", "fp4", "int8"},
}


def refused(case: grid.Case) -> bool:
    try:
        lower(build(case.config), case.job)
    except InputError:
        return True
    return False


@pytest.mark.parametrize(("name", "index"), sorted(grid.REFUSED))
def test_what_is_left_out_cannot_run(name: str, index: int) -> None:
    from memfit.trace import trace_config

    with pytest.raises(InputError):
        trace_config(families()[name].examples[index], Job(**grid.SMALL))
