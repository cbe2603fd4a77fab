"""Writes docs/reference: the flags, the keys of a job file and the JSON format, each from the table
that the program itself reads; and the page of combinations, from its answers.

python tools/reference.py [--check]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

from click.testing import CliRunner  # noqa: E402

import combinations  # noqa: E402
from memfit.api.verbs import VERBS  # noqa: E402
from memfit.cli.commands import commands  # noqa: E402
from memfit.cli.help import GROUPS  # noqa: E402
from memfit.constants import KINDS, all_constants  # noqa: E402
from memfit.report import FORMATS, accuracy_data, codec  # noqa: E402
from memfit.words.options import options  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
ROOMS = ("hardware", "runs", "simulate", "plan", "techniques", "band", "serving")
NOTE = "<!-- Written by tools/reference.py (`make docs`); changes made here are lost. -->"
TYPES = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}

CLI = """\
# Command line

{note}

An answer goes to stdout, everything else to stderr. `--json` prints the [JSON format](json.md),
and an object with `problems` when the input is unusable; formats are {formats}.
Every option of `memfit estimate` is also a key of a [job file](job.md) and an argument of
`memfit.estimate(…)`.

| exit code | says |
|---|---|
| 0 | it fits, or may (`tight`); without a GPU: there is an answer |
| 1 | it does not fit |
| 2 | the input is unusable; every problem is on stderr |
| 70 | memfit itself is broken |
| 74 | the answer cannot be written: stdout is closed, or a disk is full |
| 130 | interrupted by Ctrl-C; 128 + N: by signal N, like 143 for SIGTERM |
| 141 | nobody reads the output any more |

Colour is used on a terminal only, and not if `NO_COLOR` is set. Nothing is said by colour alone.

For completion in bash put `eval "$(_MEMFIT_COMPLETE=bash_source memfit)"` into `~/.bashrc`;
`zsh_source` and `fish_source` are the words for other shells.
"""

CONSTANTS = """\
# Constants

{note}

Every number in the code that can move an answer, by where it comes from. Names are those of the
modules `memfit.…`. `--explain` shows the ones that matter to an answer.
"""

TABLES = """
## Tables

Figures of hardware lie in tables, and each figure there carries its own source:

| table | holds | origin |
|---|---|---|
| `hardware/gpus.toml` | what each GPU has | `log`, `repo`, `derived` or `label`, each figure |
| `hardware/contexts.toml` | CUDA contexts, desktops, drivers | measured: public logs |
| `hardware/links.toml` | links in and between nodes | a source beside each figure |
| `hardware/prices.toml` | dollars an hour | price lists with their day |
| `hardware/machines.toml` | cloud machines by name | the clouds' pages |
| `hardware/rates.json` | kernels' times | measured: ai-dynamo/aiconfigurator |
| `hardware/collectives.json` | collectives inside a node | measured: ai-dynamo/aiconfigurator |
"""

JOB = """\
# Jobs

{note}

A job file is YAML: `model`, and any option below. Dashes and underscores are alike, a list stands
for names with commas, and flags override the file. A model given as `./…` or `../…` is sought
beside the file.

```yaml
model: meta-llama/Llama-3.1-8B
gpu: rtx-4090
method: lora
batch: 2
checkpointing: full
targets: [q_proj, v_proj]
```

```console
$ memfit estimate job.yaml --batch 1
```

In Python the same options are arguments; what is wrong with them is raised at once, as one
`memfit.InputError`.

```python
memfit.estimate("meta-llama/Llama-3.1-8B", gpu="rtx-4090", method="lora", batch=2).verdict
```
"""

JSON = """\
# JSON format

{note}

`memfit estimate … --json` prints one object. Sizes are whole bytes. Keys may be added without
notice; a key that goes, or means something else, raises `schema`. With exit code 2 the object has
the same keys, and everything but `problems` is null or empty. As a JSON Schema:
[estimate.schema.json](estimate.schema.json).

`parts` sum to `device`; without `fragmentation` and `context` they sum to `allocated`
(see [four numbers](../concepts/numbers.md)).
"""

ACCURACY = """\
## `memfit accuracy --json`

Errors are predicted / measured − 1, as shares. Figures are an object with `cases`, the `median`
and `p95` of the errors' size, the `worst` and the middle (`bias`) error, the share of cases
`under`-estimated by more than 1 %, and the `deepest` of those.

