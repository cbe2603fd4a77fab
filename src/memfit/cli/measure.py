"""`memfit measure`: one job run for real, or a campaign of many."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

import click

from memfit.errors import InputError, Problem

if TYPE_CHECKING:
    from memfit.measure.record import Case, Record

HELP = """\
{help}.

Runs a few steps with random weights in a fresh process: on the GPU, or on the CPU with torch's
profiler. `--campaign` runs the cases of a file that have no record yet.

Exit code: 0 it ran or ran out of memory, 2 unusable input.
"""


def run(
    words: tuple[str, ...], as_json: bool, campaign: str, only: str, listed: bool, **given: Any
) -> tuple[int, str]:
    from memfit.api.verbs import measure, planned
    from memfit.report import measured

    stray = [
        Problem(message=f"`--{name}` applies to campaigns only", where=name)
        for name, told in (("only", only), ("list", listed))
        if told
    ]
    if campaign:
        stray = [
            Problem(
                message=f"unexpected `{word[:60]}`: the campaign's file names the models",
                where="model",
            )
            for word in words
        ]
    if stray:
        raise InputError(*stray)
    if campaign:
        if listed:
            cases = planned(campaign, only)
            return 0, "\n".join([*(case.name for case in cases), f"{len(cases)} cases"])
        made = measure(campaign=campaign, only=only, told=progress, **given)
        return 0, json.dumps(
            [dataclasses.asdict(one) for one in made], indent=2
        ) if as_json else measured.table(made)
    from memfit.words.gpus import one_model

    made = measure(one_model(words), told=progress, **given)
    if as_json:
        return 0, json.dumps(dataclasses.asdict(made[0]), indent=2)
    from memfit.measure.compare import predicted

    return 0, measured.text(made[0], predicted(made[0]))


def progress(case: Case, record: Record | None) -> None:
    """A line for every case that is done, to stderr."""
    if record is not None:
        from memfit.report.measured import line

        sys.stderr.write(line(record) + "\n")
        sys.stderr.flush()


FLAGS = (
    click.Option(
        ["--campaign"], default="", metavar="FILE.toml", help="measure the cases of this file"
    ),
    click.Option(
        ["--only"],
        default="",
        metavar="TEXT",
        help="measure only the campaign's cases with TEXT in their name",
    ),
    click.Option(["--list", "listed"], is_flag=True, help="list the campaign's cases and exit"),
)

__all__ = ["FLAGS", "HELP", "run"]
