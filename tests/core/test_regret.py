"""What a choice by predicted speed costs."""

from dataclasses import replace

import pytest

from memfit.truth.regret import ALLOWED, regrets
from memfit.truth.speed import Speeds, speeds


@pytest.mark.slow
def test_the_first_choice_is_near_the_best_of_nine_published_sweeps_in_ten():
    known = speeds()
    found = list(regrets(known))
    assert len(found) >= 15
    assert sum(one.lost <= ALLOWED for one in found) >= 0.9 * len(found)
    turned = Speeds(found=tuple(replace(one, predicted=1 / one.measured) for one in known.found), refused=())  # the slowest called quickest
    assert sum(one.lost <= ALLOWED for one in regrets(turned)) < 0.5 * len(found)
