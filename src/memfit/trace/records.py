"""JSON files that a script downloads, without a network: records with the fields that it asks
for."""

from __future__ import annotations

import json
import os
import re
from types import ModuleType
from typing import Any

from memfit.trace.asked_columns import Columns, by_user
from memfit.trace.imports import Patch
from memfit.trace.synthetic_tokenizers import table

COUNT = 200  # records of a file
LIST = "stand-in for a list of records"  # what such a file holds instead
ROW = "stand-in for a record"  # on each line of JSON lines


CLASSES = 16  # of a file that nothing is known of
NAMES = re.compile(r"id_?(?:2|to)_?label|label_?(?:2|to)_?id|class_?index")


def classes(path: str) -> int:
    """How many classes a file numbers, by its name; 0 if it is no such file."""
    name = os.path.basename(path).lower()
    if NAMES.search(name) is None:
        return 0
    known = (int(count) for word, count in table()["classes"].items() if word in name)
    return next(known, CLASSES)


def numbered(path: str, count: int) -> bytes:
    """Classes by their numbers, or the other way round, as the file's name says."""
    name = os.path.basename(path).lower()
    listed = [(str(one), f"class {one}") for one in range(count)]
    found: dict[str, Any] = dict(listed)
    if "class" in name:  # Keras' file of ImageNet
        found = {number: [f"n{number}", label] for number, label in listed}
    elif name.find("label") < name.find("id"):
        found = {label: int(number) for number, label in listed}
    return json.dumps(found).encode()


def content(path: str) -> bytes:
    """What a file of this name holds."""
    if count := classes(path):
        return numbered(path, count)
    text = f'"{ROW}"\n' * COUNT if path.endswith("l") else f'"{LIST}"\n'
    return text.encode()


def is_stand_in(path: Any) -> bool:
    """Whether a file on the disk came from here."""
    if not isinstance(path, (str, os.PathLike)) or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.readline(len(LIST) + 9).strip() in (f'"{ROW}"'.encode(), f'"{LIST}"'.encode())


class Record(dict[str, Any]):
    """A record that has the fields that the script asks for."""

    columns: Columns

    def __missing__(self, name: str) -> Any:
        if not by_user():
            raise KeyError(name)
        return self.field(name)

    def field(self, name: str) -> Any:
        if name not in self:
            self[name] = self.columns.values(name, None)
        return self[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.field(name) if by_user() else super().get(name, default)


class Records(list[Any]):
    """A list of records; a name in it, as `data["train"]`, leads to the same list. A line of a
    file that has a record on each is like its first."""

    def __getitem__(self, key: Any) -> Any:
        return self if isinstance(key, str) else super().__getitem__(key)

    def get(self, name: str, default: Any = None) -> Any:
        return self[0].field(name) if by_user() else default

    def items(self) -> list[tuple[str, Any]]:
        """Where the script takes the file for an object."""
        return [(str(place), one) for place, one in enumerate(self)]

    def keys(self) -> list[str]:
        return [name for name, _ in self.items()]

    def values(self) -> list[Any]:
        return [*self]


def changes(module: ModuleType, columns: Columns) -> list[Patch]:
    """For `json`, whose `load` calls `loads`."""
    true = module.loads
    kind = type("Record", (Record,), {"columns": columns})

    def loads(text: Any, *args: Any, **given: Any) -> Any:
        found = true(text, *args, **given)
        if found == ROW:
            return kind()
        return Records(kind() for _ in range(COUNT)) if found == LIST else found

    return [(module, "loads", loads)]


__all__ = ["changes", "classes", "content", "is_stand_in"]
