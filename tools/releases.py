"""Months of releases on PyPI -> `src/memfit/truth/data/releases.json`: which versions of libraries
went together.

    python tools/releases.py

A version's month is that of the first file of its first release, `4.40.0` for 4.40.
"""

from __future__ import annotations

import datetime
import json
import re
import urllib.request
from pathlib import Path
from typing import Any

LIBRARIES = ("accelerate", "bitsandbytes", "peft", "torch", "transformers", "trl")
FROM = "2023-03"  # rows of older libraries name their versions
TARGET = Path(__file__).parents[1] / "src/memfit/truth/data/releases.json"
FINAL = re.compile(r"(?P<minor>\d+\.\d+)(\.\d+)*")


def main() -> None:
    found = {
        "until": f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m}",
        **{library: months(library) for library in LIBRARIES},
    }
    TARGET.write_text(json.dumps(found, indent=1) + "\n")


def months(library: str) -> dict[str, str]:
    with urllib.request.urlopen(f"https://pypi.org/pypi/{library}/json", timeout=60) as answer:
        releases: dict[str, list[dict[str, Any]]] = json.load(answer)["releases"]
    first: dict[str, str] = {}
    for version, files in releases.items():
        final = FINAL.fullmatch(version)
        if final is None or not files:
            continue
        month = min(str(file["upload_time"])[:7] for file in files)
        first[final["minor"]] = min(month, first.get(final["minor"], month))
    return {minor: first[minor] for minor in sorted(first, key=number) if first[minor] >= FROM}


def number(version: str) -> tuple[int, ...]:
    return tuple(int(piece) for piece in version.split("."))


if __name__ == "__main__":
    main()
