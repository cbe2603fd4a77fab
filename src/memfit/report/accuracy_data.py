"""The comparison with published figures as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.report import methods
from memfit.report.methods import device, method_figures, producers, task, vars_of
from memfit.truth.accuracy import (
    CERTAIN,
    METHODS,
    OURS,
    PEAKS,
    Accuracy,
    Figures,
    KernelOutcome,
    Outcome,
    over_sources,
    technique,
)
from memfit.truth.baselines.peers import PEERS
from memfit.truth.causes import why
from memfit.truth.served import summed
from memfit.truth.served_speed import summed_speeds

SCHEMA = 2
NOTABLE = 0.03  # an error that wants a cause
FIELDS = (
    ("schema", "integer", f"{SCHEMA}; a key that goes, or means something else, raises it"),
    ("rows", "integer", "rows looked at"),
    (
        "average",
        "figures?",
        (
            "memfit over all groups: the mean over sources of the mean over their metrics; "
            "null without a case"
        ),
    ),
    (
        "certain",
        "figures?",
        "the same over the rows of confidence `high` alone, which describe a run completely",
    ),
    (
        "certain_fixed",
        "figures?",
        "the same without runs whose batches are as long as a dataset's texts",
    ),
    (
        "groups",
        "list",
        "for each `source` and `metric`, the figures of every method that applies, by its name",
    ),
    ("techniques", "map", "for each technique, memfit's figures over peaks"),
    ("tasks", "map", "the same for training and inference"),
    ("gpus", "map", "the same for each GPU"),
    (
        "producers",
        "list",
        (
            "for each `source` and `metric` that the trace answers: figures of `formulas` "
            "and `trace`, how far `apart` at most, `seconds`"
        ),
    ),
    (
        "methods",
        "map",
        (
            "for each method, the average over sources of its figures for peaks, and "
            "`seconds`, the middle of what an answer took"
        ),
    ),
    (
        "by",
        "map",
        (
            "for each axis (metric, task, technique, GPU, source), name and method: "
            "`figures`, `oom` as below, `seconds`"
        ),
    ),
    (
        "kernels",
        "list",
        "single kernels: `id`, `source`, `kernel`, `confidence`, `measured`, `predicted`, `error`",
    ),
    (
        "oom",
        "map",
        (
            "for each method: runs out of memory `seen` of those `asked`, and `false_no` of "
            "the runs that `fitted`"
        ),
    ),
    ("absent", "list", "tools that were wanted and are not installed"),
    (
        "answered",
        "map",
        (
            "of the rows that carry memory and are of confidence `high`: `answered` of "
            "`rows`, for each task, and for serving engines"
        ),
    ),
    ("shares", "map", "for each kind of row and confidence: `answered` of `rows`"),
    (
        "outcomes",
        "list",
        (
            "each case: `measured`, `predicted`, `error`, `lengths_vary`, `gpus`, `parts`, "
            "`moment`, `technique`, `baselines`, `traced`, `seconds`, `notes`, `cause`"
        ),
    ),
    (
        "refused",
        "list",
        (
            "each row without an answer: `id`, `source`, `kind`, `reason`, `detail`, "
            "`metric`, `confidence`, `task`"
        ),
    ),
    (
        "reasons",
        "list",
        (
            "`kind`, `reason`, number of `rows`, and how many of them are `certain`: of "
            "confidence `high`"
        ),
    ),
    (
        "serving",
        "object",
        (
            "by engine: `rows`, those `complete` (confidence high or medium, model and GPU known), "
            "those of them `answered`, and by figure the errors: `n`, `median`, `p95`, and of "
            "`kv_tokens` the share `promised_over_5_percent`"
        ),
    ),
    (
        "serving_speed",
        "object",
        (
            "by engine, of published speeds: `rows`, those `answered`, the errors' `median` and "
            "`p95`, and of `pairs` of one version, GPU and load the share `pairs_in_order`"
        ),
    ),
)


def data(found: Accuracy) -> dict[str, Any]:
    """Everything, for programs: each outcome and each refusal, bytes as integers."""
    average, certain = over_sources(found.groups()), over_sources(found.groups(CERTAIN))
    fixed = over_sources(found.groups(CERTAIN, fixed=True))
    return {
        "schema": SCHEMA,
        "rows": found.rows,
        "average": None if average is None else vars_of(average),
        "certain": None if certain is None else vars_of(certain),
        "certain_fixed": None if fixed is None else vars_of(fixed),
        **grouped(found),
        "kernels": [kernel(one) for one in found.kernels],
        "oom": out_of_memory(found),
        "absent": list(found.absent),
        "answered": counted(found.tasks()),
        "shares": {kind: counted(groups) for kind, groups in found.shares().items()},
        "outcomes": [outcome(one) for one in found.outcomes],
        "refused": [vars(one) | {} for one in found.refused],
        "reasons": [
            {"kind": kind, "reason": reason, "rows": count, "certain": certain}
            for (kind, reason), (certain, count) in found.reasons().items()
        ],
        "serving": summed(found.served),
        "serving_speed": summed_speeds(found.speeds),
    }


def grouped(found: Accuracy) -> dict[str, Any]:
    """Figures of the rows that have something in common, and of each method."""
    averages = averages_of(found)
    return {
        "groups": [
            {"source": source, "metric": metric, **by_method(outcomes)}
            for (source, metric), outcomes in found.groups().items()
        ],
        "techniques": ours(found.by(lambda one: technique(one.case))),
        "tasks": ours(found.by(task)),
        "gpus": ours(found.by(device)),
        "producers": producers(found),
        "methods": {
            method: {**vars_of(one), "seconds": found.seconds(method)}
            for method, one in averages.items()
        },
        "by": methods.data(found),
    }


def averages_of(found: Accuracy) -> dict[str, Figures]:
    """Of each method that answers, over all groups of peaks."""
    peaks = {key: outcomes for key, outcomes in found.groups().items() if key[1] in PEAKS}
    return {method: one for method in METHODS if (one := over_sources(peaks, method))}


def by_method(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {method: vars_of(one) for method in METHODS if (one := method_figures(outcomes, method))}


def ours(groups: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """memfit's figures of each group."""
    return {
        name: vars_of(one)
        for name, outcomes in groups.items()
        if (one := method_figures(outcomes, OURS))
    }


