"""Streamed data sets that neither are there nor are known: rows answer what a script asks for."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from memfit.trace.asked_columns import ASSUMED, MARK, Columns, by_user, marked
from memfit.trace.imports import Change, Patch


class Row(dict[str, Any]):
    """One row, or several as lists under their names."""

    columns: Columns
    several = False

    def __missing__(self, name: str) -> Any:
        if not by_user():
            raise KeyError(name)
        count = len(next(iter(self.values()), ())) if self.several else None
        return self.columns.values(name, count)


def row(values: Any, columns: Columns, several: bool) -> Any:
    if not isinstance(values, dict):
        return values
    made = Row(values)
    made.columns, made.several = columns, several
    return made


def mapping(true: Any, columns: Columns) -> Any:
    """`map` and `filter`, whose function is handed rows that answer."""

    @functools.wraps(true)
    def method(self: Any, function: Any = None, *args: Any, **given: Any) -> Any:
        if not marked(self) or function is None:
            return true(self, function, *args, **given)
        several = bool(given.get("batched"))

        @functools.wraps(function)
        def over(found: Any, *rest: Any, **more: Any) -> Any:
            return function(row(found, columns, several), *rest, **more)

        names = given.get("remove_columns")
        if names is not None:
            given["remove_columns"] = present(self, names)
        return true(self, over, *args, **given)

    return method


def present(data: Any, names: Any) -> list[str]:
    wanted = [names] if isinstance(names, str) else list(names)
    there = first(data)
    return [one for one in wanted if one in there]


def first(data: Any) -> dict[str, Any]:
    return next((dict(values) for _, values in data._ex_iterable), {})


def named(true: Any, columns: Columns) -> Any:
    """Methods whose first argument names columns: those that are not there are made."""

    @functools.wraps(true)
    def method(self: Any, names: Any, *args: Any, **given: Any) -> Any:
        listed = [names] if isinstance(names, str) else list(names)
        kinds = {one: columns.kind(one) for one in listed}
        return true(grown(self, kinds, columns) if marked(self) else self, names, *args, **given)

    return method


def grown(data: Any, kinds: dict[str, str], columns: Columns) -> Any:
    """A stream that also has these columns."""
    there = first(data)
    absent = {name: kind for name, kind in kinds.items() if name not in there}
    if not absent:
        return data

    def added(_: Any, row: int) -> dict[str, Any]:
        return {name: columns.source.value(kind, row) for name, kind in absent.items()}

    made = data.map(added, with_indices=True)
    made._info.description = data._info.description
    return made


def methods(columns: Columns, module: ModuleType) -> list[Patch]:
    kind = module.IterableDataset
    rows, remove, skipped = kind.__iter__, kind.remove_columns, kind.skip

    def __iter__(self: Any) -> Iterator[Any]:
        found = rows(self)
        return (row(one, columns, False) for one in found) if marked(self) else found

    def remove_columns(self: Any, names: Any) -> Any:
        return remove(self, present(self, names) if marked(self) else names)

    def skip(self: Any, n: int) -> Any:
        """A made-up stream has fewer rows than the true one, and they are alike."""
        made = self._info.description in (MARK, ASSUMED)
        return skipped(self, 0 if made else n)

    return [
        (kind, "__iter__", __iter__),
        (kind, "skip", skip),
        (kind, "remove_columns", remove_columns),
        *((kind, one, mapping(getattr(kind, one), columns)) for one in ("map", "filter")),
        *(
            (kind, one, named(getattr(kind, one), columns))
            for one in ("rename_column", "rename_columns", "select_columns", "cast_column")
        ),
    ]


def changes(columns: Columns) -> dict[str, Change]:
    return {"datasets.iterable_dataset": lambda module: methods(columns, module)}


__all__ = ["changes", "grown"]
