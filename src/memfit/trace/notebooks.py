"""Notebooks as scripts: their cells of code, without what only a notebook understands."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from pathlib import Path
from typing import Any

from memfit.errors import InputError

# Cells that are text for another program, or a file to be written; the code of other cells runs.
OTHERS = (
    "bash",
    "sh",
    "script",
    "writefile",
    "html",
    "javascript",
    "js",
    "svg",
    "latex",
    "markdown",
)
ASSIGNED = re.compile(r"(\s*[\w.,\s]+=\s*)[!%].*$")
TIMED = re.compile(r"^(\s*)%(?:time|timeit|prun)\s+(?=\w)")  # the statement behind it runs
MAGIC = re.compile(r"\s*([!%?]|[\w.]+\?{1,2}\s*$)")


def plain(cell: str) -> str:
    """One cell in Python alone. Lines keep their numbers."""
    with contextlib.suppress(SyntaxError, ValueError):
        ast.parse(cell)
        return cell
    lines = cell.splitlines()
    start = next((line for line in lines if line.strip()), "")
    if start.startswith("%%") and start[2:].split(" ")[0].strip() in OTHERS:
        return "\n".join(f"# {line}" for line in lines)
    found, going_on = [], False
    for text in lines:
        line = TIMED.sub(r"\1", text)
        assigned = ASSIGNED.match(line)
        if going_on:
            found.append(f"# {line}")
        elif MAGIC.match(line):
            indent = line[: len(line) - len(line.lstrip())]
            found.append(f"{indent}pass  # {line.strip()}".removesuffix("\\"))
        elif assigned:
            found.append(f"{assigned[1]}[]  # what a command prints")
        else:
            found.append(line)
            continue
        going_on = line.rstrip().endswith("\\")
    return checked("\n".join(found), cell)


def checked(code: str, cell: str) -> str:
    """The code, or an error where it is none, which a notebook raises once it gets there."""
    try:
        ast.parse(code)
    except (SyntaxError, ValueError) as bad:
        blank = "\n" * cell.count("\n")
        line = getattr(bad, "text", None) or cell
        return f"raise SyntaxError({f'{bad.args[0]} in a cell: {line.strip()}'!r}){blank}"
    return code


def beginning(text: str) -> str:
    """The same with what has to stand in a file's first line there, which a cell may hold."""
    named = re.findall(r"^from __future__ import ([\w, ]+)", text, re.MULTILINE)
    if not named:
        return text
    rest = re.sub(r"^from __future__ import", "pass  # \\g<0>", text, flags=re.MULTILINE)
    return f"from __future__ import {', '.join(named)}; {rest}"


def script(path: Path, folder: str) -> str:
    """The path of a script with the notebook's code, in this folder."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = ["".join(one["source"]) for one in cells if one["cell_type"] == "code"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError.one(f"`{path}` is no notebook", where="script") from None
    made = Path(folder) / f"{path.stem}.py"
    text = "\n\n".join(plain(one) for one in code) + "\n"
    made.write_text(beginning(text), encoding="utf-8")
    return str(made)


class Shell:
    """`get_ipython()`, whose commands do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


# What a notebook knows without an import.
NAMES: dict[str, Any] = {"display": lambda *_, **__: None, "get_ipython": Shell}

__all__ = ["NAMES", "plain", "script"]
