"""What choices by predicted speed cost, as text, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from memfit.report.accuracy import share
from memfit.report.markdown import table
from memfit.report.tables import columns
from memfit.truth.regret import ALLOWED, FEWEST, Regret

WIDE = 20  # letters of a name in a line of text
HEAD = ("source", "model", "GPUs", "tokens", "ways", "choice", "best", "lost %")
LEGEND = (
    f"A sweep: at least {FEWEST} runs of one source on one model, machine and "
    "length. choice: fastest by prediction; best: fastest by measurement; "
    "lost: tokens per second lost by the choice."
)


def rows(found: Sequence[Regret], short: bool = False) -> list[tuple[str, ...]]:
    """The dearest first."""
    return [
        (
            cut(one.source.rpartition("/")[2], WIDE) if short else one.source,
            cut(one.model.partition(" (")[0].rpartition("/")[2], WIDE) if short else one.model,
            f"{one.ranks}x{one.gpu}",
            str(one.seq),
            str(one.ways),
            one.choice,
            one.best,
            share(one.lost),
        )
        for one in sorted(found, key=lambda one: (-one.lost, one.source, one.model))
    ]


def cut(name: str, room: int) -> str:
    return name if len(name) <= room else name[: room - 1] + "…"


def summary(found: Sequence[Regret]) -> str:
    if not found:
        return f"no sweep has {FEWEST} runs with a speed"
    near = sum(one.lost <= ALLOWED for one in found)
    worst = share(max(one.lost for one in found))
    return (
        f"the first choice is within {ALLOWED:.0%} of the best measured one in "
        f"{near} of {len(found)} sweeps; at worst {worst} % slower"
    )


def text(found: Sequence[Regret]) -> str:
    return (
        f"{summary(found)}\n\n"
        + columns(HEAD, rows(found, short=True), frozenset({3, 4, 7}))
        + f"\n\n{LEGEND}"
    )


def markdown(found: Sequence[Regret]) -> str:
    return "\n".join(
        [
            f"{summary(found)}.",
            "",
            *table(HEAD, rows(found), frozenset({"model", "GPUs", "choice", "best"})),
            "",
            LEGEND,
        ]
    )


def data(found: Sequence[Regret]) -> dict[str, Any]:
    return {"allowed": ALLOWED, "sweeps": [asdict(one) for one in found]}
