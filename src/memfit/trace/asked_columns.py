"""Columns of a data set that neither is there nor is known: those that the script asks for, of the
kind that their names say."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import json
import re
import sys
from collections.abc import Iterator, KeysView
from types import ModuleType
from typing import Any

from memfit.trace import lines, script_literals
from memfit.trace.imports import Change, Patch
from memfit.trace.synthetic_tokenizers import table

MARK = "stand-in with the columns that are asked for"
ASSUMED = "stand-in with the columns that are assumed"
SPLIT = 200  # rows of a split that nobody named
ALONE = 10_000  # rows that one process maps fast enough
RATE = 16_000  # samples of a second
# Kinds whose values are long, and of which a script names none.
LONG = (
    "text",
    "messages",
    "conversations",
    "image",
    "audio",
    "tokens",
    "translation",
    "answers",
    "objects",
)
# `features[data_args.label_column_name].names`: whichever column holds the labels has classes.
NAMED_CLASSES = r"features\[[^\]\n]*label[^\]\n]*\]\.(?:names|num_classes|int2str|str2int)\b"
NUMBERED = re.compile(r"(?:class|label|name)\w*?_?(?:to|2)_?id$")
SEGMENTED = {"label", "labels", "annotation", "annotations", "mask"}  # a class for each pixel
ONE_ROW = "example|sample|row|item|element|record|data_?point|ex|x"  # as scripts call one
TURNS = ("messages", "conversations")  # which a script may want as one text
# What a script looks for where another part of it may have put it, and what few rows have.
MADE = {"input_ids", "attention_mask", "labels", "tools"}
# What a tokenizer or processor makes: a script that asks for these means data that it has prepared.
PREPARED = {"input_ids", "attention_mask", "pixel_values", "input_values", "input_features"}
RECORDINGS = 64  # rows of a data set with audio, which is large


def kind_of(name: str, other: str = "text") -> str:
    """`labels` are classes, `image` is a picture, a `title` is short; others are long texts."""
    for pattern, kind in table()["columns"].items():
        if re.fullmatch(pattern, name.lower()):
            return str(kind)
    return other


def kind_said(name: str) -> str:
    """The kind that the script itself speaks of, else the one that the name suggests."""
    if name.lower() in SEGMENTED and lines.matches(r"ForSemanticSegmentation\b"):
        return "gray"
    if name.lower() in SEGMENTED and lines.matches(r"For(?:Universal|Instance)Segmentation\b"):
        return "image"  # classes and objects in a channel each
    if NUMBERED.search(name):
        return "numbered"
    if name == "image_id" and lines.matches(r"[\"']objects[\"']"):
        return "id"  # of COCO's annotations
    kind = kind_of(name, "")
    named = re.escape(name)
    if lines.matches(rf"features\[[\"']{named}[\"']\]\.(names|num_classes|int2str|str2int)\b"):
        return kind if kind.startswith("label") else "label 16"
    if kind.startswith("label") and lines.matches(NAMED_CLASSES):
        return kind
    if kind == "conversations" and says_roles():
        kind = "messages"
    if lines.matches(rf"json\.loads\(\s*\w+\[[\"']{named}[\"']\]"):
        return f"json {kind}" if kind in TURNS else "json"
    if lines.matches(rf"\b(?:{ONE_ROW})\[[\"']{named}[\"']\]\[0\]"):
        return f"several {'sentence' if kind.startswith('label') else kind or kind_of(name)}"
    values = () if kind in LONG else script_literals.values_of(name)
    if kind in ("", "text", "sentence") and script_literals.is_number(name):
        return "id" if kind == "sentence" else "float"
    if not values and kind.startswith(("label", "float")) and script_literals.is_text(name):
        return "text"
    if kind in TURNS and (script_literals.is_text(name) or beside_a_text(name)):
        return "text"
    return f"choice {json.dumps(values)}" if values else kind or kind_of(name)


def says_roles() -> bool:
    """Whether the script reads turns by `role` and `content`, not by `from` and `value`."""
    return lines.matches(r"[\"']content[\"']") and not lines.matches(r"[\"']value[\"']\]")


def beside_a_text(name: str) -> bool:
    return any(kind_of(one) in ("text", "sentence") for one in script_literals.beside(name))


def is_audio(name: str) -> bool:
    return kind_of(name) == "audio"


def arrays(found: Any, rate: int) -> Any:
    """Recordings as a decoder gives them at the rate that the script has chosen; the table stores
    lists."""
    if isinstance(found, list):
        return [arrays(one, rate) for one in found]
    if not isinstance(found, dict) or "array" not in found:
        return found  # the script has put something else there
    numpy: Any = importlib.import_module("numpy")
    known = int(found.get("sampling_rate") or rate)
    samples = numpy.asarray(found["array"], dtype="float32")
    if known != rate:
        samples = numpy.resize(samples, len(samples) * rate // known)
    return {**found, "array": samples, "sampling_rate": rate}


def samples(rate: int) -> Any:
    """What a data set says of its recordings."""
    return importlib.import_module("datasets").Audio(sampling_rate=rate)


def by_user(depth: int = 2) -> bool:
    """Whether the line that asks is the script's: libraries ask for columns that may not be
    there."""
    return lines.is_users(sys._getframe(depth).f_code.co_filename)


class Columns:
    """Adds what is asked for to the data sets that carry the mark."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.mapping = False  # whether a function runs over a marked data set
        self.rate = RATE  # of recordings, as the script has cast them
        self.known: dict[str, str] = {}
        self.turns: dict[str, Iterator[int]] = {}  # rows that were asked for one by one

    def kind(self, name: str) -> str:
        if name not in self.known:
            self.known[name] = kind_said(name)
        return self.known[name]

    def grow(self, data: Any, name: str, kind: str = "") -> None:
        if not name or name in data._data.column_names:
            return
        kind = kind or self.kind(name)
        count = min(len(data), RECORDINGS) if kind == "audio" else len(data)
        whole = data.select(range(count)) if count < len(data) else data
        datasets: Any = importlib.import_module("datasets")
        made = datasets.concatenate_datasets(
            [whole.with_format(None), self.source.rows({name: kind}, count)], axis=1
        )
        made._info.description = MARK
        for one in ("_data", "_info", "_indices", "_fingerprint"):
            setattr(data, one, getattr(made, one))
        if data._format_type is None:
            data._format_columns = None  # `cast_column` leaves the names that it knew

    def values(self, name: str, count: int | None) -> Any:
        kind = self.kind(name)
        if count is None:
            turns = self.turns.setdefault(name, itertools.count())
            return self.source.value(kind, next(turns))
        return [self.source.value(kind, row) for row in range(count)]