| key | type | is |
|---|---|---|
"""


def cli() -> Iterator[str]:
    yield CLI.format(note=NOTE, formats=", ".join(f"`{name}`" for name in FORMATS))
    for words in ((), *((name,) for name in VERBS)):
        shown = CliRunner().invoke(
            commands,
            [*words, "--help-all" if words else "--help"],
            prog_name="memfit",
            terminal_width=100,
            max_content_width=100,
            color=False,
        )
        yield f"## `{' '.join(('memfit', *words))}`\n\n```\n{shown.output.rstrip()}\n```\n"


def job() -> Iterator[str]:
    yield JOB.format(note=NOTE)
    for group, heading in GROUPS.items():
        rows = [row(one) for one in options().values() if one.metadata["group"] == group]
        if rows:
            yield (
                f"## {heading}\n\n| option | takes | default | is |\n|---|---|---|---|\n"
                + "".join(rows)
            )


def row(one: dataclasses.Field[Any]) -> str:
    rule, default = one.metadata, one.default
    takes = " ".join(f"`{choice}`" for choice in rule["choices"]) or TYPES[str(one.type)]
    if rule["low"] is not None:
        takes += f", {rule['low']:g} to {int(rule['high']) if rule['high'] >= 1 else rule['high']}"
    shown = (
        str(default).lower()
        if isinstance(default, bool)
        else f"{default:g}"
        if isinstance(default, float)
        else str(default)
    )
    return f"| `{one.name}` | {takes} | {f'`{shown}`' if shown else ''} | {cell(rule['help'])} |\n"


def words(kind: str) -> str:
    """`fits|no?` as people say it."""
    plain = kind.removesuffix("?").replace("[]", "list of ").replace("{}", "map of names to ")
    names = ", ".join(f"`{name}`" for name in plain.split("|")) if "|" in plain else plain
    return names + (" or null" if kind.endswith("?") else "")


def cell(text: str) -> str:
    """Backticks stay what they are; a line within a cell does not end it."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def json_page() -> Iterator[str]:
    yield JSON.format(note=NOTE)
    yield "| key | type | is |\n|---|---|---|\n" + "".join(
        f"| `{path}` | {words(kind)} | {cell(meaning)} |\n"
        for path, kind, meaning in (*codec.FIELDS, *codec.EXPLAINED)
    )
    yield ACCURACY + "".join(
        f"| `{path}` | {words(kind)} | {cell(meaning)} |\n"
        for path, kind, meaning in accuracy_data.FIELDS
    )


def constants_page() -> Iterator[str]:
    """Every number of the code with its origin, then the tables of hardware with theirs."""
    known = list(all_constants(*(f"memfit.{room}" for room in ROOMS)))
    yield CONSTANTS.format(note=NOTE)
    yield "| origin | means | numbers |"
    yield "|---|---|---:|"
    for kind, meaning in KINDS.items():
        yield f"| {kind} | {meaning} | {sum(one.origin.kind == kind for one in known)} |"
    for kind in KINDS:
        yield f"\n## {kind.capitalize()}\n"
        yield "| number | value | what it is | source |"
        yield "|---|---|---|---|"
        for one in (one for one in known if one.origin.kind == kind):
            name = f"{one.module.removeprefix('memfit.')}.{one.name}"
            yield (
                f"| `{name}` | {value(one.value)} | {cell(one.origin.what)} | "
                f"{cell(one.origin.source)} |"
            )
    yield TABLES


def value(number: Any) -> str:
    """A number or a small table as the page shows it."""
    if isinstance(number, Mapping):
        return ", ".join(f"{cell(str(key))}: {value(one)}" for key, one in number.items())
    if isinstance(number, tuple):
        return "(" + ", ".join(map(value, number)) + ")"
    if isinstance(number, float):
        return f"{number:.4g}"
    return f"{number:,}" if isinstance(number, int) else cell(str(number))


def pages() -> dict[Path, str]:
    return {
        FOLDER / "cli.md": "\n".join(cli()),
        FOLDER / "job.md": "\n".join(job()),
        FOLDER / "json.md": "\n".join(json_page()),
        FOLDER / "constants.md": "\n".join(constants_page()),
        FOLDER / "estimate.schema.json": json.dumps(codec.schema(), indent=2) + "\n",
        combinations.PAGE: combinations.page(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description="write docs/reference from the tables of the program"
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 when a page has drifted"
    )
    check = parser.parse_args().check
    drifted = [
        path
        for path, text in pages().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in drifted:
        if check:
            print(f"{path.relative_to(ROOT)} has drifted; run `make docs`", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pages()[path], encoding="utf-8")
    return 1 if check and drifted else 0


if __name__ == "__main__":
    sys.exit(main())
