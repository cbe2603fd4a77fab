"""Tables of pandas whose files were not found: rows with the columns that the script asks for."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from memfit.trace import failures, near_files, records, synthetic_tokenizers
from memfit.trace.asked_columns import MARK, Columns, by_user
from memfit.trace.imports import Change, Patch
from memfit.trace.missing_weights import expected
from memfit.trace.refuse import Watcher

READERS = (
    "read_csv",
    "read_table",
    "read_json",
    "read_parquet",
    "read_excel",
    "read_feather",
    "read_pickle",
    "read_orc",
)
# Methods of a table, and which of their arguments name columns.
NAMING = {
    "rename": ("columns",),
    "drop": ("columns", "labels"),
    "dropna": ("subset",),
    "drop_duplicates": ("subset",),
    "duplicated": ("subset",),
    "groupby": ("by",),
    "sort_values": ("by",),
    "set_index": ("keys",),
    "explode": ("column",),
    "pop": ("item",),
    "astype": ("dtype",),
    "merge": ("on", "left_on"),
    "melt": ("id_vars", "value_vars"),
    "nlargest": ("columns",),
    "value_counts": ("subset",),
}
REMOVED = {"append", "iteritems", "ix", "lookup", "as_matrix"}  # from tables by newer pandas


def named(value: Any) -> list[str]:
    """Names of columns in an argument: one, a list, or the keys of a dict."""
    if isinstance(value, str):
        return [value]
    some = value if isinstance(value, (list, tuple, set, dict)) else ()
    return [one for one in some if isinstance(one, str)]


ENDS = {"image": ".jpg", "gray": ".png", "audio": ".wav"}  # of files that a table names


def cell(columns: Columns, name: str, row: int) -> Any:
    kind = columns.kind(name)
    end = ENDS.get(kind.split()[0])
    return f"{row:06}{end}" if end else columns.source.value(kind, row)


def cells(columns: Columns, name: str, count: int) -> Any:
    """Values of a column; pictures and recordings are files, which a table names."""
    return [cell(columns, name, row) for row in range(count)]


def grow(columns: Columns, table: Any, names: list[str]) -> None:
    """Add what is asked for."""
    for name in names:
        if name not in table.columns:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it may be a part of another table
                table[name] = cells(columns, name, len(table))


def series(pandas: Any, columns: Columns) -> Any:
    """A row or a column of such a table. A row's index are the names of columns."""

    def lacks(row: Any, name: Any) -> bool:
        return isinstance(name, str) and name not in row.index and row.index.dtype.kind in "OT"

    class Series(pandas.Series):
        def __getitem__(self, key: Any) -> Any:
            return self.made(key) if by_user() and lacks(self, key) else super().__getitem__(key)

        def __getattr__(self, name: str) -> Any:
            if by_user() and not name.startswith("_") and lacks(self, name):
                return self.made(name)
            return super().__getattr__(name)

        def made(self, name: str) -> Any:
            row = self.name if isinstance(self.name, int) else 0
            return cell(columns, name, row)

    return Series


def located(pandas: Any, columns: Columns) -> Any:
    """`table.loc[rows, names]`."""

    class Located(type(pandas.DataFrame().loc)):  # type: ignore[misc]
        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, tuple) and by_user():
                grow(columns, self.obj, named(key[-1]))
            return super().__getitem__(key)

    return Located


@functools.cache
def table_type(pandas: Any, columns: Columns) -> Any:
    """A table that gets the columns it is asked for."""
    Series, Located = series(pandas, columns), located(pandas, columns)

    class Table(pandas.DataFrame):
        _stand_in = True
        _constructor = property(lambda _: Table)
        _constructor_sliced = property(lambda _: Series)
        loc = property(lambda self: Located("loc", self))

        def __getitem__(self, key: Any) -> Any:
            if by_user():
                grow(columns, self, named(key))
            return super().__getitem__(key)

        def __getattr__(self, name: str) -> Any:
            if by_user() and not name.startswith("_") and name not in REMOVED:
                grow(columns, self, [name])
            return super().__getattr__(name)

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "columns" and by_user() and len(value) != len(self.columns):
                whole = Table(index=self.index)
                grow(columns, whole, named(list(value)))
                object.__setattr__(self, "_mgr", whole._mgr)
            super().__setattr__(name, value)

        def itertuples(self, index: bool = True, name: str | None = "Pandas") -> Any:
            def asked(_: Any, called: str) -> Any:
                if called.startswith("_") or not by_user():
                    raise AttributeError(called)
                return columns.values(called, None)

            for row in super().itertuples(index, name):
                type(row).__getattr__ = asked
                yield row

    for name, arguments in NAMING.items():
        setattr(Table, name, asking(getattr(pandas.DataFrame, name), arguments, columns))
    return Table


