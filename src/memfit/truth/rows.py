"""Reading published figures: one JSON object a line, as `data/README.md` describes them. A line
that is none is named, never dropped."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from memfit.errors import InputError
from memfit.lazy_dataclass import dataclass
from memfit.truth.case import Refused

BUNDLED = Path(__file__).parent / "data" / "published.jsonl.gz"
LONGEST_FILE, LONGEST_LINE = (
    2**28,
    2**20,
)  # bytes: the collection has 5 MB, and lines of at most 4 kB
UNITS = {
    "bytes": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
LARGEST = 2**60
# As rows say it themselves: "variable, see mean_tokens_per_sample", "mean 3234.4 tokens".
VARYING = re.compile(r"\bvariable\b|\bmean [\d.]+ tokens\b|'mean_tokens_per_sample'")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line. Everything is as published, so any field may be missing, or be a text where a
    number is hoped for."""

    id: str
    source: str
    model: Any = None
    task: Any = None
    engine: Any = None
    engine_version: Any = None
    gpu: Any = None
    gpus: Any = None
    batch: Any = None
    seq: Any = None
    dtype: Any = None
    method: Any = None
    optimizer: Any = None
    grad_checkpointing: Any = None
    attention: Any = None
    parallel: Any = None
    extra: Any = None
    metric: Any = None
    unit: Any = None
    value: Any = None
    confidence: Any = None
    notes: Any = None
    value_gib: Any = None
    scope: Any = None
    speed: Any = None

    def text(self, *names: str) -> str:
        """Fields as one text in small letters, to look for words in."""
        return " ".join(
            str(getattr(self, name)) for name in names if getattr(self, name) is not None
        ).lower()[:4000]

    @property
    def lengths_vary(self) -> bool:
        """Whether batches are as long as a dataset's texts: the memory of such a run depends on
        lengths that the row does not list."""
        return VARYING.search(f"{self.text('seq')} {self.text('extra')}") is not None

    def more(self, key: str) -> Any:
        """A value of `extra`, or None."""
        return self.extra.get(key) if isinstance(self.extra, Mapping) else None

    @property
    def origin(self) -> str:
        """What the figure was taken from: a repository, or the first words of a description."""
        head = self.source.split(":")[0].split("@")[0].split(" (")[0].strip()
        return head[:60] or "unnamed"

    @property
    def bytes(self) -> int | None:
        """The value as bytes; None where there is none, or its unit could not be settled."""
        amount, unit = number(self.value), str(self.unit).lower()
        if amount is not None and unit in UNITS:
            size = amount * UNITS[unit]
        elif (gib := number(self.value_gib)) is not None:
            size = gib * 2**30
        else:
            return None
        return round(size) if 0 <= size <= LARGEST else None


def number(value: Any) -> float | None:
    """A finite number, or None for anything else (a text, a truth value, a NaN)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def count(value: Any) -> int | None:
    """A positive whole number, also one written as a text; None for anything else."""
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 20:
        value = int(value)
    found = number(value)
    return int(found) if found is not None and found == int(found) and 0 < found < 2**40 else None


def read_rows(path: str | Path | None = None) -> Iterator[Row | Refused]:
    """Every line of a file (plain, or compressed by gzip), in order; None: the bundled
    collection."""
    path = BUNDLED if path is None else Path(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            read = 0
            for place, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE + 1), b""), 1):
                read += len(line)
                if len(line) > LONGEST_LINE or read > LONGEST_FILE:
                    raise InputError.one(
                        f"line {place} of `{path.name}` is too long for published figures",
                        where="path",
                    )
                if line.strip() and not served(line):
                    yield row(line, place)
    except (OSError, EOFError) as error:
        raise InputError.one(
            f"`{str(path)[:200]}` cannot be read: {str(error)[:120]}",
            where="path",
            hint="name a .jsonl file",
        ) from None


def served(line: bytes) -> bool:
    """Whether the line is a start-up log of a serving engine, which `served.py` reads."""
    if b'"figures"' not in line:
        return False
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(values, dict) and isinstance(values.get("figures"), dict)


def row(line: bytes, place: int) -> Row | Refused:
    """One line as a Row."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Refused(id=f"line {place}", source="?", reason="no JSON", detail=str(error)[:80])
    if not isinstance(values, dict):
        return Refused(
            id=f"line {place}", source="?", reason="no JSON object", detail=type(values).__name__
        )
    name = values.get("id")
    known = {one.name: values[one.name] for one in fields(Row) if one.name in values}
    known["id"] = str(name)[:80] if isinstance(name, (str, int)) and name != "" else f"line {place}"
    known["source"] = str(values.get("source") or "unnamed")[:400]
    return Row(**known)