def marked(data: Any) -> bool:
    return bool(data._info.description == MARK)


def wanted(name: object) -> bool:
    """Whether data that a script asks for by `in` has such a column before the script made one."""
    return isinstance(name, str) and name not in PREPARED


def kinds(columns: Columns, features: type) -> tuple[type, type, type]:
    """What a marked data set answers with: names, one row or several, and features."""

    class Names(list[str]):
        def __init__(self, data: Any) -> None:
            super().__init__(data._data.column_names)
            self.data = data

        def __contains__(self, name: object) -> bool:
            if not super().__contains__(name) and by_user() and wanted(name):
                columns.grow(self.data, str(name))
                self[:] = self.data._data.column_names
            return super().__contains__(name)

    class Row(dict[str, Any]):
        count: int | None = None

        def __missing__(self, name: str) -> Any:
            if not by_user():
                raise KeyError(name)
            return columns.values(name, self.count)

    class Keys(KeysView[str]):
        """Asked by `in`, as the names of columns are."""

        def __init__(self, found: Any) -> None:
            super().__init__(found)
            self.found = found

        def __contains__(self, name: object) -> bool:
            if name not in self.found and by_user() and wanted(name):
                self.found[name] = self.found[name]  # makes it
            return name in self.found

    class Features(features):
        def keys(self) -> Any:
            return Keys(self)

        def __contains__(self, name: object) -> bool:
            there = super().__contains__(name)
            if not there and by_user() and wanted(name):
                self[name] = self[name]  # makes it
            return there or super().__contains__(name)

        def __missing__(self, name: str) -> Any:
            columns.grow(self.data, name)
            return self.data._info.features[name]

    return Names, Row, Features


