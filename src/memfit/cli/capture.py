"""`memfit capture`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from memfit.api.capture import capture, write_capture

HELP = """\
{help}.

Runs transformers' own layers on fake tensors, at three unrelated sets of sizes, and writes one
graph for each kind of layer. Sizes that no exact expression gives are refused. Needs the extra
`trace`; runs code of the installed library only.
"""
PARAMETERS = (
    click.Argument(["family"], metavar="MODEL_TYPE"),
    click.Option(
        ["--setting"],
        default="",
        metavar="TEXT",
        help="padded, autocast, half-autocast, prefill, decode, … [default: none]",
    ),
    click.Option(["--out"], default="", metavar="FILE", help="file to write [default: none]"),
)


def run(family: str, setting: str, out: str, as_json: bool) -> tuple[int, str]:
    found = capture(family, setting)
    if out:
        write_capture(found, Path(out))
    if as_json:
        answer = {"family": family, "same": found.same, "operations": found.operations}
        return 0, json.dumps({**answer, "origin": found.data["origin"]}, indent=2)
    state = "the same as" if found.same else "not the same as"
    origin = found.data["origin"]
    lines = [
        f"{family}: captured from {origin['class']}, transformers {origin['transformers']}",
        f"{state} the graphs that memfit ships",
        "",
        *(f"  {name:24} {count:6,} operations" for name, count in found.operations.items()),
    ]
    return 0, "\n".join([*lines, *(["", f"written to {out}"] if out else [])])


__all__ = ["HELP", "PARAMETERS", "run"]
