"""`memfit report` and `memfit cache`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from memfit.api.report import COUNTERS, cache_state, report_of, write_report
from memfit.report.figures import gib, with_unit
from memfit.words.gpus import one_model

REPORT_HELP = """\
{help}.

Takes the options of `memfit estimate` and the memory that you measured. Nothing is sent. The file
contains the model's config: check it before you publish it.
"""
REPORT_FLAGS = (
    click.Option(["--measured"], required=True, help="measured memory, like `21.3GiB`"),
    click.Option(
        ["--counter"],
        default="reserved",
        metavar="NAME",
        help=f"measured counter: {', '.join(COUNTERS)} [default: reserved]",
    ),
    click.Option(["--notes"], default="", help="anything else about the run"),
    click.Option(
        ["--out"],
        default="memfit-report.json",
        metavar="FILE",
        help="file to write [default: memfit-report.json]",
    ),
)
CACHE_HELP = """\
{help}.

`MEMFIT_CACHE` sets the folder, or `off`. Configs from the hub are in huggingface_hub's own cache
(`hf cache ls`).
"""
CACHE_FLAGS = (click.Option(["--clear"], is_flag=True, help="remove all entries"),)


def run_report(
    words: tuple[str, ...],
    measured: str,
    counter: str,
    notes: str,
    out: str,
    as_json: bool,
    **given: Any,
) -> tuple[int, str]:
    from memfit.api.verbs import estimate

    given.pop("form", None)
    given.pop("engine", None)
    values = {name: value for name, value in given.items() if value not in (None, ())}
    found = report_of(estimate(one_model(words), **values), measured, counter, notes)
    write_report(found, Path(out), shlex.join(["memfit", *sys.argv[1:]]))
    if as_json:
        answer = {"file": out, "predicted": found.predicted, "measured": found.measured}
        return 0, json.dumps({**answer, "error": found.error}, indent=2)
    return 0, (
        f"wrote {out}: {gib(found.predicted)} GiB {counter} predicted, "
        f"{gib(found.measured)} GiB measured ({100 * found.error:+.1f} %)\n"
        "Attach the file to an issue. It has the model's config in it; nothing has been sent."
    )


def run_cache(clear: bool, as_json: bool) -> tuple[int, str]:
    found = cache_state(clear=clear)
    if as_json:
        return 0, json.dumps(found.to_dict(), indent=2)
    if found.folder is None:
        return 0, "the cache is off (`MEMFIT_CACHE`)"
    if clear:
        return 0, f"removed {found.removed} entries from {found.folder}"
    return 0, f"{found.folder}: {found.entries} entries, {with_unit(found.size)}"


__all__ = ["CACHE_FLAGS", "CACHE_HELP", "REPORT_FLAGS", "REPORT_HELP", "run_cache", "run_report"]
