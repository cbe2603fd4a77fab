"""What the trace says of every pair of layouts before it builds anything: nothing, or sentences."""

from __future__ import annotations

from itertools import combinations

import pytest
from tests.core.test_combinations import LONGEST, TECHNIQUES, USES

from memfit.errors import InputError
from memfit.job import Job
from memfit.uses import strategy_from

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

TRACED = 430  # layouts and techniques that it has code for, at least


def test_pairs_are_refused_in_sentences() -> None:
    from memfit.parallel.fsdp2.check import resolved
    from memfit.trace import ranks

    quiet = 0
    asked = [
        *USES,
        *(
            f"{one} {two}"
            for one, two in combinations(USES, 2)
            if one.partition("=")[0] != two.partition("=")[0]
        ),
    ]
    for use in asked:
        for options in (
            TECHNIQUES.values() if " " not in use else (TECHNIQUES["full"], TECHNIQUES["qlora"])
        ):
            job = Job(**{"batch": 1, "seq": 32, **options})
            try:
                found = list(ranks.refusals(job, resolved(strategy_from(use.split(), None), job)))
            except InputError:
                continue  # of the words themselves
            quiet += not found
            for one in found:
                assert 0 < len(one.message) < LONGEST, one
                assert one.message == one.message.strip().rstrip("."), one
    assert quiet >= TRACED
