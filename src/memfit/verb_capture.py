"""`memfit capture`: the graphs of a family from transformers' own layers, as the JSON that is
shipped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import InputError
from memfit.registry import nearest


@dataclass(frozen=True, kw_only=True)
class Capture:
    """A family's file as it was captured now, and whether the shipped one is the same."""

    family: str
    data: Mapping[str, Any]
    same: bool

    @property
    def operations(self) -> dict[str, int]:
        """How many operations each graph has."""
        return {name: len(graph["ops"]) for name, graph in self.data["graphs"].items()}


def capture(family: str) -> Capture:
    """Run the installed library's layers on fake tensors and write them as graphs."""
    from memfit.model.families import families
    from memfit.model.families._captured import ROWS, stored

    families()  # every family registers itself
    if family not in ROWS:
        close = nearest(family, ROWS, 1)
        message = f"no row says how a config of `{family[:60]}` becomes dimensions"
        known = f"did you mean `{close[0]}`? " if close else ""
        raise InputError.one(
            message, where="family", hint=f"{known}known: {', '.join(sorted(ROWS))}"
        )
    try:
        from memfit.trace.graph_files import family_file
    except ModuleNotFoundError as bad:
        raise InputError.one(
            f"capturing needs `{bad.name}`", where="family", hint="pip install 'memfit[trace]'"
        ) from None
    data = json.loads(json.dumps(family_file(ROWS[family])))
    try:
        same = stored(family) == data
    except FileNotFoundError:
        same = False
    return Capture(family=family, data=data, same=same)


def write_capture(found: Capture, path: Path) -> None:
    """Write the file; its folder must exist."""
    try:
        path.write_text(json.dumps(found.data, separators=(",", ":")) + "\n", encoding="utf-8")
    except OSError as bad:
        raise InputError.one(f"`{path}` cannot be written: {bad.strerror}", where="out") from None


__all__ = ["Capture", "capture", "write_capture"]
