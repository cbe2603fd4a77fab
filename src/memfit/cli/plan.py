"""`memfit plan`: ranked ways to do some work on some GPUs."""

from __future__ import annotations

import json
from typing import Any

import click

from memfit.api.plan import plan
from memfit.cli.errors import note_gpu
from memfit.cli.progress import Life
from memfit.errors import raise_errors
from memfit.output_files import unwritable, write_text
from memfit.plan.ledger import Counted
from memfit.report.plan import data, job_file, markdown, text
from memfit.words.gpus import one_model

FLAGS = (click.Option(["--overwrite"], is_flag=True, help="replace the file that `--write` names"),)
INTERRUPTED = 130  # as a shell has it for Ctrl-C
HELP = """\
{help}.

Options that you give are fixed; the others are searched. An option may have several values, like
`--method full,lora`, or `any`. `--gpus cheapest` also chooses the machine.

Ctrl-C stops the search and keeps the best plan so far.

Exit code: 0 a plan fits, 1 none fits, 2 unusable input, 130 interrupted.
"""


def run(words: tuple[str, ...], as_json: bool, form: str, **given: Any) -> tuple[int, str]:
    values = {name: value for name, value in given.items() if value not in (None, ())}
    target = str(values.get("write") or "")
    replace = bool(values.pop("overwrite", False))
    raise_errors(unwritable(target, "write", replace=replace, hint="`--overwrite` replaces it"))
    note_gpu(str(values.get("gpu") or ""))
    life = Life()
    try:
        found = plan(
            one_model(words), progress=lambda counted: life.progress(*sign(counted)), **values
        )
    finally:
        life.done()
    if found.rows and target:
        write_text(target, job_file(found, found.rows[0]), "write")
    form = "json" if as_json else form
    written = {
        "json": lambda: json.dumps(data(found), indent=2, ensure_ascii=False),
        "markdown": lambda: markdown(found),
    }
    code = INTERRUPTED if found.interrupted else 0 if found.fits else 1
    return code, written.get(form, lambda: text(found))()


def sign(counted: Counted) -> tuple[float, str]:
    """How much of the search is done, and the best that it has."""
    best = "" if counted.best is None else f", best {counted.best:.3g} {counted.unit}"
    among = f" with {counted.among}" if counted.among else ""
    return counted.share, f"planning{among}{best}"


__all__ = ["FLAGS", "HELP", "run"]
