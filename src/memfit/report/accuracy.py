"""The record: how far memfit and others are off, as text, Markdown and JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memfit.report import methods
from memfit.report.figures import gib
from memfit.report.markdown import table
from memfit.report.methods import AXES, device, method_figures, producers, task
from memfit.report.tables import columns
from memfit.report.text import job_words
from memfit.truth.accuracy import (
    CERTAIN,
    METHODS,
    OURS,
    PEAKS,
    Accuracy,
    Figures,
    KernelOutcome,
    Outcome,
    figures,
    over_sources,
    technique,
)
from memfit.truth.case import BROKEN, CONFIDENCES, METRICS
from memfit.truth.causes import why
from memfit.truth.served import summed

WORDS = frozenset({"compared", "reason", "model", "cause", "version"})  # columns of text
EVERY_SOURCE = "all, averaged"
TASK_HEAD = ("rows described completely", "answered", "%")
REASON_HEAD = ("about", "reason", CERTAIN, "rows")
HEAD = ("source", "compared", "cases", "median", "p95", "worst", "bias", "under", "deepest")
METHOD_HEAD = (
    "method",
    "cases",
    "median",
    "p95",
    "worst",
    "bias",
    "under",
    "deepest",
    "OOM seen",
    "false no",
    "seconds",
)
PRODUCER_HEAD = (
    "source",
    "compared",
    "cases",
    "formulas: median",
    "p95",
    "worst",
    "trace: median",
    "p95",
    "worst",
    "apart",
    "seconds",
)
SERVED_HEAD = ("engine", "answered", "figure", "rows", "median", "p95", "over 5 % more promised")
SHORT = {
    "after a step": "after a step",
    "after generation": "after generation",
    "counter not named": "not named",
    "allocated + context": "with context",
}
LEGEND = (
    "Errors are predicted / measured − 1, in per cent. median, p95: of their size; bias: "
    "the middle error; under: share of cases that are "
    "under-estimated by more than 1 %; deepest: the worst of those. Averages are over "
    "sources, not over lines. OOM seen: runs out of memory "
    "that were foreseen; false no: runs that went through and were called too large. "
    "seconds: the middle of the processor time that one answer took here."
)


def share(value: float, digits: int = 1) -> str:
    """`2.4`; without a sign for zero."""
    text = f"{100 * value:.{digits}f}"
    return "0.0" if digits == 1 and float(text) == 0 else text


def signed(value: float) -> str:
    text = f"{100 * value:+.1f}"
    return "0.0" if float(text) == 0 else text


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


def rows(found: Accuracy, confidence: str = "", *, fixed: bool = False) -> list[tuple[str, ...]]:
    """A line a source and metric, then the average over them; with a confidence, of its rows
    alone; `fixed`: without runs whose lengths vary."""
    lines, groups = [], found.groups(confidence, fixed=fixed)
    for (source, metric), outcomes in groups.items():
        one = figures(error for case in outcomes if (error := case.error()) is not None)
        if one is not None:
            lines.append((source, METRICS.get(metric, metric), *cells(one)))
    average = over_sources(groups)
    return [*lines, (EVERY_SOURCE, "", *cells(average))] if average is not None else lines


def task_rows(found: Accuracy) -> list[tuple[str, ...]]:
    """Of the rows that carry memory and are described completely, those answered, by task."""
    return [
        (name, ratio(counts), share(counts[0] / counts[1], 0))
        for name, counts in found.tasks().items()
    ]


def technique_rows(found: Accuracy) -> list[tuple[str, ...]]:
    """A line a technique, over peaks."""
    lines = []
    for name, outcomes in found.by(lambda one: technique(one.case)).items():
        one = figures(error for case in outcomes if (error := case.error()) is not None)
        if one is not None:
            lines.append((name, *cells(one)))
    return lines


def kind_rows(found: Accuracy) -> list[tuple[str, ...]]:
    """A line a task, then a line a GPU, over peaks."""
    lines = []
    for name, outcomes in (*found.by(task).items(), *found.by(device).items()):
        one = method_figures(outcomes, OURS)
        if one is not None:
            lines.append((name, *cells(one)))
    return lines


def method_rows(found: Accuracy) -> list[tuple[str, ...]]:
    """A line a method, over the peaks that it speaks of."""
    peaks = {key: outcomes for key, outcomes in found.groups().items() if key[1] in PEAKS}
    lines = []
    for method in METHODS:
        one = over_sources(peaks, method)
        if one is not None:
            lines.append(
                (
                    method,
                    *cells(one),
                    ratio(found.decisions(method)),
                    ratio(found.fitted(method)),
                    brief(found.seconds(method)),
                )
            )
    return lines


AXIS_HEAD = ("by", *METHOD_HEAD)


def axis_rows(
    told: Mapping[str, Mapping[str, Mapping[str, Any]]], axis: str
) -> list[tuple[str, ...]]:
    """A line a name on the axis and method, from `by` of the JSON."""
    lines = []
    for name, each in told[axis].items():
        for method, one in each.items():
            oom, known = one["oom"], one["figures"]
            counts = cells(Figures(**known)) if known else ("",) * 7
            decided = ratio((oom["seen"], oom["asked"])), ratio((oom["false_no"], oom["fitted"]))
            lines.append((name, method, *counts, *decided, brief(one["seconds"])))
    return lines


def producer_rows(lines: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Formulas and trace on the rows that both answer: a line a source and metric; `apart` is how
    far they differ at most."""
    return [
        (
            one["source"],
            METRICS.get(one["metric"], one["metric"]),
            str(one["formulas"]["cases"]),
            *cells(Figures(**one["formulas"]))[1:4],
            *cells(Figures(**one["trace"]))[1:4],
            signed(one["apart"]),
            brief(one["seconds"]),
        )
        for one in lines
    ]


