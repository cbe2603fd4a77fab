"""`memfit new-family`: the files of a family, from the config class and the layers of the
installed library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import InputError


@dataclass(frozen=True, kw_only=True)
class NewFamily:
    """A family whose every head was compared with the real code. `graphs`: its files by setting,
    of which encoders have one, and language models with towers none. `left_out`: the heads that it
    does not have, and why."""

    model_type: str
    row: Mapping[str, Any]
    graphs: Mapping[str, Any]
    left_out: Mapping[str, str]


def new_family(model_type: str, given: Mapping[str, Any] | None = None) -> NewFamily:
    """Find out what each field of a config changes, capture the layers, and compare parameters and
    peaks with the real code. `given` are fields that have other values than the class's
    defaults."""
    from memfit.model.families import written_by_hand

    if written_by_hand(model_type):
        message = f"the row of `{model_type[:60]}` is written by hand"
        raise InputError.one(
            message, where="family", hint=f"`memfit capture {model_type[:60]}` captures its graphs"
        )
    try:
        from memfit.trace.family_files import made
    except ModuleNotFoundError as bad:
        raise InputError.one(
            f"a new family needs `{bad.name}`", where="family", hint="pip install 'memfit[trace]'"
        ) from None
    found = made(model_type, given)
    return NewFamily(
        model_type=model_type, row=found.row, graphs=found.graphs, left_out=found.left_out
    )


def write_family(found: NewFamily, folder: Path) -> tuple[Path, ...]:
    """Write `rows/TYPE.json`, and `graphs/TYPE.json` with the other settings' beside it."""
    name = found.model_type
    texts = {folder / "rows" / f"{name}.json": a_line_each(found.row)}
    for setting, graphs in found.graphs.items():
        file = f"{name}.{setting}.json" if setting else f"{name}.json"
        texts[folder / "graphs" / file] = json.dumps(graphs, separators=(",", ":")) + "\n"
    for place, text in texts.items():
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
        except OSError as bad:
            message = f"`{place}` cannot be written: {bad.strerror}"
            raise InputError.one(message, where="out") from None
    return tuple(texts)


def a_line_each(row: Mapping[str, Any]) -> str:
    """JSON that is read and compared by people."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in row.items())
    return f"{{\n{lines}\n}}\n"


__all__ = ["NewFamily", "new_family", "write_family"]
