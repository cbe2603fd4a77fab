"""Every method of estimating side by side: over all peaks, and by metric, task, technique, GPU and
source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from memfit.truth.accuracy import (
    METHODS,
    OURS,
    PEAKS,
    TRACE,
    Accuracy,
    Figures,
    Outcome,
    figures,
    technique,
)
from memfit.truth.case import METRICS

OOM = "oom"


def task(one: Outcome) -> str:
    return "training" if one.case.job.training else "inference"


def device(one: Outcome) -> str:
    return "no GPU named" if one.case.gpu is None else one.case.gpu.name


AXES: dict[str, Callable[[Outcome], str]] = {
    "metric": lambda one: METRICS.get(one.case.metric, one.case.metric),
    "task": task,
    "technique": lambda one: technique(one.case),
    "GPU": device,
    "source": lambda one: one.case.source,
}


def groups(found: Accuracy, axis: str) -> Iterator[tuple[str, Accuracy]]:
    """The cases of each name on an axis; other metrics than peaks and runs out of memory have names
    of their own on `metric` alone."""
    names: dict[str, list[Outcome]] = {}
    for one in found.outcomes:
        if axis == "metric" or one.case.metric in (*PEAKS, OOM):
            names.setdefault(AXES[axis](one), []).append(one)
    for name, outcomes in sorted(names.items()):
        yield name, replace(found, outcomes=tuple(outcomes), refused=(), kernels=())


def said(found: Accuracy, method: str) -> dict[str, Any] | None:
    """What is told of one method over these cases: figures of its errors (null where only runs out
    of memory are), decisions, seconds."""
    one = method_figures(found.outcomes, method)
    seen, asked = found.decisions(method)
    false_no, fitted = found.fitted(method)
    if one is None and not asked:
        return None
    decided = {"seen": seen, "asked": asked, "false_no": false_no, "fitted": fitted}
    return {
        "figures": None if one is None else vars_of(one),
        "oom": decided,
        "seconds": found.seconds(method),
    }


def data(found: Accuracy) -> dict[str, dict[str, dict[str, Any]]]:
    """Axis → name → method → what is told of it."""
    return {
        axis: {
            name: told
            for name, some in groups(found, axis)
            if (told := {one: words for one in METHODS if (words := said(some, one))})
        }
        for axis in AXES
    }


def producers(found: Accuracy) -> list[dict[str, Any]]:
    """Formulas and trace on the rows that both answer."""
    lines = []
    for (source, metric), outcomes in found.groups().items():
        both = [one for one in outcomes if one.traced is not None]
        ours, theirs = method_figures(both, OURS), method_figures(both, TRACE)
        if ours is not None and theirs is not None:
            apart = max((one.predicted / one.others[TRACE] - 1 for one in both), key=abs)
            spent = sorted(one.seconds[TRACE] for one in both)[len(both) // 2]
            lines.append(
                {
                    "source": source,
                    "metric": metric,
                    "formulas": vars_of(ours),
                    "trace": vars_of(theirs),
                    "apart": apart,
                    "seconds": spent,
                }
            )
    return lines


def method_figures(outcomes: Sequence[Outcome], method: str) -> Figures | None:
    return figures(error for case in outcomes if (error := case.error(method)) is not None)


def vars_of(one: Figures) -> dict[str, float]:
    return {
        name: getattr(one, name)
        for name in ("cases", "median", "p95", "worst", "bias", "under", "deepest")
    }


__all__ = [
    "AXES",
    "data",
    "device",
    "groups",
    "method_figures",
    "producers",
    "said",
    "task",
    "vars_of",
]
