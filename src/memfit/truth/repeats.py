"""A published case measured again by its own publisher: how far apart such figures are is what no
prediction from the job can undercut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

from memfit.truth.case import Case

STORED = Path(__file__).parent / "data" / "repeats.json"
# allocated peaks that close are of one job; a change of the job's own code moves them by more
ALIKE = 0.015
METRIC = "nvidia-smi"
MIB = 2**20


class Repeat(NamedTuple):
    """One table's figure of the case."""

    commit: str
    date: str
    bytes: int


@cache
def _stored() -> dict[str, tuple[Repeat, ...]]:
    found = json.loads(STORED.read_text(encoding="utf-8"))["repeats"]
    return {
        name: tuple(Repeat(commit, date, mib * MIB) for commit, date, mib in some)
        for name, some in found.items()
    }


def repeats(case: Case) -> tuple[Repeat, ...]:
    """What the publisher's tables show for this case, its own row among them, oldest first; empty
    where it was measured once."""
    return _stored().get(case.id, ()) if case.metric == METRIC else ()


def apart(some: Sequence[Repeat]) -> float:
    """How much more the largest figure is than the smallest."""
    sizes = [one.bytes for one in some]
    return max(sizes) / min(sizes) - 1


def nearest(predicted: int, some: Sequence[Repeat]) -> float:
    """The error against the figure that is met best."""
    return min((predicted / one.bytes - 1 for one in some), key=abs)


def middle(predicted: int, some: Sequence[Repeat]) -> float:
    """The error against the middle one of the distinct figures."""
    return predicted / median(sorted({one.bytes for one in some})) - 1


__all__ = ["ALIKE", "METRIC", "STORED", "Repeat", "apart", "middle", "nearest", "repeats"]
