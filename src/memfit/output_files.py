"""Files that memfit writes for its user: refused before the work begins where they could not be
written after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from memfit.errors import InputError, Problem


def unwritable(path: str, where: str, *, replace: bool = True, hint: str = "") -> Iterator[Problem]:
    """What stands in the way of writing `path`; a pipe would wait for a reader. `replace`: a file
    that is there may go."""
    if not path:
        return
    target, shown = Path(path), path[:200]
    try:
        if target.is_dir():
            yield Problem(message=f"`{shown}` is a folder", where=where)
        elif target.exists() and not target.is_file():
            message = f"`{shown}` is not a regular file (a pipe, socket or device)"
            yield Problem(message=message, where=where)
        elif target.exists() and not replace:
            yield Problem(message=f"`{shown}` exists already", where=where, hint=hint)
        elif not target.absolute().parent.is_dir():
            yield Problem(message=f"there is no folder for `{shown}`", where=where)
        elif not os.access(target if target.exists() else target.absolute().parent, os.W_OK):
            yield Problem(message=f"`{shown}` cannot be written: permission denied", where=where)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no path"
        yield Problem(message=f"`{shown}` cannot be written: {reason.lower()}", where=where)


def write_text(path: str, text: str, where: str) -> None:
    """Write it whole or not at all; what was there stays where it fails."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        reason = (error.strerror or "unknown error").lower()
        raise InputError.one(f"`{path[:200]}` cannot be written: {reason}", where=where) from None


__all__ = ["unwritable", "write_text"]