def asking(true: Any, arguments: tuple[str, ...], columns: Columns) -> Any:
    """A method of which some arguments name columns."""
    signature = inspect.signature(true)

    @functools.wraps(true)
    def method(self: Any, *args: Any, **given: Any) -> Any:
        if by_user():
            bound = signature.bind_partial(self, *args, **given).arguments
            along = bound.get("axis") in (1, "columns") or true.__name__ != "drop"
            for one in arguments:
                if one != "labels" or along:
                    grow(columns, self, named(bound.get(one)))
        return true(self, *args, **given)

    return method


def handed_over(module: ModuleType) -> list[Patch]:
    """`Dataset.from_pandas` of such a table goes on as a data set that is asked."""
    true = module.Dataset.from_pandas.__func__

    def from_pandas(cls: Any, df: Any, *args: Any, **given: Any) -> Any:
        made = true(cls, df, *args, **given)
        if getattr(type(df), "_stand_in", False):
            made._info.description = MARK
        return made

    return [(module.Dataset, "from_pandas", classmethod(from_pandas))]


def series_of_numbers(pandas: Any, numbers: int, length: int) -> Any:
    """A public file of series, by the hour; the last one is that to be predicted."""
    names = [*map(str, range(numbers - 1)), "OT"]
    values = {
        name: [(row * 7 + place) % 24 / 24 for row in range(length)]
        for place, name in enumerate(names)
    }
    dates = pandas.date_range("2016-07-01", periods=length, freq="h").astype(str)
    return pandas.DataFrame({"date": dates, **values})


def changes(
    recorder: Watcher, columns: Columns, first: Callable[[], dict[str, str]], rows: int
) -> dict[str, Change]:
    """`first` gives the columns that a table has before it is asked for any."""

    def table(pandas: Any, path: str, given: dict[str, Any]) -> Any:
        size = synthetic_tokenizers.table()["series"].get(os.path.basename(path).lower())
        if size is not None:
            numbers, length = size
            message = f"`{path}` was not found: {numbers} series of {length:,} numbers take its"
            recorder.note(f"data {path}", f"{message} place")
            return series_of_numbers(pandas, numbers, length)
        tokens = columns.source.tokens
        recorder.note(
            f"data {path}",
            f"`{path}` was not found: a table of {rows} rows takes its place, with random texts of "
            f"{tokens} tokens; its columns are those that the script asks for, with "
            "values that their names and its lines suggest",
            "choose with `--tokens`",
        )
        Table = table_type(pandas, columns)
        count = min(rows, int(given.get("nrows") or rows))
        asked = named(given.get("names")) or named(given.get("usecols"))
        wanted = {one: columns.kind(one) for one in asked} or first()
        made = Table({one: cells(columns, one, count) for one in wanted})
        return iter([made]) if given.get("chunksize") or given.get("iterator") else made

    def readers(pandas: ModuleType) -> list[Patch]:
        def reading(true: Any) -> Any:
            called = next(iter(inspect.signature(true).parameters))

            @functools.wraps(true)
            def read(*args: Any, **given: Any) -> Any:
                try:
                    return true(*args, **given)
                except Exception as bad:
                    path: Any = args[0] if args else given.get(called)
                    by_name = isinstance(path, (str, os.PathLike))
                    held = records.is_stand_in(path)
                    absent = held or failures.missing_file(bad) is not None
                    if not by_name or not by_user() or not absent:
                        raise
                    if expected():  # the script has another way
                        raise
                    near_files.refuse_misspelled(os.fspath(path))
                    return table(pandas, os.fspath(path), given)

            return read

        return [
            (pandas, name, reading(getattr(pandas, name)))
            for name in READERS
            if hasattr(pandas, name)
        ]

    return {"pandas": readers}


__all__ = ["changes", "handed_over"]
