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
    """A family's file as it was captured now, and whether the shipped one is the same. `setting`:
    padded batches, autocast (empty: neither)."""

    family: str
    setting: str
    data: Mapping[str, Any]
    same: bool

    @property
    def operations(self) -> dict[str, int]:
        """How many operations each graph has."""
        graphs = self.data["graphs"]
        index = self.data.get("index") or {name: name for name in graphs}
        return {name: len(graphs[place]["ops"]) for name, place in index.items()}


def capture(family: str, setting: str = "") -> Capture:
    """Run the installed library's layers on fake tensors and write them as graphs."""
    from memfit.model.families import families
    from memfit.model.families._captured import ROWS, SETTINGS, stored
    from memfit.model.families._chains import CHAINS

    families()  # every family registers itself
    known_rows = sorted((*ROWS, *CHAINS))
    if family not in known_rows:
        close = nearest(family, known_rows, 1)
        message = f"no row says how a config of `{family[:60]}` becomes dimensions"
        known = f"did you mean `{close[0]}`? " if close else ""
        raise InputError.one(message, where="family", hint=f"{known}known: {', '.join(known_rows)}")
    if setting not in SETTINGS or (setting and family in CHAINS):
        listed = ", ".join(f"`{one}`" for one in SETTINGS if one)
        hint = "encoders have none" if family in CHAINS else f"one of {listed}"
        raise InputError.one(f"unknown setting `{setting[:60]}`", where="setting", hint=hint)
    try:
        from memfit.trace.chain_files import chain_file
        from memfit.trace.graph_files import family_file
    except ModuleNotFoundError as bad:
        raise InputError.one(
            f"capturing needs `{bad.name}`", where="family", hint="pip install 'memfit[trace]'"
        ) from None
    written = chain_file(CHAINS[family]) if family in CHAINS else family_file(ROWS[family], setting)
    data = json.loads(json.dumps(written))
    try:
        same = stored(family, setting) == data
    except FileNotFoundError:
        same = False
    return Capture(family=family, setting=setting, data=data, same=same)


def write_capture(found: Capture, path: Path) -> None:
    """Write the file; its folder must exist."""
    try:
        path.write_text(json.dumps(found.data, separators=(",", ":")) + "\n", encoding="utf-8")
    except OSError as bad:
        raise InputError.one(f"`{path}` cannot be written: {bad.strerror}", where="out") from None


__all__ = ["Capture", "capture", "write_capture"]
