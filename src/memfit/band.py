"""How far an estimate may be off: what was measured on published cases, as a share of what memfit
says of them.

A question is about a machine and a software that memfit never saw, so sources are what may be
exchanged, not cases: each source's distribution weighs the same, and the band is read off their
mean (pooled distributions: Dunn, Wasserman and Ramdas, arXiv 1809.07441; for fewer than 19 sources
their correction for few samples would make it endless, and is left out). A regime is what a figure
is about: a counter, one GPU or several, batches of one length or of varying ones. What an answer's
band rests on are counters that see what the allocator holds, or the device, over batches of one
length. `residuals.json` is written by `tools/accuracy.py` from published figures; a line is a case:
what it is, bytes measured, bytes predicted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple

from memfit.constants import fitted
from memfit.lazy_dataclass import dataclass

TABLE = Path(__file__).with_name("residuals.json")
COVERED = 0.9  # of what was measured lies within, where a source had no say in the band
TAIL: Annotated[
    float,
    fitted(
        "share that each end of the likely range leaves out, on the mean over sources",
        "all published cases of the band (residuals.json): of eight values tried, the one with "
        "which every regime is covered in 85 % by ends of the other sources, and none is wider",
    ),
] = 0.035
ENOUGH_SOURCES, ENOUGH_CASES = 3, 40  # fewer are no evidence for a regime
EACH, EVERY = "all, averaged over sources", "all, averaged over cases"
WIDEST = "all cases, were the ends the others' extremes"
DEVICE = (
    "peak_reserved",
    "nvidia-smi",
    "peak_allocated_plus_context",
)  # counters that see more than live tensors


COUNTERS = {
    "peak_reserved": "reserved",
    "nvidia-smi": "device",
    "peak_allocated_plus_context": "device",
    "weights": "",  # a part, no counter
    "peak_unspecified": "",
}


class Regime(NamedTuple):
    """What a figure is about."""

    counter: str  # live, reserved or device
    several: bool = False  # GPUs
    varies: bool = False  # the length of batches

    def __str__(self) -> str:
        gpus = "several GPUs" if self.several else "one GPU"
        return f"{self.counter}, {gpus}, {'varying lengths' if self.varies else 'one length'}"


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
    gpus: int = 1

    @property
    def regime(self) -> Regime:
        counter = COUNTERS.get(self.metric, "live")
        return Regime(counter, self.gpus > 1, self.lengths_vary)

    @property
    def sound(self) -> bool:
        """Of a run that is described completely."""
        return self.confidence == "high" and self.measured > 0 < self.least

    @property
    def counts(self) -> bool:
        """Runs that are described completely, with batches of one length, as an estimate assumes
        them: other cases say as much about what was not published as about memfit."""
        return self.sound and not self.lengths_vary and self.metric in DEVICE


@dataclass(frozen=True, kw_only=True)
class Spread:
    """What was measured was at least `low` times what memfit predicts and `floor` times the least
    that it says, and at most `high` times the most."""

    low: float
    high: float
    floor: float
    cases: int
    sources: int

    def holds(self, one: Residual) -> bool:
        """As ratios, which the ends are: a product would round an end's own case away."""
        return (
            self.low <= one.measured / one.predicted
            and self.floor <= one.measured / one.least
            and one.measured / one.most <= self.high
        )

    def least(self, one: Residual) -> float:
        return max(self.low * one.predicted, self.floor * one.least)

    def width(self, one: Residual) -> float:
        """Of the band around a case, as a share of what is predicted."""
        return (self.high * one.most - self.least(one)) / one.predicted


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
    # A sum of weights is rounded
    return min(1.0, sum(weight for measured, weight in ratios() if measured > ratio))


@lru_cache(maxsize=16)
def share_between(low: float, high: float) -> float:
    """The share of published peaks, each source weighted equally, that were at least `low` times
    what memfit predicts and at most `high` times the most that it says."""
    known = weighed([one for one in residuals() if one.counts])
    return sum(
        weight
        for one, weight in known
        if low <= one.measured / one.predicted and one.measured / one.most <= high
    )


@lru_cache(maxsize=1)
def varied() -> tuple[Residual, ...]:
    """Cases with batches of varying lengths."""
    known = residuals()
    return tuple(one for one in known if one.sound and one.lengths_vary and one.metric in DEVICE)


@lru_cache(maxsize=16)
def evidence(regime: Regime) -> tuple[int, int]:
    """Cases and sources of exactly this regime."""
    own = [one for one in residuals() if one.sound and one.regime == regime]
    return len(own), len({one.source for one in own})


@lru_cache(maxsize=16)
def spread_of(regime: Regime) -> Spread:
    """What an answer's band is made of. Batches of varying lengths reach as far as published ones
    did, which are few."""
    said = spread()
    if not regime.varies:
        return said
    return replace(said, high=max(said.high, ends(varied())[1])) if varied() else said


