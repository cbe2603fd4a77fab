"""How far an estimate may be off: what was measured on published cases, as a share of what memfit
says of them.

A question is about a machine and a software that memfit never saw, so sources are what may be
exchanged, not cases: each source's distribution weighs the same, and the band is read off their
mean (pooled distributions: Dunn, Wasserman and Ramdas, arXiv 1809.07441; for fewer than 19 sources
their correction for few samples would make it endless, and is left out). What is compared is what
the band is about: counters that see what the allocator holds, or the device. `residuals.json` is
written by `tools/accuracy.py` from published figures; a line is a case: what it is, bytes measured,
bytes predicted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from memfit.lazy_dataclass import dataclass

TABLE = Path(__file__).with_name("residuals.json")
COVERED = 0.9  # of what was measured lies within
EACH, EVERY = "all, averaged over sources", "all, averaged over cases"
WIDEST = "all cases, were the ends the others' extremes"
DEVICE = (
    "peak_reserved",
    "nvidia-smi",
    "peak_allocated_plus_context",
)  # counters that see more than live tensors


class Residual(NamedTuple):
    """One published case. `least` and `most`: what memfit says before anybody was off, from live
    tensors and the least context to all that the allocator holds and the most; both are `predicted`
    for live tensors."""

    id: str
    source: str
    metric: str
    confidence: str
    technique: str
    measured: int
    predicted: int
    least: int
    most: int
    lengths_vary: bool = False

    @property
    def counts(self) -> bool:
        """Runs that are described completely, with batches of one length, as an estimate assumes
        them: other cases say as much about what was not published as about memfit."""
        sound = self.measured > 0 < self.least and not self.lengths_vary
        return self.confidence == "high" and self.metric in DEVICE and sound


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of what was measured, nine tenths were between `low` times the least and `high` times the
    most that memfit says."""

    low: float
    high: float
    cases: int
    sources: int

    def holds(self, one: Residual) -> bool:
        return self.low * one.least <= one.measured <= self.high * one.most


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Of a source's cases, the share inside the spread that all other sources give; `low` and
    `high` are its middle ends, as errors."""

    cases: int
    covered: float
    low: float
    high: float


@lru_cache(maxsize=1)
def residuals() -> tuple[Residual, ...]:
    return tuple(Residual(*row) for row in json.loads(TABLE.read_bytes()))


@lru_cache(maxsize=1)
def spread() -> Spread:
    """Of the bundled residuals."""
    return of(residuals())


@lru_cache(maxsize=1)
def ratios() -> tuple[tuple[float, float], ...]:
    """(measured / predicted, weight) of the bundled cases that count, the largest ratio first; each
    source weighs the same, and all weights sum to 1."""
    usable = [one for one in residuals() if one.counts]
    each = Counter(one.source for one in usable)
    return tuple(
        sorted(
            ((one.measured / one.predicted, 1 / each[one.source] / len(each)) for one in usable),
            reverse=True,
        )
    )


def exceeding(ratio: float) -> float:
    """The share of published peaks, each source weighted equally, that were more than `ratio` times
    what memfit predicts."""
    return sum(weight for measured, weight in ratios() if measured > ratio)


def of(known: Iterable[Residual]) -> Spread:
    usable = [one for one in known if one.counts]
    low, high = ends(usable)
    return Spread(
        low=low, high=high, cases=len(usable), sources=len({one.source for one in usable})
    )


def widest(known: Sequence[Residual]) -> Spread:
    """What holds every case: no rule that reads ends off residuals gives wider ones."""
    low, high = (
        min(one.measured / one.least for one in known),
        max(one.measured / one.most for one in known),
    )
    return Spread(
        low=min(1.0, low),
        high=max(1.0, high),
        cases=len(known),
        sources=len({one.source for one in known}),
    )


def ends(chosen: Sequence[Residual]) -> tuple[float, float]:
    """The 5 % point of measured to least, and the 95 % point of measured to most, of the mean over
    sources of their distributions; never beyond what memfit says itself."""
    each = {source: 1 / count for source, count in Counter(one.source for one in chosen).items()}
    tail = (1 - COVERED) / 2 * len(each)
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
    """For each source what the others would have said of it; then the mean over sources, and over
    cases, with the widest ends. The last line is the most that any ends read off the others could
    hold: where one source has most of the cases, what the others know of it decides."""
    usable = [one for one in known if one.counts]
    found: dict[str, Coverage] = {}
    most: list[tuple[int, Spread]] = []
    for source in sorted({one.source for one in usable}):
        mine = [one for one in usable if one.source == source]
        others = [one for one in usable if one.source != source]
        said = of(others)
        inside = sum(said.holds(one) for one in mine)
        found[source] = Coverage(
            cases=len(mine), covered=inside / len(mine), low=said.low - 1, high=said.high - 1
        )
        if others:
            most.append((sum(widest(others).holds(one) for one in mine), widest(others)))
    if found:
        every = list(found.values())
        cases = sum(one.cases for one in every)
        middle = {"low": min(one.low for one in every), "high": max(one.high for one in every)}
        found[EACH] = Coverage(
            cases=cases, covered=sum(one.covered for one in every) / len(every), **middle
        )
        found[EVERY] = Coverage(
            cases=cases, covered=sum(one.cases * one.covered for one in every) / cases, **middle
        )
        low, high = (
            min((one.low for _, one in most), default=1.0),
            max((one.high for _, one in most), default=1.0),
        )
        found[WIDEST] = Coverage(
            cases=cases,
            covered=sum(inside for inside, _ in most) / cases,
            low=low - 1,
            high=high - 1,
        )
    return found


__all__ = [
    "DEVICE",
    "EACH",
    "EVERY",
    "TABLE",
    "WIDEST",
    "Coverage",
    "Residual",
    "Spread",
    "coverage",
    "exceeding",
    "of",
    "ratios",
    "residuals",
    "spread",
]
