"""Runs `estimate`, `trace` and the two lists: the exit code and the answer as text."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from memfit.api.verbs import estimate, gpus, models
from memfit.cli.errors import complain
from memfit.cli.progress import Life
from memfit.errors import Problem
from memfit.report import write
from memfit.terminal import coloured, terminal_columns
from memfit.words.gpus import one_model

if TYPE_CHECKING:
    from memfit.cli.trace import Words
    from memfit.estimate import Estimate

FITS, DOES_NOT = 0, 1


def exit_code(found: Estimate, strict: bool) -> int:
    """What CI may rely on."""
    if found.verdict == "tight" and found.usable is not None:
        if strict or found.device > found.usable[0]:
            return DOES_NOT
        complain(
            (
                Problem(
                    message="tight: the upper end of the likely range is above usable memory",
                    hint="`--strict` makes this exit with 1",
                    level="warning",
                ),
            )
        )
    return FITS if found.fits else DOES_NOT


def run_estimate(
    words: tuple[str, ...],
    as_json: bool,
    form: str,
    explain: bool,
    exact: bool,
    strict: bool,
    engine: str = "",
    **given: Any,
) -> tuple[int, str]:
    form = "json" if as_json else form
    values = {name: value for name, value in given.items() if value not in (None, ())}
    life = Life()
    try:
        found = estimate(one_model(words), progress=life, **values)
    finally:
        life.done()
    return exit_code(found, strict), write(
        found, form, explain=explain, width=columns(), colour=coloured(sys.stdout), exact=exact
    )


def run_trace(
    words: Words,
    as_json: bool,
    form: str,
    explain: bool,
    at_peak: bool,
    timeline: str,
    snapshot: str,
    **given: Any,
) -> tuple[int, str]:
    from memfit.cli.trace import traced  # loads click

    form = "json" if as_json else form
    exact, strict = given.pop("exact"), given.pop("strict")
    values = {name: value for name, value in given.items() if value not in (None, ())}
    found = traced(words, values, timeline=timeline, snapshot=snapshot)
    answer = write(
        found, form, explain=explain, width=columns(), colour=coloured(sys.stdout), exact=exact
    )
    if at_peak:
        from memfit.report import peak

        if form == "json":
            answer = dumped({**json.loads(answer), "at_peak": peak.data(found)})
        else:
            table = peak.table(found, columns())
            answer += f"\n\n```\n{table}\n```" if form == "markdown" else f"\n\n{table}"
    return exit_code(found, strict), answer


def run_models(words: tuple[str, ...], as_json: bool) -> tuple[int, str]:
    from memfit.report import tables

    found = models(" ".join(words))
    return FITS, dumped(tables.models_json(found)) if as_json else tables.models(found, room())


def run_gpus(words: tuple[str, ...], as_json: bool) -> tuple[int, str]:
    from memfit.report import tables

    found = gpus(" ".join(words))
    return FITS, dumped(tables.gpus_json(found)) if as_json else tables.gpus(found, room())


def dumped(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def columns() -> int:
    """Of the terminal, within what can be read."""
    return max(60, min(120, terminal_columns()))


def room() -> int:
    """What a line of a list may take: that of a terminal, and of anything else as much as it needs
    (0)."""
    return terminal_columns() if sys.stdout.isatty() else 0


__all__ = ["columns", "run_estimate", "run_gpus", "run_models", "run_trace"]
