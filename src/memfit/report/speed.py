"""The record of predicted speeds, as text, Markdown and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from memfit.report.accuracy import EVERY_SOURCE, cells
from memfit.report.markdown import table
from memfit.report.tables import columns
from memfit.truth.llama_speed import LlamaOutcome, ordered
from memfit.truth.speed import Speeds, reasons
from memfit.truth.statistics import figures

EVERY_CASE = "all, each case alike"
HEAD = ("source", "cases", "median", "p95", "worst", "bias", "under", "deepest", "order")
GPU_HEAD = ("GPU", *HEAD[1:-1])
LLAMA = {
    "decoding": "Decoding by llama.cpp and Ollama, sources that no constant is fitted to",
    "prompts": "Prompts of llama.cpp, sources that no constant is fitted to",
}
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


def decoding_rows(found: Sequence[LlamaOutcome], *, by_gpu: bool = False) -> list[tuple[str, ...]]:
    """By source, or by GPU, and all."""
    groups: dict[str, list[float]] = {}
    for outcome in found:
        if not outcome.reason:
            name = outcome.gpu if by_gpu else outcome.row.source
            groups.setdefault(name, []).append(outcome.error)
    every = [error for errors in groups.values() for error in errors]
    named = [*sorted(groups.items()), (EVERY_CASE, every)]
    return [(name, *cells(one)) for name, errors in named if (one := figures(errors)) is not None]


def order_line(found: Sequence[LlamaOutcome]) -> str:
    right = list(ordered([one for one in found if not one.reason]))
    if not right:
        return ""
    return (
        f"Of {len(right):,} pairs of one source with one GPU or one model, whose figures differ by "
        f"more than 10 %, {100 * sum(right) / len(right):.1f} % have the right order."
    )


def left_out(found: Sequence[LlamaOutcome]) -> list[tuple[str, str]]:
    counted = Counter(one.reason for one in found if one.reason)
    return [(str(count), reason) for reason, count in counted.most_common()]


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
    right = frozenset(range(1, len(GPU_HEAD)))
    for kind, title in LLAMA.items():
        outcomes = getattr(found, kind)
        if llama := decoding_rows(outcomes):
            lines += [title, columns(HEAD[:-1], llama, right), order_line(outcomes), ""]
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


def llama_data(found: Sequence[LlamaOutcome]) -> list[dict[str, Any]]:
    return [
        {
            "id": one.row.id,
            "source": one.row.source,
            "model": one.row.model,
            "gpu": one.gpu,
            "measured": one.row.measured,
            "predicted": one.predicted or None,
            "reason": one.reason or None,
        }
        for one in found
    ]


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
        **{kind: llama_data(getattr(found, kind)) for kind in LLAMA},
        "refused": [
            {"id": one.id, "reason": one.reason, "detail": one.detail} for one in found.refused
        ],
    }
