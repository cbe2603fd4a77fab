"""Which line of the user's own code is running, or has failed: a message names that one, whatever
library it ended in."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

OWN = str(Path(__file__).resolve().parents[1])  # memfit itself
LIBRARIES = tuple(
    {
        str(Path(sysconfig.get_path(name)).resolve())
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)


# Libraries that are also installed from their sources, for newer examples: in a folder `src`, where
# a user's own package may have the name, or anywhere.
IN_SRC = {"accelerate", "datasets", "diffusers", "huggingface_hub", "peft", "transformers"}
ANYWHERE = {"deepspeed", "sentence_transformers", "trl"}


@functools.cache
def is_users(name: str) -> bool:
    """A file that is neither Python's, nor an installed package's, nor ours."""
    if name.startswith("<") or "site-packages" in name or "dist-packages" in name:
        return False
    path = str(Path(name).resolve())
    return not path.startswith((OWN, *LIBRARIES)) and not of_package(path)


def of_package(path: str) -> bool:
    """In the package itself; `~/src/transformers/examples` is a user's checkout of the library."""
    return any(
        (one.name in ANYWHERE or (one.name in IN_SRC and one.parent.name == "src"))
        and (one / "__init__.py").is_file()
        for one in Path(path).parents
    )


def texts() -> Iterator[str]:
    """The user's files that are loaded or running."""
    modules = list(sys.modules.values())
    names = {str(getattr(one, "__file__", None) or "<") for one in modules}
    at: FrameType | None = sys._getframe(1)
    while at is not None:
        names.add(at.f_code.co_filename)
        at = at.f_back
    yield from ("".join(linecache.getlines(one)) for one in sorted(names) if is_users(one))


def speaks(*words: str) -> bool:
    """Whether one of the user's files that are loaded contains one of these words."""
    return any(word in text.lower() for text in texts() for word in words)


def matches(pattern: str) -> bool:
    """Whether one of them has such a passage."""
    return any(re.search(pattern, text) for text in texts())


def shown(name: str, number: int) -> str:
    """`train.py:31: loss.backward()`; the path as seen from here."""
    path = Path(name)
    try:
        path = path.resolve().relative_to(Path.cwd())
    except (ValueError, OSError):
        path = Path(path.name)
    text = linecache.getline(name, number).strip()
    return f"{path}:{number}" + (f": {text[:80]}" if text else "")


def running(frame: FrameType | None = None) -> str:
    """The innermost of the user's lines that are running now."""
    at = sys._getframe(1) if frame is None else frame
    while at is not None:
        if is_users(at.f_code.co_filename):
            return shown(at.f_code.co_filename, at.f_lineno)
        at = at.f_back  # type: ignore[assignment]
    return ""


def failed(trace: TracebackType | None) -> str:
    """The innermost of the user's lines that an exception came through."""
    found = ""
    for name, number in through(trace):
        if is_users(name):
            found = shown(name, number)
    return found


def through(trace: TracebackType | None) -> Iterator[tuple[str, int]]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next


def called(at: TracebackType) -> Any:
    """The function that the failing instruction called, if it is a call of a name."""
    frame, code = at.tb_frame, at.tb_frame.f_code
    place = next(itertools.islice(code.co_positions(), at.tb_lasti // 2, None), (None,))
    if None in place:
        return None
    first, last, start, end = (int(one or 0) for one in place)
    rows = [linecache.getline(code.co_filename, one).encode() for one in range(first, last + 1)]
    text = b"".join([*rows[:-1], rows[-1][:end]])[start:].decode(errors="replace")
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    return named(node.func, frame) if isinstance(node, ast.Call) else None


def named(node: ast.expr, frame: FrameType) -> Any:
    """What a name, or an attribute of one, means in a frame."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(named(node.value, frame), node.attr, None)
    return None


__all__ = [
    "called",
    "failed",
    "is_users",
    "matches",
    "running",
    "shown",
    "speaks",
    "texts",
    "through",
]