def asking(true: Any, columns: Columns) -> Any:
    """A method whose first argument names columns."""
    first = list(inspect.signature(true).parameters)[1]

    @functools.wraps(true)
    def method(self: Any, *args: Any, **given: Any) -> Any:
        names = args[0] if args else given.get(first, ())
        if marked(self):
            for one in [names] if isinstance(names, str) else list(names):
                columns.grow(self, one)
        return true(self, *args, **given)

    return method


def present(data: Any, names: Any) -> list[str]:
    wanted = [names] if isinstance(names, str) else names
    return [one for one in wanted if one in data._data.column_names]


def removing(true: Any) -> Any:
    """What is not there need not go."""

    @functools.wraps(true)
    def remove_columns(self: Any, column_names: Any, *args: Any, **given: Any) -> Any:
        made = self._info.description in (MARK, ASSUMED)
        names = present(self, column_names) if made else column_names
        return true(self, names, *args, **given)

    return remove_columns


def renaming(true: Any) -> Any:
    """A column takes the name of one that was only assumed."""

    @functools.wraps(true)
    def rename_column(
        self: Any, original_column_name: str, new_column_name: str, *args: Any, **given: Any
    ) -> Any:
        """A DatasetDict names the arguments."""
        old, new = original_column_name, new_column_name
        there = marked(self) and new != old and new in self._data.column_names
        return true(self.remove_columns(new) if there else self, old, new, *args, **given)

    return rename_column


def mapping(true: Any, columns: Columns, row: type[dict[str, Any]]) -> Any:
    """`row` is what a function of `filter` is handed, which would be a plain dict."""

    def asking(function: Any) -> Any:
        @functools.wraps(function)
        def over(example: Any, *rest: Any, **given: Any) -> Any:
            example = row(example) if type(example) is dict else example
            return function(example, *rest, **given)

        return over

    @functools.wraps(true)
    def over(self: Any, *args: Any, **given: Any) -> Any:
        if len(self) <= ALONE and given.get("num_proc"):
            given["num_proc"] = None  # what another process notes is lost
        if not marked(self):
            return true(self, *args, **given)
        if given.get("remove_columns") is not None:
            given["remove_columns"] = present(self, given["remove_columns"])
        if true.__name__ == "filter" and given.get("function") is not None:
            given["function"] = asking(given["function"])
        elif true.__name__ == "filter" and args and args[0] is not None:
            args = (asking(args[0]), *args[1:])
        before, columns.mapping = columns.mapping, True
        try:
            return true(self, *args, **given)
        finally:
            columns.mapping = before

    return over


def questions(columns: Columns, module: ModuleType) -> list[Patch]:
    """What a data set answers: its columns, their features, one row or several."""
    kind = module.Dataset
    Names, Row, Features = kinds(columns, module.Features)
    names, features, item = kind.column_names.fget, kind.features.fget, kind.__getitem__

    def column_names(self: Any) -> Any:
        return Names(self) if marked(self) and by_user() else names(self)

    def known(self: Any) -> Any:
        found = features(self)
        if marked(self) and by_user():
            found = Features(found)
            found.data = self
            found.update(dict.fromkeys(filter(is_audio, found), samples(columns.rate)))
        return found

    def __getitem__(self: Any, key: Any) -> Any:
        if not marked(self):
            return item(self, key)
        if isinstance(key, str):
            columns.grow(self, key)
        found = item(self, key)
        if type(found) is dict:
            for name in filter(is_audio, found):
                found[name] = arrays(found[name], columns.rate)
            several = None if isinstance(key, int) else len(next(iter(found.values()), ()))
            found = Row(found)
            found.count = several
        return found

    rows = kind.__getitems__

    def __getitems__(self: Any, keys: Any) -> Any:
        """What a loader fetches, and a script's own collator reads."""
        found = rows(self, keys)
        return [Row(one) for one in found] if marked(self) else found

    each = kind.__iter__

    def __iter__(self: Any) -> Any:
        found = each(self)
        return map(Row, found) if marked(self) and self._format_type is None else found

    return [
        (kind, "__iter__", __iter__),
        (kind, "__getitems__", __getitems__),
        (kind, "column_names", property(column_names)),
        (kind, "features", property(known)),
        (kind, "__getitem__", __getitem__),
    ]


