"""A flat tape as text, for the way from one interpreter to another: JSON with every word written
once."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from memfit.errors import Problem, TapeError
from memfit.tape import Alloc, Comm, Compute, Event, Free, Mark, Sync, Tape, Trim

# Each kind of event by its number, and the places of its fields that hold words.
KINDS: tuple[tuple[Any, frozenset[int]], ...] = tuple(
    (kind, frozenset(kind._fields.index(name) for name in worded))
    for kind, worded in (
        (Alloc, ("part", "where", "op", "formula")),
        (Free, ()),
        (Compute, ("op", "math", "where")),
        (Comm, ("op", "group", "where")),
        (Sync, ()),
        (Mark, ("phase", "where")),
        (Trim, ()),
    )
)
CODES = {kind: code for code, (kind, _) in enumerate(KINDS)}


def to_text(tape: Tape) -> str:
    """Each event is a list: the number of its kind, then its fields, words as their place in a list
    of all words."""
    words: dict[str, int] = {}

    def coded(value: Any) -> Any:
        return words.setdefault(value, len(words)) if isinstance(value, str) else value

    written = {
        "events": [[CODES[type(event)], *map(coded, event)] for event in tape.events],
        "words": list(words),
        "source": tape.source,
        "rank": tape.rank,
        "versions": dict(tape.versions),
        "notes": [dataclasses.asdict(one) for one in tape.notes],
        "parameters": tape.parameters,
    }
    return json.dumps(written, separators=(",", ":"))


def from_text(text: str) -> Tape:
    """The tape again, equal to the one that was written."""
    try:
        written = json.loads(text)
        events = tuple(event_of(row, written["words"]) for row in written["events"])
        return Tape(
            events=events,
            source=written["source"],
            rank=written["rank"],
            versions=written["versions"],
            notes=tuple(Problem(**one) for one in written["notes"]),
            parameters=tuple(written["parameters"]),
        )
    except (ValueError, KeyError, IndexError, TypeError) as bad:
        raise TapeError(f"what was written is no tape: {bad}") from None


def event_of(row: list[Any], words: list[str]) -> Event:
    kind, worded = KINDS[row[0]]
    event: Event = kind(
        *(
            tuple(value) if isinstance(value, list) else words[value] if place in worded else value
            for place, value in enumerate(row[1:])
        )
    )
    return event


__all__ = ["from_text", "to_text"]
