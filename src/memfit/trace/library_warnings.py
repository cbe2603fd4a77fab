"""Warnings that libraries print while a script runs, to be told from what the script prints."""

from __future__ import annotations

import collections
import contextlib
import logging
import warnings
from typing import Any

from memfit.trace import lines

MOST = 500  # lines that are remembered


def collect() -> collections.deque[str]:
    """The lines that libraries log below errors or warn of, from now on in this process."""
    found: collections.deque[str] = collections.deque(maxlen=MOST)
    emit, show = logging.StreamHandler.emit, warnings.showwarning

    def emit_noted(self: Any, record: logging.LogRecord) -> None:
        if record.levelno < logging.ERROR and not lines.is_users(record.pathname):
            with contextlib.suppress(Exception):  # which `emit` reports itself
                found.extend(self.format(record).splitlines())
        emit(self, record)

    def show_noted(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if not lines.is_users(filename):
            text = warnings.formatwarning(message, category, filename, lineno, line)
            found.extend(text.splitlines())
        show(message, category, filename, lineno, file, line)

    logging.StreamHandler.emit = emit_noted  # type: ignore[method-assign]
    warnings.showwarning = show_noted
    return found


__all__ = ["collect"]
