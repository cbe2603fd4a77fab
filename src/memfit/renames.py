"""Names that changed. The old one keeps working, with a warning, until the version in its row."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Renamed(NamedTuple):
    """`until`: the version that drops `old`. `command` is empty where all commands had it."""

    old: str
    new: str
    until: str
    command: str = ""


# Options: flags, keys of a job file and Python arguments, written with underscores.
OPTIONS: tuple[Renamed, ...] = (
    Renamed("rank", "process", "0.3", command="measure"),  # with a layout; else it is LoRA's
)
# Keys of JSON results.
FIELDS: tuple[Renamed, ...] = (Renamed("advice.rungs", "advice.ways[].rungs", "0.3"),)


class RenamedWarning(FutureWarning):
    """An old name was used."""


def current(name: str) -> str | None:
    """The new name of an option that was renamed in all commands, with a warning."""
    for one in OPTIONS:
        if one.old == name and not one.command:
            warn(one)
            return one.new
    return None


def warn(one: Renamed) -> None:
    """Say that an old option was used: to the listener if there is one, else as a warning."""
    old, new = (f"--{name.replace('_', '-')}" for name in (one.old, one.new))
    message = f"`{old}` is now `{new}`; memfit {one.until} drops the old name"
    if LISTENERS:
        LISTENERS[-1](message)
    else:
        warnings.warn(message, RenamedWarning, stacklevel=2)


LISTENERS: list[Callable[[str], None]] = []


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Within it, `listener` gets what would be a warning: the command line has lines of its own."""
    LISTENERS.append(listener)
    try:
        yield
    finally:
        LISTENERS.remove(listener)


__all__ = ["FIELDS", "OPTIONS", "Renamed", "RenamedWarning", "current", "listening", "warn"]
