"""Trace every script of a folder: which come through, why the others do not, and their peaks.

`python tools/scripts.py FOLDER [memfit's options]`. A script may say how it is started in a
comment: `# memfit: torchrun --nproc-per-node 4 -- its own arguments`.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from memfit.api.verbs import trace
from memfit.errors import InputError

STARTED = re.compile(r"^# memfit: *(.*)$", re.MULTILINE)
LIBRARIES = re.compile(r"\b(torch|transformers|trl|lightning)\b")
TRAINS = re.compile(r"\.backward\(|Trainer\(|\.fit\(")
WIDEST = 100


def scripts(folder: Path) -> list[Path]:
    """Those that train by themselves."""
    paths = sorted(folder.rglob("*.py"))
    return [one for one in paths if trains(one.read_text(encoding="utf-8", errors="replace"))]


def trains(text: str) -> bool:
    """Under `__main__`, or outside of functions and classes."""
    if not LIBRARIES.search(text) or not TRAINS.search(text):
        return False
    if "__main__" in text:
        return True
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return True  # a trace says what is wrong with it
    apart = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return any(TRAINS.search(ast.unparse(one)) for one in body if not isinstance(one, apart))


def started(path: Path) -> tuple[str, list[str]]:
    """The launcher that a script names, and its own arguments."""
    words = STARTED.search(path.read_text(encoding="utf-8", errors="replace"))
    launcher, _, arguments = f" {words[1]} ".partition(" -- ") if words else ("", "", "")
    return launcher.strip(), shlex.split(arguments)


def answer(path: Path, options: dict[str, Any]) -> tuple[bool, str]:
    launcher, arguments = started(path)
    given = {**options, **({"launcher": launcher} if launcher else {})}
    try:
        found = trace(path, *arguments, **given)
    except InputError as bad:
        return False, str(bad.problems[0].message)[:WIDEST]
    return True, f"{found.memory.allocated / 2**30:.2f} GiB allocated"


def main() -> None:
    folder = Path(sys.argv[1])
    options = {
        name.removeprefix("--").replace("-", "_"): value
        for name, value in zip(sys.argv[2::2], sys.argv[3::2], strict=False)
    }
    options.setdefault("gpu", "a100-sxm-80gb")
    through, all_of_them = 0, scripts(folder)
    for path in all_of_them:
        start = time.monotonic()
        good, said = answer(path, options)
        through += good
        name = str(path.relative_to(folder))
        mark = "through" if good else "stopped"
        print(f"{mark}  {name:<40} {time.monotonic() - start:5.0f} s  {said}", flush=True)
    print(f"{through} of {len(all_of_them)} come through")


if __name__ == "__main__":
    main()
