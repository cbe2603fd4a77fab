"""Long tests are sampled at every commit and run whole by `make whole`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

WHOLE = bool(os.environ.get("MEMFIT_WHOLE"))


def sampled(cases: Sequence[T], every: int, first: int = 0) -> Sequence[T]:
    """Every so many cases from `first` on; all with MEMFIT_WHOLE."""
    return cases if WHOLE else cases[first % every :: every]
