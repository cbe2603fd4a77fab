"""`memfit accuracy`: its flags, signs of life while it works, and the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from memfit.cli.progress import Life
from memfit.errors import InputError, Problem
from memfit.output_files import unwritable, write_text
from memfit.processes import usual_processes
from memfit.terminal import terminal_columns

# What is asked about, and the flags that mean nothing there.
RECORDS, SPEEDS, BLIND = "records of `memfit measure`", "speeds", "`--blind`"
IDLE = {
    RECORDS: ("speed", "regret", "blind", "confidence", "source", "peers", "processes", "plot"),
    SPEEDS: ("worst", "limit", "by", "peers", "processes", "plot"),
    BLIND: (
        *("speed", "regret", "confidence", "source", "worst", "limit", "by", "peers"),
        *("processes", "plot"),
    ),
}


def idle(about: str, given: dict[str, Any]) -> list[Problem]:
    """Flags that were given in vain; nothing is passed over in silence."""
    return [
        Problem(message=f"`--{name}` has no effect on {about}", where=name, hint="remove it")
        for name in IDLE[about]
        if given.get(name)
    ]


def run(
    path: str,
    worst: int,
    plot: str,
    as_json: bool,
    form: str,
    speed: bool,
    regret: bool,
    blind: bool,
    **given: Any,
) -> tuple[int, str]:
    """Exit code 0: there is a table, whatever it says."""
    form, every = (
        "json" if as_json else form,
        {"worst": worst, "plot": plot, "speed": speed, "regret": regret, "blind": blind, **given},
    )
    if path and (Path(path).is_dir() or path.endswith(".json")):
        return 0, of_records(path, form, idle(RECORDS, every), every)
    if blind:
        return 0, of_blind(path, form, idle(BLIND, every))
    if speed or regret:
        return 0, of_speeds(path, form, idle(SPEEDS, every), every)
    from memfit.api.published import accuracy
    from memfit.report import accuracy as report

    wrong = []
    if plot and Path(plot).suffix.lower() != ".svg":
        wrong.append(
            Problem(
                message=f"`{plot[:200]}` cannot be drawn",
                where="plot",
                hint="name a file *.svg",
            )
        )
    wrong += unwritable(plot, "plot")
    given |= {"by": given["by"] or FORMULA, "processes": given["processes"] or usual_processes()}
    life = Life()
    try:
        found = accuracy(
            path,
            progress=lambda done, rows, what: life.say(f"row {done + 1} of {rows}, {what}"),
            problems=wrong,
            **given,
        )
    finally:
        life.done()
    if words := report.broken(found):
        click.echo(words, err=True)
    if plot:
        from memfit.report.scatter import svg

        write_text(plot, svg(found), "plot")
    if form == "json":
        from memfit.report.accuracy_data import data

        return 0, json.dumps(data(found), indent=2, ensure_ascii=False)
    if form == "markdown":
        return 0, report.markdown(found, worst=worst)
    return 0, report.text(found, worst=worst, width=max(60, min(120, terminal_columns())))


def of_records(path: str, form: str, wrong: list[Problem], given: dict[str, Any]) -> str:
    """Compare records of `memfit measure` with their predictions."""
    from memfit.api.published import beside
    from memfit.report import measured as report

    life = Life()
    try:
        found = beside(
            path,
            by=given["by"] or FORMULA,
            limit=given["limit"],
            problems=wrong,
            progress=lambda done, count, what: life.say(f"record {done + 1} of {count}, {what}"),
        )
    finally:
        life.done()
    if form == "json":
        return json.dumps(report.comparison_data(found), indent=2)
    return (
        report.comparison_markdown(found, given["worst"])
        if form == "markdown"
        else report.comparison(found, given["worst"])
    )


def of_blind(path: str, form: str, wrong: list[Problem]) -> str:
    """What is calibrated on the bundled figures, with each source left out."""
    from memfit.report import blind as report
    from memfit.truth.blind import blind

    if path:
        message = "`--blind` is about the bundled figures and takes no file"
        wrong.append(Problem(message=message, where="path", hint="omit the file"))
    if wrong:
        raise InputError(*wrong)
    found = blind()
    if form == "json":
        return json.dumps(report.data(found), indent=2, ensure_ascii=False)
    return report.markdown(found) if form == "markdown" else report.text(found)


def of_speeds(path: str, form: str, wrong: list[Problem], given: dict[str, Any]) -> str:
    """Speeds against published ones, or what choosing by them costs."""
    from memfit.api.published import speeds
    from memfit.report import regret as costs
    from memfit.report import speed as report
    from memfit.truth.regret import regrets

    found = speeds(path, problems=wrong, **{key: given[key] for key in ("source", "confidence")})
    if given["regret"]:
        sweeps = list(regrets(found))
        made: Any = (
            costs.data(sweeps)
            if form == "json"
            else costs.markdown(sweeps)
            if form == "markdown"
            else costs.text(sweeps)
        )
    else:
        made = (
            report.data(found)
            if form == "json"
            else report.markdown(found)
            if form == "markdown"
            else report.text(found)
        )
    return json.dumps(made, indent=2) if form == "json" else str(made)


FORMULA = "formula"
FLAGS = (
    click.Option(
        ["--speed"],
        is_flag=True,
        help="compare speeds (tokens per second) instead of memory",
    ),
    click.Option(
        ["--regret"],
        is_flag=True,
        help=(
            "what choosing by predicted speed costs: the first choice of each published "
            "sweep beside the best"
        ),
    ),
    click.Option(
        ["--blind"],
        is_flag=True,
        help=(
            "calibrate the likely range without each source in turn; list constants that are "
            "fitted and code that names a publisher"
        ),
    ),
    click.Option(
        ["--worst"],
        type=click.IntRange(0, 1000),
        default=0,
        metavar="N",
        help="show the N worst cases in detail",
    ),
    click.Option(
        ["--confidence"],
        default="",
        metavar="TEXT",
        help="only rows of this confidence: high, medium or low",
    ),
    click.Option(
        ["--source"], default="", metavar="TEXT", help="only rows whose source contains TEXT"
    ),
    click.Option(
        ["--limit"],
        type=click.IntRange(0),
        default=0,
        metavar="N",
        help="only the first N cases or records [default: all]",
    ),
    click.Option(
        ["--by"],
        default="",
        metavar="TEXT",
        help="formula, or trace (seconds per case) [default: formula]",
    ),
    click.Option(
        ["--peers"],
        is_flag=True,
        help="also run other tools that are installed (slow)",
    ),
    click.Option(
        ["--processes"],
        type=click.IntRange(1, 64),
        default=None,
        metavar="N",
        help="number of processes [default: one per CPU]",
    ),
    click.Option(
        ["--plot"],
        default="",
        metavar="FILE.svg",
        help="draw predictions against measurements to FILE.svg",
    ),
)

__all__ = ["FLAGS", "run"]