def kernel(one: KernelOutcome) -> dict[str, Any]:
    return {
        "id": one.kernel.id,
        "source": one.kernel.source,
        "kernel": one.kernel.name,
        "confidence": one.kernel.confidence,
        "measured": one.kernel.value,
        "predicted": one.predicted,
        "error": one.error,
    }


def out_of_memory(found: Accuracy) -> dict[str, dict[str, int]]:
    """What each method says of runs that went out of memory, and of those that went through."""
    names, averages = ("seen", "asked", "false_no", "fitted"), averages_of(found)
    return {
        method: dict(zip(names, (*found.decisions(method), *found.fitted(method)), strict=True))
        for method in METHODS
        if method in averages or not peer(method)
    }


def counted(groups: Mapping[str, Sequence[int]]) -> dict[str, dict[str, int]]:
    return {name: {"answered": counts[0], "rows": counts[1]} for name, counts in groups.items()}


def peer(method: str) -> bool:
    """Whether a method is another tool, which runs only with `--peers`."""
    return method in {one.name for one in PEERS}


def outcome(one: Outcome) -> dict[str, Any]:
    case = one.case
    return {
        "id": case.id,
        "source": case.source,
        "model": case.model,
        "metric": case.metric,
        "confidence": case.confidence,
        "lengths_vary": case.lengths_vary,
        "gpus": case.strategy.ranks,
        "measured": case.value,
        "predicted": one.predicted,
        "least": one.least,
        "most": one.most,
        "error": one.error(),
        "verdict": one.verdict,
        "technique": technique(case),
        "seconds": {method: round(spent, 6) for method, spent in one.seconds.items()},
        "parts": dict(one.parts),
        "moment": one.moment,
        "baselines": dict(one.others),
        "notes": list(case.notes),
        "cause": why(case) if abs(one.error() or 0) > NOTABLE else "",
        "traced": None
        if one.traced is None
        else {name: getattr(one.traced, name) for name in ("predicted", "versions", "instead")},
    }


__all__ = ["FIELDS", "NOTABLE", "data"]
