"""Changes to a package that are made when, and only if, the program imports it."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

Patch = tuple[Any, str, Any]
Change = Callable[[ModuleType], list[Patch]]
# What stand-ins take the place of, by owner and name.
ORIGINALS: dict[tuple[int, str], Any] = {}


def put(owner: Any, name: str, value: Any) -> None:
    ORIGINALS.setdefault((id(owner), name), getattr(owner, name, None))
    setattr(owner, name, value)


class Finder(importlib.abc.MetaPathFinder):
    """Finds what the others find, and has it changed once it is loaded."""

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self.changes = dict(changes)
        self.busy: set[str] = set()

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = self.changes.get(name)
        if change is None or name in self.busy:
            return None
        self.busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        finally:
            self.busy.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader, change)
        return spec


class Loader(importlib.abc.Loader):
    def __init__(self, true: Any, change: Change) -> None:
        self.true, self.change = true, change

    def create_module(self, spec: Any) -> Any:
        return self.true.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.true.exec_module(module)
        for owner, name, value in self.change(module):
            put(owner, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.true, name)


@contextlib.contextmanager
def replaced(modules: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Inside, an import finds these (None: nothing that was loaded); afterwards what was there
    before."""
    before = {name: sys.modules.pop(name, None) for name in modules}
    sys.modules.update({name: module for name, module in modules.items() if module is not None})
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


@contextlib.contextmanager
def changing(changes: Mapping[str, Change]) -> Iterator[None]:
    """Modules loaded already are changed at once."""
    for name, change in changes.items():
        module = sys.modules.get(name)
        if module is not None:
            for owner, attribute, value in change(module):
                put(owner, attribute, value)
    finder = Finder(changes)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


__all__ = ["Change", "Patch", "changing", "put", "replaced"]
