"""Which versions went together: months of releases on PyPI, for rows that name one library, or a
month, and not the others."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

STORED = Path(__file__).parent / "data" / "releases.json"  # tools/releases.py makes it


@cache
def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(STORED.read_bytes())
    return found


def month_of(library: str, version: str) -> str | None:
    """When a version came out; None for one that is not listed."""
    found: str | None = stored()[library].get(".".join(version.split(".")[:2]))
    return found


def newest(library: str, month: str) -> str | None:
    """The newest version of that month; None before the first that is listed, and after the table
    was made."""
    before = [version for version, out in stored()[library].items() if out <= month]
    return before[-1] if before and month <= stored()["until"] else None


__all__ = ["month_of", "newest", "stored"]