def methods(columns: Columns, module: ModuleType) -> list[Patch]:
    """Methods that name columns."""
    kind = module.Dataset
    cast = asking(kind.cast_column, columns)

    def cast_column(self: Any, column: str, feature: Any, *args: Any, **given: Any) -> Any:
        """Recordings are samples already: nothing decodes them."""
        if type(feature).__name__ != "Audio" or not marked(self):
            return cast(self, column, feature, *args, **given)
        columns.grow(self, column)
        columns.rate = int(feature.sampling_rate or columns.rate)
        return self

    transformed = kind.set_transform
    Row = kinds(columns, module.Features)[1]

    def set_transform(self: Any, transform: Any, *args: Any, **given: Any) -> None:
        """A function that is handed the rows as they are fetched."""

        def over(batch: dict[str, Any]) -> Any:
            rows = Row(batch)
            rows.count = len(next(iter(batch.values()), ()))
            return transform(rows)

        asks = transform is not None and marked(self)
        transformed(self, over if asks else transform, *args, **given)

    wrapped = [
        (kind, one, asking(getattr(kind, one), columns))
        for one in ("rename_columns", "select_columns", "class_encode_column")
    ]
    return [
        *wrapped,
        *((kind, one, mapping(getattr(kind, one), columns, Row)) for one in ("map", "filter")),
        (kind, "remove_columns", removing(kind.remove_columns)),
        (kind, "rename_column", renaming(asking(kind.rename_column, columns))),
        (kind, "cast_column", cast_column),
        (kind, "set_transform", set_transform),
    ]


def rows(columns: Columns, module: ModuleType) -> list[Patch]:
    """The rows that a function under `map` is handed."""
    true = module.LazyDict.__getitem__

    def __getitem__(self: Any, key: Any) -> Any:
        if not columns.mapping or key in self.data or not by_user():
            found = true(self, key)
            return arrays(found, columns.rate) if columns.mapping and is_audio(str(key)) else found
        known = vars(self).setdefault("asked", {})  # apart, for it is no result
        if key not in known:
            batch = type(self).__name__ == "LazyBatch"
            known[key] = columns.values(key, self.pa_table.num_rows if batch else None)
        return known[key]

    there = module.LazyDict.__contains__

    def __contains__(self: Any, key: Any) -> bool:
        """Scripts look whether a row has the form that they are for; in `keys()`, too."""
        if there(self, key) or not columns.mapping or not isinstance(key, str):
            return bool(there(self, key))
        through = "_collections_abc" in sys._getframe(1).f_code.co_filename
        added = key in MADE or columns.kind(key) in ("image", "audio")
        return not added and by_user(3 if through else 2)

    return [
        (module.LazyDict, "__getitem__", __getitem__),
        (module.LazyDict, "__contains__", __contains__),
    ]


def splits(module: ModuleType) -> list[Patch]:
    true = module.DatasetDict.__getitem__

    def __getitem__(self: Any, name: Any) -> Any:
        first = next(iter(self.values()), None)
        if name not in self and first is not None and marked(first) and by_user():
            self[name] = first.select(range(min(len(first), SPLIT)))
        return true(self, name)

    return [(module.DatasetDict, "__getitem__", __getitem__)]


def changes(columns: Columns) -> dict[str, Change]:
    return {
        "datasets.arrow_dataset": lambda module: [
            *methods(columns, module),
            *questions(columns, module),
        ],
        "datasets.dataset_dict": splits,
        "datasets.formatting.formatting": lambda module: rows(columns, module),
    }


__all__ = ["ASSUMED", "MARK", "RATE", "RECORDINGS", "Columns", "changes", "kind_of", "marked"]
