"""Finished answers on disk, so that the same question is answered at once.

An entry is a JSON file named after everything that its answer depends on. What cannot be read,
written or trusted is a miss, never an error. `MEMFIT_CACHE` names another folder, or `off`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VARIABLE = "MEMFIT_CACHE"
OFF = ("off", "0", "no")
KEPT = 2000  # entries, of a few KiB each; the oldest go
CODE = Path(__file__).parent


def folder() -> Path | None:
    """Where entries are: `MEMFIT_CACHE`, else `memfit` in the user's cache folder; None for off."""
    named = os.environ.get(VARIABLE, "").strip()
    if named.lower() in OFF:
        return None
    with contextlib.suppress(RuntimeError):  # a user without a home folder
        base = os.environ.get("XDG_CACHE_HOME", "").strip()
        home = Path(base) if base else Path.home() / ".cache"
        return Path(named).expanduser() if named else home / "memfit"
    return None


def name_of(question: Any) -> str:
    """A name for a question. What JSON does not know counts by its text."""
    return sha256(json.dumps(question, sort_keys=True, default=str).encode())


def code_fingerprint(root: Path = CODE) -> str:
    """Of memfit's own files, code and data, so that a checkout that moves on asks again."""
    lines = []
    for entry in files_below(str(root)):
        status = entry.stat()
        lines.append(f"{entry.path} {status.st_size} {status.st_mtime_ns}")
    return sha256("\n".join(sorted(lines)).encode())


def files_below(root: str) -> Iterator[os.DirEntry[str]]:
    """All files but compiled ones; a third of the time of `Path.rglob`."""
    waiting = [root]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if not entry.is_dir():
                    yield entry
                elif entry.name != "__pycache__":
                    waiting.append(entry.path)


def read(name: str) -> Any:
    """The answer of that name; None where there is none."""
    where = folder()
    if where is None:
        return None
    try:
        written = json.loads((where / f"{name}.json").read_text(encoding="utf-8"))
        answer = written["answer"]
        return answer if written["checksum"] == _checksum(answer) else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def write(name: str, answer: Any) -> None:
    """Under another name first, so that nobody reads half of it."""
    import tempfile

    where = folder()
    if where is None:
        return
    with contextlib.suppress(OSError, TypeError, ValueError):
        encoded = json.loads(json.dumps(answer))
        text = json.dumps({"checksum": _checksum(encoded), "answer": encoded})
        where.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=where, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(temporary).replace(where / f"{name}.json")
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
        _prune(where)


def sha256(data: bytes) -> str:
    import hashlib  # not on the way of answers by formulas, which start-up counts in

    return hashlib.sha256(data).hexdigest()


def _prune(where: Path) -> None:
    entries = list(where.glob("*.json"))
    if len(entries) > KEPT:
        for old in sorted(entries, key=lambda one: one.stat().st_mtime)[: len(entries) - KEPT]:
            old.unlink(missing_ok=True)


def _checksum(encoded: Any) -> str:
    return sha256(json.dumps(encoded, sort_keys=True).encode())


__all__ = ["CODE", "VARIABLE", "code_fingerprint", "folder", "name_of", "read", "write"]
