"""How answers are displayed in Python and in notebooks: `memfit.report` registers the writers.

The answers (`Estimate`, `Plan`, `Study`) stand below `report` and must not import it; `import
memfit` loads `report` before it hands out a verb.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memfit.lazy_dataclass import dataclass


@dataclass(frozen=True, kw_only=True)
class View:
    """The writers of one kind of answer."""

    line: Callable[[Any], str]
    text: Callable[[Any], str]
    data: Callable[[Any], dict[str, Any]]
    html: Callable[[Any], str]


VIEWS: dict[str, View] = {}  # by the name of the class


class Presented:
    """A mixin for answers: a short `repr`, `summary()`, `to_dict()` and a table for notebooks."""

    __slots__ = ()

    def summary(self) -> str:
        """The answer as the command line prints it."""
        return self._view().text(self)

    def to_dict(self) -> dict[str, Any]:
        """The answer as `--json` prints it: sizes in bytes, times in seconds."""
        return self._view().data(self)

    def _repr_html_(self) -> str:
        return self._view().html(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._view().line(self)}>"

    def _view(self) -> View:
        name = type(self).__name__
        if name not in VIEWS:
            from importlib import import_module

            import_module("memfit.report")  # registers them
        return VIEWS[name]


__all__ = ["VIEWS", "Presented", "View"]
