"""Names of files that were mistyped."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from memfit.errors import InputError
from memfit.trace import lines

ALIKE = 0.75  # similarity from which another name is meant
DIGITS = re.compile(r"[0-9]+")


def alike(wanted: str, known: list[str]) -> str:
    """The name that is most like `wanted`. Names that differ in their numbers alone are parts of a
    set, and none is a misspelling of another."""
    plain = DIGITS.sub("", wanted)
    others = [one for one in known if one == wanted or DIGITS.sub("", one) != plain]
    return next(iter(difflib.get_close_matches(wanted, others, 1, ALIKE)), "")


def near(path: str) -> str:
    """The file that was most likely meant by a path that does not exist, if there is one."""
    wanted = Path(path)
    folder = wanted.parent
    if not folder.is_dir():
        beside = folder.parent
        named = [one.name for one in beside.iterdir() if one.is_dir()] if beside.is_dir() else []
        folder = beside / alike(folder.name, named)
        return str(folder / wanted.name) if (folder / wanted.name).is_file() else ""
    stems = {
        one.stem: one.name
        for one in sorted(folder.iterdir())
        if one.suffix
        and (one.suffix.startswith(wanted.suffix) or wanted.suffix.startswith(one.suffix))
    }
    close = stems.get(alike(wanted.stem, list(stems)), "")
    return str(folder / close) if close else ""


def refuse_misspelled(path: str) -> None:
    """An error where another file was most likely meant: a stand-in would hide that."""
    if path and not os.path.exists(path) and (meant := near(path)):
        raise InputError.one(
            f"`{path}` was not found", where=lines.running(), hint=f"did you mean `{meant}`?"
        )


def refuse_misspelled_folder(path: str) -> None:
    """The same for a folder."""
    beside = Path(path).parent
    named = [one.name for one in beside.iterdir() if one.is_dir()] if beside.is_dir() else []
    if meant := alike(Path(path).name, named):
        raise InputError.one(
            f"`{path}` was not found",
            where=lines.running(),
            hint=f"did you mean `{beside / meant}`?",
        )


__all__ = ["near", "refuse_misspelled", "refuse_misspelled_folder"]
