"""The record: how far memfit and others are off, as text, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from memfit.report.figures import gib
from memfit.report.markdown import table
from memfit.report.tables import columns
from memfit.report.text import job_words
from memfit.truth.accuracy import METHODS, PEAKS, Accuracy, Figures, Outcome, figures, over_sources
from memfit.truth.case import METRICS

SCHEMA = 1
HEAD = ("source", "metric", "cases", "median", "p95", "worst", "bias", "under", "deepest")
METHOD_HEAD = ("method", "cases", "median", "p95", "worst", "bias", "under", "deepest", "OOM seen", "false no")
LEGEND = (
    "errors are predicted / measured − 1; median and p95 of their size; bias: the middle error; under: share of cases that are more than "
    "1 % under-estimated; deepest: the worst of them; averages are over sources, not over lines"
)


def share(value: float, digits: int = 1) -> str:
    """`2.4 %`; without a sign for zero."""
    text = f"{100 * value:.{digits}f}"
    return f"{'0.0' if float(text) == 0 and digits == 1 else text} %"


def signed(value: float) -> str:
    text = f"{100 * value:+.1f}"
    return f"{'0.0' if float(text) == 0 else text} %"


def rows(found: Accuracy) -> list[tuple[str, ...]]:
    """A line a source and metric, then the average over them."""
    lines = []
    for (source, metric), outcomes in found.groups().items():
        one = figures(error for case in outcomes if (error := case.error()) is not None)
        if one is not None:
            lines.append((source, METRICS.get(metric, metric), *cells(one)))
    average = over_sources(found.groups())
    return [*lines, ("all, averaged", "", *cells(average))] if average is not None else lines


def cells(one: Figures) -> tuple[str, ...]:
    return (
        str(one.cases),
        share(one.median),
        share(one.p95),
        signed(one.worst),
        signed(one.bias),
        share(one.under, 0),
        signed(one.deepest),
    )


def method_rows(found: Accuracy) -> list[tuple[str, ...]]:
    """A line a method, over the peaks that it speaks of."""
    peaks = {key: outcomes for key, outcomes in found.groups().items() if key[1] in PEAKS}
    lines = []
    for method in METHODS:
        one = over_sources(peaks, method)
        if one is not None:
            lines.append((method, *cells(one), ratio(found.decisions(method)), ratio(found.fitted(method))))
    return lines


def ratio(counts: tuple[int, int]) -> str:
    return f"{counts[0]}/{counts[1]}" if counts[1] else ""


def reason_rows(found: Accuracy) -> list[tuple[str, ...]]:
    return [(reason, str(count)) for reason, count in found.reasons().items()]


def worst_rows(found: Accuracy, count: int) -> list[tuple[str, ...]]:
    return [
        (one.case.id, METRICS.get(one.case.metric, one.case.metric), gib(one.case.value or 0), gib(one.predicted), signed(one.error() or 0))
        for one in found.worst(count)
    ]


def summary(found: Accuracy) -> str:
    total = len(found.outcomes) + len(found.refused)
    right, asked = found.decisions()
    oom = f"; {right} of {asked} runs out of memory foreseen" if asked else ""
    return f"{total} rows: {len(found.outcomes)} answered, {len(found.refused)} refused, each with its reason{oom}"


def text(found: Accuracy, *, worst: int = 0) -> str:
    parts = [summary(found), columns(HEAD, rows(found), frozenset(range(2, 9)))]
    parts.append("peaks by every method\n" + columns(METHOD_HEAD, method_rows(found), frozenset(range(1, 10))))
    parts.append("refused\n" + columns(("reason", "rows"), reason_rows(found), frozenset({1})))
    if worst:
        parts.append("worst\n" + "\n\n".join("\n".join(case_lines(one)) for one in found.worst(worst)))
    return "\n\n".join([*parts, LEGEND])


def case_lines(one: Outcome) -> Iterator[str]:
    """One case in full: what was measured, what memfit says, and what that is made of."""
    case = one.case
    said = f"predicted {gib(one.predicted)} ({signed(one.error() or 0)})"
    yield f"{case.id}: {case.model}, {METRICS.get(case.metric, case.metric)} {gib(case.value or 0)} GiB, {said}"
    yield f"  {job_words(case.job)}"
    yield "  " + ", ".join(f"{name} {gib(size)}" for name, size in one.parts.items() if size >= 1 << 24) + f"; peak in {one.moment}"
    yield from (f"  {note}" for note in case.notes)


def markdown(found: Accuracy, *, worst: int = 0) -> str:
    lines = [
        summary(found) + ".",
        "",
        *table(HEAD, rows(found)),
        "",
        "## Every method, on peaks",
        "",
        *table(METHOD_HEAD, method_rows(found)),
    ]
    lines += ["", f"{LEGEND[:1].upper()}{LEGEND[1:]}.", "", "## Refused", "", *table(("reason", "rows"), reason_rows(found))]
    if worst:
        lines += ["", "## Worst", "", *table(("case", "metric", "measured", "predicted", "error"), worst_rows(found, worst))]
    return "\n".join(lines)


def data(found: Accuracy) -> dict[str, Any]:
    """Everything, for programs: each outcome and each refusal, bytes as integers."""
    average = over_sources(found.groups())
    return {
        "schema": SCHEMA,
        "average": None if average is None else vars_of(average),
        "groups": [
            {
                "source": source,
                "metric": metric,
                **{method: vars_of(one) for method in METHODS if (one := method_figures(outcomes, method))},
            }
            for (source, metric), outcomes in found.groups().items()
        ],
        "oom": {method: dict(zip(("seen", "asked"), found.decisions(method), strict=True)) for method in METHODS},
        "outcomes": [outcome(one) for one in found.outcomes],
        "refused": [vars(one) | {} for one in found.refused],
        "reasons": found.reasons(),
    }


def method_figures(outcomes: Sequence[Outcome], method: str) -> Figures | None:
    return figures(error for case in outcomes if (error := case.error(method)) is not None)


def vars_of(one: Figures) -> dict[str, float]:
    return {name: getattr(one, name) for name in ("cases", "median", "p95", "worst", "bias", "under", "deepest")}


def outcome(one: Outcome) -> dict[str, Any]:
    case = one.case
    return {
        "id": case.id, "source": case.source, "model": case.model, "metric": case.metric, "confidence": case.confidence, "measured": case.value,
        "predicted": one.predicted, "error": one.error(), "verdict": one.verdict, "seconds": round(one.seconds, 4), "parts": dict(one.parts),
        "moment": one.moment, "baselines": dict(one.others), "notes": list(case.notes),
    }  # fmt: skip


__all__ = ["data", "markdown", "text"]
