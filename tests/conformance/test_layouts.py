"""The table of layouts: the formulas against the trace, real wrappers under a process group that
sends nothing, on rank 0 and on the worst rank."""

from __future__ import annotations

from importlib.util import find_spec
from statistics import median

import pytest
from tests.sampling import sampled

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

from tests.conformance.layouts import MEDIAN, WORST, Row, compare, groups, rows  # noqa: E402

ROWS = tuple(rows())
LEAST = 150  # layouts that are compared
NEEDS = {"trl": "trl", "liger_kernel": "liger_kernel", "zero": "deepspeed"}  # parts of a kind


@pytest.mark.slow
@pytest.mark.parametrize("some", groups(ROWS), ids=lambda some: f"{some[0].kind} {some[0]}")
def test_rank_0_and_the_worst_rank(some: list[Row]) -> None:
    """The median and the worst over the whole table lie within what every group keeps: every
    sixth row of a group at every commit, all with MEMFIT_WHOLE."""
    some = list(sampled(some, 6))
    for package in (NEEDS[part] for part in some[0].kind.split() if part in NEEDS):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    found = [compare(row) for row in some]
    assert not {str(one.row): one.wrong for one in found if one.wrong}
    offs = [abs(side.off) for one in found for side in (one.first, one.worst)]
    assert max(offs) <= WORST
    assert median(offs) <= MEDIAN


def test_layouts_are_many() -> None:
    assert len({str(row) for row in ROWS}) == len(ROWS) >= LEAST
