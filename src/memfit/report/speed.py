"""The record of predicted speeds, as text, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memfit.report.accuracy import EVERY_SOURCE, cells
from memfit.report.markdown import table
from memfit.report.tables import columns
from memfit.truth.speed import Speeds, reasons
from memfit.truth.statistics import figures

EVERY_CASE = "all, each case alike"
HEAD = ("source", "cases", "median", "p95", "worst", "bias", "under", "deepest", "order")
GPU_HEAD = ("GPU", *HEAD[1:-1])
LEGEND = (
    "Tokens per second on each GPU (generation: new tokens), predicted / measured − 1, in "
    "per cent. order: Spearman's rank correlation within one "
    "model on one GPU, where there are four runs of it or more."
)


def rows(found: Speeds) -> list[tuple[str, ...]]:
    lines = []
    for source in found.sources():
        one, order = found.figures(source), found.order(source)
        if one is not None:
            lines.append((source, *cells(one), "" if order is None else f"{order:.2f}"))
    average, alike = found.figures(), figures(one.error for one in found.found)
    ends = [(EVERY_SOURCE, average), (EVERY_CASE, alike)]
    return [*lines, *((name, *cells(one), "") for name, one in ends if one is not None)]


def gpu_rows(found: Speeds) -> list[tuple[str, ...]]:
    groups: dict[str, list[float]] = {}
    for speed in found.found:
        groups.setdefault("" if speed.case.gpu is None else speed.case.gpu.name, []).append(
            speed.error
        )
    return [
        (name, *cells(one))
        for name, errors in sorted(groups.items())
        if (one := figures(errors)) is not None
    ]


def text(found: Speeds) -> str:
    lines = []
    for title, some in kinds(found):
        lines += [title, columns(HEAD, rows(some), frozenset(range(1, len(HEAD)))), ""]
    without = [(str(count), reason) for reason, count in reasons(found)]
    return "\n".join(
        [
            *lines,
            LEGEND,
            *(
                ["", "without an answer:", columns(("rows", "because"), without, frozenset({0}))]
                if without
                else []
            ),
        ]
    )


def markdown(found: Speeds) -> str:
    return "\n".join(
        [
            line
            for title, some in kinds(found)
            for line in (f"**{title}**", "", *table(HEAD, rows(some)), "")
        ]
        + [LEGEND]
    )


def kinds(found: Speeds) -> Iterator[tuple[str, Speeds]]:
    for title, training in (("Training", True), ("Generation", False)):
        if (some := found.only(training=training)).found:
            yield title, some


def data(found: Speeds) -> dict[str, Any]:
    return {
        "speeds": [
            {
                "id": one.case.id,
                "source": one.case.source,
                "model": one.case.model,
                "gpu": "" if one.case.gpu is None else one.case.gpu.id,
                "ranks": one.case.strategy.ranks,
                "measured": one.measured,
                "predicted": one.predicted,
            }
            for one in found.found
        ],
        "refused": [
            {"id": one.id, "reason": one.reason, "detail": one.detail} for one in found.refused
        ],
    }
