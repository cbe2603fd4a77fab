"""Between memfit and the terminal: text from outside is escaped, streams may be closed or full, and
signals end a run tidily.

Configs, job files, names and a script's own words are not trusted: a control character in them
could move the cursor, and a bidirectional one could turn a line round.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import unicodedata
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO

PLAIN = str.maketrans({"│": "|", "█": "#", "·": "*", "×": "x", "…": "...", "–": "-"})
# The colours that `report.text.paint` writes; any other escape sequence is somebody else's.
OURS = re.compile(r"\x1b\[(?:31|32|33|36|0)m")
# Cc: control; Cf: format, among them all bidirectional marks; Cs: half of a surrogate pair; Zl, Zp:
# separators that some terminals take for a new line.
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


class Undelivered(Exception):
    """The answer is there, and stdout does not take it."""


class Ended(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which end a run as Ctrl-C does: what it began is cleaned up."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def terminal_columns() -> int:
    """As `shutil.get_terminal_size` counts them, which loads three compressors."""
    if (said := os.environ.get("COLUMNS", "")).isdecimal() and int(said) > 0:
        return int(said)
    try:
        known = os.get_terminal_size(sys.__stdout__.fileno()).columns  # type: ignore[union-attr]
    except (AttributeError, ValueError, OSError):  # no terminal, or closed
        return 80
    return known or 80


# ------------------------------------------------------------------------------------ text
def escaped(text: str, *, colour: bool = False, keep: str = "\n\t") -> str:
    """`text` with every character that a terminal would act on written as `\\u001b` is, which is
    how JSON writes it, too. `colour`: memfit's own colours are kept."""
    if text.isascii() and text.isprintable():
        return text

    def shown(part: str) -> str:
        return "".join(
            json.dumps(one)[1:-1]
            if unicodedata.category(one) in HIDDEN and one not in keep
            else one
            for one in part
        )

    if not colour:
        return shown(text)
    ours = [*OURS.findall(text), ""]
    return "".join(shown(part) + own for part, own in zip(OURS.split(text), ours, strict=True))


def coloured(stream: TextIO | None) -> bool:
    """Only on a terminal that wants it (no-color.org)."""
    return (
        stream is not None
        and stream.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )


def encoded(text: str, encoding: str) -> str:
    """In ASCII, where the encoding has no more."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(PLAIN).encode(encoding, "backslashreplace").decode(encoding)
    return text


def ready(text: str, stream: TextIO) -> str:
    """A line as the stream can show it."""
    return encoded(escaped(text, colour=coloured(stream)), stream.encoding or "ascii") + "\n"


# ------------------------------------------------------------------------------------ streams
def deliver(text: str) -> None:
    """The answer to stdout: `BrokenPipeError` where the reader has gone, `Undelivered` where
    nothing can be written."""
    stream = sys.stdout
    if stream is None:
        raise Undelivered("it is closed")
    try:
        stream.write(
            f"{encoded(escaped(text, colour=coloured(stream)), stream.encoding or 'ascii')}\n"
        )
        stream.flush()
    except BrokenPipeError:
        silence(1)
        raise
    except (OSError, ValueError) as error:
        silence(1)
        reason = error.strerror if isinstance(error, OSError) else "it is closed"
        raise Undelivered((reason or "unknown error").lower()) from None


def say(text: str) -> None:
    """A line to stderr."""
    if sys.stderr is not None:
        put(ready(text, sys.stderr))


def put(text: str) -> None:
    """To stderr as it is; where nobody can read it, nothing: the exit code says enough."""
    try:
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()
    except (OSError, ValueError):
        silence(2)


def silence(number: int) -> None:
    """From now on the stream goes nowhere: Python flushes it at exit, and would fail again."""
    with contextlib.suppress(OSError, ValueError):
        stream = sys.stdout if number == 1 else sys.stderr
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def opened() -> None:
    """Files that are opened must not take the numbers of closed standard streams."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)


# ------------------------------------------------------------------------------------ signals
@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end a run as Ctrl-C does. Only the main thread may say so, and a
    signal that is ignored (`nohup`) stays ignored."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended(number)

    before: dict[int, Any] = {}
    try:
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, end)
    except ValueError:  # not the main thread
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = [
    "Ended",
    "Undelivered",
    "coloured",
    "deliver",
    "ending",
    "escaped",
    "opened",
    "put",
    "say",
    "silence",
    "terminal_columns",
]