def brief(seconds: float | None) -> str:
    """Seconds with one digit that counts."""
    if seconds is None:
        return ""
    return (
        "<0.001"
        if seconds < 0.0005
        else f"{seconds:.3f}"
        if seconds < 0.0095
        else f"{seconds:.2f}"
        if seconds < 0.95
        else f"{seconds:.0f}"
    )


def kernel_rows(found: Accuracy) -> list[tuple[str, ...]]:
    """A line a kernel and provider."""
    groups: dict[str, list[KernelOutcome]] = {}
    for one in found.kernels:
        groups.setdefault(one.kernel.name, []).append(one)
    lines = []
    for name, outcomes in sorted(groups.items()):
        one_group = figures(one.error for one in outcomes)
        if one_group is not None:
            lines.append((name, *cells(one_group)))
    return lines


def share_rows(found: Accuracy) -> list[tuple[str, ...]]:
    """Rows answered of all, by what they are about and how completely they are described."""
    return [
        (kind, *(ratio(groups.get(name, (0, 0))) for name in (*CONFIDENCES, "all")))
        for kind, groups in found.shares().items()
    ]


def ratio(counts: tuple[int, int]) -> str:
    return f"{counts[0]}/{counts[1]}" if counts[1] else ""


def reason_rows(found: Accuracy) -> list[tuple[str, ...]]:
    return [
        (kind, reason, str(certain) if certain else "", str(count))
        for (kind, reason), (certain, count) in found.reasons().items()
    ]


def worst_rows(worst: Sequence[Outcome]) -> list[tuple[str, ...]]:
    return [
        (
            one.case.id,
            one.case.model,
            METRICS.get(one.case.metric, one.case.metric),
            gib(one.case.value or 0),
            gib(one.predicted),
            signed(one.error() or 0),
            why(one.case),
        )
        for one in worst
    ]


