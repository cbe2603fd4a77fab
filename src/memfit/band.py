"""How far an estimate may be off: what was measured on comparable cases, as a share of what memfit says of them.

`residuals.json` is written by `tools/accuracy.py` from published figures; a line is a case: what it is, bytes measured, bytes predicted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("residuals.json")
COVERED = 0.9  # of what was measured lies within
MOST = 20  # cases that one source counts for, so that no long table drowns the others
FEWEST, SOURCES = 40, 2  # cases (two beyond each end) and sources that a group must have; else the next wider one speaks
EACH, EVERY = "all, averaged over sources", "all, averaged over cases"
PEAKS = ("peak_allocated", "peak_active", "peak_reserved", "nvidia-smi", "peak_allocated_plus_context")


class Residual(NamedTuple):
    """One published case. `technique` is what `technique` below calls it. `least` and `most`: what memfit says before anybody was off,
    from live tensors and the least context to all that the allocator holds and the most; both are `predicted` for live tensors."""

    id: str
    source: str
    metric: str
    confidence: str
    technique: str
    measured: int
    predicted: int
    least: int
    most: int

    @property
    def counts(self) -> bool:
        """Peaks of runs that are described completely: other cases say as much about what was not published as about memfit."""
        return self.confidence == "high" and self.metric in PEAKS and self.measured > 0 < self.least


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of what was measured, nine tenths were between `low` times the least and `high` times the most that memfit says; `group` says of
    which cases."""

    low: float
    high: float
    cases: int
    sources: int
    group: str

    def holds(self, one: Residual) -> bool:
        return self.low * one.least <= one.measured <= self.high * one.most


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Of a source's cases, the share inside the spread that all other sources give; `low` and `high` are its middle ends, as errors."""

    cases: int
    covered: float
    low: float
    high: float


def technique(training: bool, method: str, quant: str, precision: str, savings: Sequence[str] = ()) -> str:
    """What distinguishes a case for someone who looks for his own: what is trained or served, over what, with which savings."""
    over = f" over {quant}" if quant else ""
    if not training:
        return f"inference{over or ' ' + precision}"
    return ", ".join([f"{method}{over}", *savings])


def groups(name: str) -> tuple[str, ...]:
    """What a technique is compared with, the narrowest group first."""
    task = "inference" if name.startswith("inference") else "training"
    return f"{task}, {'quantized' if ' over ' in name else 'plain'} weights", task, "all"


@lru_cache(maxsize=1)
def residuals() -> tuple[Residual, ...]:
    return tuple(Residual(*row) for row in json.loads(TABLE.read_bytes()))


@lru_cache(maxsize=64)
def spread(name: str) -> Spread:
    """Of the narrowest group with enough cases."""
    return of(name, residuals())


def of(name: str, known: Iterable[Residual]) -> Spread:
    usable = [one for one in known if one.counts]
    for group in groups(name):
        chosen = [one for one in usable if group in groups(one.technique)]
        sources = {one.source for one in chosen}
        if group == "all" or (len(chosen) >= FEWEST and len(sources) >= SOURCES):
            low, high = ends(chosen)
            return Spread(low=low, high=high, cases=len(chosen), sources=len(sources), group=group)
    raise AssertionError("`all` is among the groups of every technique")


def ends(chosen: Sequence[Residual]) -> tuple[float, float]:
    """The 5 % point of measured to least, and the 95 % point of measured to most; never beyond what memfit says itself. A source counts for
    `MOST` cases at most."""
    each = {source: min(1.0, MOST / sum(one.source == source for one in chosen)) for source in {one.source for one in chosen}}
    tail = (1 - COVERED) / 2 * sum(each[one.source] for one in chosen)
    below = sorted((one.measured / one.least, each[one.source]) for one in chosen)
    above = sorted(((one.measured / one.most, each[one.source]) for one in chosen), reverse=True)
    return min(1.0, reached(below, tail)), max(1.0, reached(above, tail))


def reached(ordered: Sequence[tuple[float, float]], wanted: float) -> float:
    """The ratio at which the weights that lie beyond it add up to `wanted`."""
    gone = 0.0
    for ratio, weight in ordered:
        gone += weight
        if gone > wanted * (1 + 1e-9):  # a sum of weights is rounded
            return ratio
    return 1.0


def coverage(known: Sequence[Residual]) -> dict[str, Coverage]:
    """For each source what the others would have said of it; then the mean over sources, and over cases, with the widest ends."""
    usable = [one for one in known if one.counts]
    found: dict[str, Coverage] = {}
    for source in sorted({one.source for one in usable}):
        others = [one for one in usable if one.source != source]
        mine = [(one, of(one.technique, others)) for one in usable if one.source == source]
        inside = sum(said.holds(one) for one, said in mine)
        low, high = (sorted(getattr(said, end) for _, said in mine)[len(mine) // 2] - 1 for end in ("low", "high"))
        found[source] = Coverage(cases=len(mine), covered=inside / len(mine), low=low, high=high)
    if found:
        every = list(found.values())
        cases = sum(one.cases for one in every)
        middle = {"low": min(one.low for one in every), "high": max(one.high for one in every)}
        found[EACH] = Coverage(cases=cases, covered=sum(one.covered for one in every) / len(every), **middle)
        found[EVERY] = Coverage(cases=cases, covered=sum(one.cases * one.covered for one in every) / cases, **middle)
    return found


__all__ = [
    "EACH",
    "EVERY",
    "PEAKS",
    "TABLE",
    "Coverage",
    "Residual",
    "Spread",
    "coverage",
    "groups",
    "of",
    "residuals",
    "spread",
    "technique",
]
