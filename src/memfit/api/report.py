"""`report` and `cache`: a wrong estimate as a file for an issue, and what memfit keeps on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit import __version__
from memfit.errors import InputError, Problem
from memfit.lazy_dataclass import dataclass
from memfit.option_values import unknown
from memfit.units import parse_bytes

if TYPE_CHECKING:
    from memfit.estimate import Estimate

COUNTERS = {
    "allocated": "torch.cuda.max_memory_allocated",
    "reserved": "torch.cuda.max_memory_reserved",
    "device": "nvidia-smi",
}
LIBRARIES = ("torch", "transformers", "peft", "accelerate", "trl", "bitsandbytes", "deepspeed")


@dataclass(frozen=True, kw_only=True)
class Report:
    """A prediction and the measured figure, ready to be written to a file."""

    estimate: Estimate
    measured: int
    counter: str
    notes: str

    @property
    def predicted(self) -> int:
        memory = self.estimate.memory
        known = {
            "allocated": memory.allocated,
            "reserved": memory.allocated if memory.reserved is None else memory.reserved,
            "device": self.estimate.device,
        }
        return known[self.counter]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def report_of(
    estimate: Estimate, measured: str | int, counter: str = "reserved", notes: str = ""
) -> Report:
    """What was measured, read and checked."""
    problems: list[Problem] = []
    size = 0
    try:
        size = parse_bytes(measured, where="measured")
    except InputError as bad:
        problems += bad.problems
    if not problems and size <= 0:
        hint = "write it like `--measured 21.3GiB`"
        problems.append(Problem(message="`measured` must be above 0", where="measured", hint=hint))
    if counter not in COUNTERS:
        problems.append(unknown("counter", counter, "counter", tuple(COUNTERS)))
    if problems:
        raise InputError(*problems)
    return Report(estimate=estimate, measured=size, counter=counter, notes=notes)


def write_report(found: Report, path: Path, command: str) -> None:
    """The file. It is never written over another one."""
    import platform

    from memfit.report.codec import to_dict

    text = json.dumps(
        {
            "memfit": __version__,
            "command": command,
            "measured": {"counter": COUNTERS[found.counter], "bytes": found.measured},
            "predicted": found.predicted,
            "error": round(found.error, 4),
            "notes": found.notes,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "libraries": _libraries(),
            "config": dict(found.estimate.model.config),
            "estimate": to_dict(found.estimate),
        },
        indent=1,
        ensure_ascii=False,
        default=str,
    )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text + "\n")
    except FileExistsError:
        raise InputError.one(
            f"`{path}` already exists", where="out", hint="name another file with `--out`"
        ) from None
    except OSError as error:
        why = (error.strerror or "unknown error").lower()
        raise InputError.one(f"`{path}` cannot be written: {why}", where="out") from None


def _libraries() -> Mapping[str, str]:
    import importlib.metadata

    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True, kw_only=True)
class CacheState:
    """What the cache of traces and cards holds: entries, bytes, and how many it lost just now."""

    folder: Path | None
    entries: int
    size: int
    removed: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": None if self.folder is None else str(self.folder),
            "entries": self.entries,
            "size": self.size,
            "removed": self.removed,
        }


def cache_state(*, clear: bool = False) -> CacheState:
    """Where finished traces and cards are kept, and how much that is; `clear` removes them."""
    from memfit.disk_cache import folder

    where = folder()
    files = [] if where is None or not where.is_dir() else sorted(where.glob("*.json"))
    removed = size = 0
    for path in files:
        try:
            if clear:
                path.unlink()
                removed += 1
            else:
                size += path.stat().st_size
        except OSError as error:
            why = (error.strerror or "unknown error").lower()
            raise InputError.one(f"`{path}` cannot be removed: {why}", where="cache") from None
    return CacheState(folder=where, entries=0 if clear else len(files), size=size, removed=removed)


__all__ = ["COUNTERS", "CacheState", "Report", "cache_state", "report_of", "write_report"]