def summary(found: Accuracy) -> str:
    right, asked = found.decisions()
    oom = f"; {right} of {asked} runs out of memory foreseen" if asked else ""
    answered = len(found.outcomes) + len(found.kernels)
    return (
        f"{found.rows} row{'s' * (found.rows != 1)}: {answered} answered, "
        f"{len(found.refused)} refused, each with its reason{oom}"
    )


def served_rows(serving: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A line an engine and figure, over its complete rows."""
    made: list[tuple[str, ...]] = []
    for engine, one in serving.items():
        answered = f"{one['answered']} of {one['complete']}"
        for name, figure in one["figures"].items():
            over = figure.get("promised_over_5_percent")
            cell = "" if over is None else share(over)
            made.append(
                (
                    engine,
                    answered,
                    name,
                    str(figure["n"]),
                    share(figure["median"]),
                    share(figure["p95"]),
                    cell,
                )
            )
    return made


def broken(found: Accuracy, shown: int = 5) -> str:
    """Lines of the file that are no rows, the first of them by name; nothing where all are."""
    lines = [f"{one.id} ({one.reason})" for one in found.refused if one.kind == BROKEN]
    more = f" and {len(lines) - shown} more" if len(lines) > shown else ""
    are = "line of the file is no row" if len(lines) == 1 else "lines of the file are no rows"
    return f"{len(lines)} {are}: {', '.join(lines[:shown])}{more}" if lines else ""


# ----------------------------------------------------------------------------------------- as text
def text(found: Accuracy, *, worst: int = 0, width: int = 80) -> str:
    """Columns that stay within the terminal: sources without their owner, no middle error."""
    parts = [fill(summary(found), width)]
    for heading, head, lines, first in (
        (
            "by source, rows described completely",
            HEAD,
            [short(row) for row in rows(found, CERTAIN)],
            2,
        ),
        (
            "by source, rows described completely, batches of one length",
            HEAD,
            [short(row) for row in rows(found, CERTAIN, fixed=True)],
            2,
        ),
        ("by source", HEAD, [short(row) for row in rows(found)], 2),
        ("peaks by technique", ("technique", *HEAD[2:]), technique_rows(found), 1),
        ("peaks by task and GPU", ("task, GPU", *HEAD[2:]), kind_rows(found), 1),
        (
            "formulas and trace on the same rows",
            PRODUCER_HEAD,
            [short(row) for row in producer_rows(producers(found))],
            2,
        ),
        ("peaks by every method", METHOD_HEAD, method_rows(found), 1),
        *((f"every method: {name}", METHOD_HEAD, lines, 1) for name, lines in of_axes(found)),
        ("single kernels", ("kernel", *HEAD[2:]), kernel_rows(found), 1),
    ):
        if lines:
            parts.append(f"{heading}\n{plain(head, lines, first)}")
    if found.tasks():
        parts.append("answered\n" + columns(TASK_HEAD, task_rows(found), frozenset({1, 2})))
    parts.append(
        "rows answered, by confidence\n"
        + columns(("about", *CONFIDENCES, "all"), share_rows(found), frozenset(range(1, 5)))
    )
    parts += [fill(line, width) for line in missing(found)]
    if found.served:
        parts.append(
            "start-up logs of serving engines\n"
            + columns(SERVED_HEAD, served_rows(summed(found.served)), frozenset(range(3, 7)))
        )
    if found.refused:
        parts.append(
            "refused\n"
            + columns(
                REASON_HEAD, [clipped(row, width) for row in reason_rows(found)], frozenset({2, 3})
            )
        )
    if worst:
        parts.append(
            "worst\n" + "\n\n".join("\n".join(case_lines(one, width)) for one in found.worst(worst))
        )
    return "\n\n".join([*parts, fill(LEGEND, width)])


def of_axes(found: Accuracy) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """By metric and by task; by technique, GPU and source in the other formats, which have room."""
    told = methods.data(found)
    for axis in ("metric", "task"):
        for name in told[axis]:
            yield name, [row[1:] for row in axis_rows({axis: {name: told[axis][name]}}, axis)]


def plain(head: Sequence[str], lines: Sequence[Sequence[str]], first: int) -> str:
    """The plain form of a table, without the median error, and for time without the worst one; the
    other formats have both."""
    narrow = {"bias", "worst"} if "seconds" in head else {"bias"}
    keep = [at for at in range(len(head)) if head[at] not in narrow]
    return columns(
        [head[at] for at in keep],
        [[row[at] for at in keep] for row in lines],
        frozenset(range(first, len(head))),
    )


def short(row: tuple[str, ...]) -> tuple[str, ...]:
    return (row[0].rpartition("/")[2][:18], SHORT.get(row[1], row[1]), *row[2:])


def clipped(row: tuple[str, ...], width: int) -> tuple[str, ...]:
    room = width - 31
    return (row[0], row[1] if len(row[1]) <= room else row[1][: room - 1] + "…", *row[2:])


def fill(words: str, width: int, indent: str = "") -> str:
    return textwrap.fill(
        words,
        width,
        subsequent_indent=indent,
        initial_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def case_lines(one: Outcome, width: int) -> Iterator[str]:
    """One case in full: what was measured, what memfit says, and what that is made of."""
    case = one.case
    said = f"predicted {gib(one.predicted)} ({signed(one.error() or 0)} %)"
    yield fill(
        (
            f"{case.id}: {case.model}, {METRICS.get(case.metric, case.metric)} "
            f"{gib(case.value or 0)} GiB, {said}"
        ),
        width,
    )
    made = ", ".join(f"{name} {gib(size)}" for name, size in one.parts.items() if size >= 1 << 24)
    for words in (
        job_words(case.job),
        f"{made}; peak in {one.moment}",
        *case.notes,
        f"cause: {why(case)}",
    ):
        yield fill(words, width, "  ")


# ------------------------------------------------------------------------------------- as Markdown
def markdown(found: Accuracy, *, worst: int = 0) -> str:
    lines, told = [f"{summary(found)}.", "", LEGEND], methods.data(found)
    for heading, head, body in (
        ("By source, rows described completely", HEAD, rows(found, CERTAIN)),
        (
            "By source, rows described completely, batches of one length",
            HEAD,
            rows(found, CERTAIN, fixed=True),
        ),
        ("By source", HEAD, rows(found)),
        ("Peaks by technique", ("technique", *HEAD[2:]), technique_rows(found)),
        ("Peaks by task and GPU", ("task, GPU", *HEAD[2:]), kind_rows(found)),
        ("Formulas and trace on the same rows", PRODUCER_HEAD, producer_rows(producers(found))),
        ("Peaks by every method", METHOD_HEAD, method_rows(found)),
        *((f"Every method by {axis}", AXIS_HEAD, axis_rows(told, axis)) for axis in AXES),
        ("Single kernels", ("kernel", *HEAD[2:]), kernel_rows(found)),
        ("Start-up logs of serving engines", SERVED_HEAD, served_rows(summed(found.served))),
        ("Answered", TASK_HEAD, task_rows(found)),
        ("Rows answered", ("about", *CONFIDENCES, "all"), share_rows(found)),
        ("Refused", REASON_HEAD, reason_rows(found)),
        (
            "Worst",
            ("case", "model", "compared", "measured", "predicted", "error", "cause"),
            worst_rows(found.worst(worst)),
        ),
    ):
        if body:
            lines += ["", f"## {heading}", "", *table(head, body, WORDS)]
    for line in missing(found):
        lines += ["", f"{line[0].upper()}{line[1:]}."]
    return "\n".join(lines)


def missing(found: Accuracy) -> Iterator[str]:
    """Why a tool has no line, or fewer cases than it should."""
    if found.absent:
        yield f"not installed: {', '.join(found.absent)}"
    for method, (count, first) in found.failures().items():
        yield f"{method} fails on {count} case{'s' * (count != 1)}, first with {first}"


__all__ = ["WORDS", "markdown", "text"]
