"""Statistics of signed errors: nothing is averaged over lines of different sources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memfit.lazy_dataclass import dataclass

NOTICEABLE = 0.01  # an under-estimate of less than this is noise of the figures' last digits


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one group: errors are shares of the measured value. `under` is the share of cases
    under-estimated by more than 1 %."""

    cases: int
    median: float
    p95: float
    worst: float
    bias: float
    under: float
    deepest: float


def figures(errors: Iterable[float]) -> Figures | None:
    """Statistics of signed errors."""
    found = sorted(errors)
    if not found:
        return None
    sizes = sorted(abs(one) for one in found)
    under = [one for one in found if one < -NOTICEABLE]
    return Figures(
        cases=len(found),
        median=middle(sizes),
        p95=p95(sizes),
        worst=max(found, key=abs),
        bias=middle(found),
        under=len(under) / len(found),
        deepest=min(found[0], 0.0),
    )


def p95(ordered: Sequence[float]) -> float:
    """The nearest rank: 95 % of the figures or more are no larger. Of fewer than 20 it is the
    largest."""
    return ordered[-(-95 * len(ordered) // 100) - 1]


def middle(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def averaged(groups: Iterable[Iterable[Figures]]) -> Figures | None:
    """The mean over sources of the mean over a source's figures, so that no long table drowns the
    others; worst and deepest are of all."""
    sources = [found for group in groups if (found := list(group))]
    every = [one for group in sources for one in group]
    if not every:
        return None

    def mean(name: str) -> float:
        each = [sum(float(getattr(one, name)) for one in group) / len(group) for group in sources]
        return sum(each) / len(each)

    return Figures(
        cases=sum(one.cases for one in every),
        median=mean("median"),
        p95=mean("p95"),
        worst=max((one.worst for one in every), key=abs),
        bias=mean("bias"),
        under=mean("under"),
        deepest=min(one.deepest for one in every),
    )


__all__ = ["NOTICEABLE", "Figures", "averaged", "figures", "middle", "p95"]