def of(known: Iterable[Residual]) -> Spread:
    return read_off([one for one in known if one.counts])


def read_off(usable: Sequence[Residual], tail: float = TAIL) -> Spread:
    low, high = ends(usable, tail)
    below = sorted((one.measured / one.least, weight) for one, weight in weighed(usable))
    return Spread(
        low=low,
        high=high,
        floor=min(1.0, reached(below, tail)),
        cases=len(usable),
        sources=len({one.source for one in usable}),
    )


def widest(known: Sequence[Residual]) -> Spread:
    """What holds every case: no rule that reads ends off residuals gives wider ones."""
    low, high = (
        min(one.measured / one.least for one in known),
        max(one.measured / one.most for one in known),
    )
    return Spread(
        low=0.0,
        high=max(1.0, high),
        floor=min(1.0, low),
        cases=len(known),
        sources=len({one.source for one in known}),
    )


def weighed(chosen: Sequence[Residual]) -> list[tuple[Residual, float]]:
    """Each case with its weight: sources weigh the same, and all weights sum to 1."""
    each = Counter(one.source for one in chosen)
    return [(one, 1 / each[one.source] / len(each)) for one in chosen]


def ends(chosen: Sequence[Residual], tail: float = TAIL) -> tuple[float, float]:
    """How far below what is predicted, and above the most that is said, measured figures lie, but
    for a tail on each side; never beyond what memfit says itself."""
    with_weight = weighed(chosen)
    below = sorted((one.measured / one.predicted, weight) for one, weight in with_weight)
    above = sorted(((one.measured / one.most, weight) for one, weight in with_weight), reverse=True)
    return min(1.0, reached(below, tail)), max(1.0, reached(above, tail))


def reached(ordered: Sequence[tuple[float, float]], wanted: float) -> float:
    """The ratio beyond which the weights add up to `wanted`."""
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


@dataclass(frozen=True, kw_only=True)
class RegimeCoverage:
    """Of a regime. `left_out`: the mean over its sources of the share that the others' ends hold;
    `inside`: the share of its cases that all ends hold; `width`: the middle width of the band."""

    regime: str
    cases: int
    sources: int
    left_out: float | None
    inside: float
    width: float

    @property
    def enough(self) -> bool:
        return self.sources >= ENOUGH_SOURCES and self.cases >= ENOUGH_CASES


def by_regime(known: Sequence[Residual], tail: float = TAIL) -> list[RegimeCoverage]:
    """Live bytes have ends of their own; reserved and device memory share theirs, since the
    context between them has a range already."""
    sound = [one for one in known if one.sound and one.regime.counter]
    live = [one for one in sound if one.regime.counter == "live" and not one.lengths_vary]
    held = [one for one in sound if one.counts]
    lines = []
    for title, chosen in regimes(sound):
        pool = live if all(one.regime.counter == "live" for one in chosen) else held
        lines.append(covered_regime(title, chosen, pool, tail))
    return lines


def regimes(sound: Sequence[Residual]) -> Iterator[tuple[str, list[Residual]]]:
    """Each regime, and reserved and device memory together."""
    for regime in sorted({one.regime for one in sound}):
        yield str(regime), [one for one in sound if one.regime == regime]
    for several in (False, True):
        both = [one for one in sound if one.counts and one.regime.several == several]
        if both:
            gpus = "several GPUs" if several else "one GPU"
            yield f"reserved or device, {gpus}, one length", both


def covered_regime(
    title: str, chosen: Sequence[Residual], pool: Sequence[Residual], tail: float
) -> RegimeCoverage:
    shares = []
    for source in sorted({one.source for one in chosen}):
        others = [one for one in pool if one.source != source]
        mine = [one for one in chosen if one.source == source]
        if others:
            said = read_off(others, tail)
            shares.append(sum(said.holds(one) for one in mine) / len(mine))
    every = read_off(pool, tail)
    return RegimeCoverage(
        regime=title,
        cases=len(chosen),
        sources=len({one.source for one in chosen}),
        left_out=sum(shares) / len(shares) if shares else None,
        inside=sum(every.holds(one) for one in chosen) / len(chosen),
        width=sorted(every.width(one) for one in chosen)[len(chosen) // 2],
    )


__all__ = [
    "DEVICE",
    "EACH",
    "EVERY",
    "TABLE",
    "WIDEST",
    "Coverage",
    "Regime",
    "RegimeCoverage",
    "Residual",
    "Spread",
    "by_regime",
    "coverage",
    "evidence",
    "exceeding",
    "of",
    "read_off",
    "ratios",
    "residuals",
    "share_between",
    "spread",
    "spread_of",
    "varied",
]
