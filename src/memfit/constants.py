"""Where a number of the code comes from, in a form that a program can read.

A module's constant carries its origin in its annotation, so that the value stays a plain number:

    PORT: Annotated[float, measured("share of a port's line rate", "NVIDIA/nccl-tests#290")] = 0.94

`all_constants` reads them back; docs/reference/constants.md lists them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

Kind = Literal["counted", "vendor", "measured", "fitted", "assumed", "setting"]
KINDS: dict[Kind, str] = {
    "counted": "read in source code or in a specification",
    "vendor": "stated by who makes the hardware",
    "measured": "measured by somebody on a stated machine, apart from whole runs",
    "fitted": "solved from end-to-end times or sizes of published runs, which are no evidence",
    "assumed": "believed, without a source that states it",
    "setting": "a choice of memfit's own search or text, which changes no prediction",
}


class Origin(NamedTuple):
    """What a number is and where it comes from."""

    kind: Kind
    what: str
    source: str = ""


class Constant(NamedTuple):
    """A named number of a module with its origin."""

    module: str
    name: str
    value: Any
    origin: Origin


def counted(what: str, source: str) -> Origin:
    """A number that source code or a specification states."""
    return Origin("counted", what, source)


def vendor(what: str, source: str) -> Origin:
    """A number that the maker of the hardware states."""
    return Origin("vendor", what, source)


def measured(what: str, source: str) -> Origin:
    """A number that somebody measured by itself."""
    return Origin("measured", what, source)


def fitted(what: str, source: str) -> Origin:
    """A number solved from published runs; `source` names them, and they are no evidence."""
    return Origin("fitted", what, source)


def assumed(what: str, why: str) -> Origin:
    """A number without a source."""
    return Origin("assumed", what, why)


def setting(what: str) -> Origin:
    """A setting of memfit's own that changes no prediction."""
    return Origin("setting", what)


def all_constants(*rooms: str) -> Iterator[Constant]:
    """The annotated constants of every module of these packages, in the order of their names."""
    import pkgutil

    for room in rooms:
        package = importlib.import_module(room)
        names = [room] + [
            found.name
            for found in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{room}.")
        ]
        for name in sorted(names):
            yield from module_constants(name)


def module_constants(name: str) -> Iterator[Constant]:
    """The annotated constants of one module, in the order in which they stand there."""
    module = importlib.import_module(name)
    stated = {
        key: hint
        for key, hint in vars(module).get("__annotations__", {}).items()
        if str(hint).startswith("Annotated[")
    }
    holder = type("Stated", (), {"__annotations__": stated})
    for key, hint in get_type_hints(holder, vars(module), include_extras=True).items():
        if get_origin(hint) is Annotated:
            for extra in get_args(hint)[1:]:
                if isinstance(extra, Origin):
                    yield Constant(name, key, getattr(module, key), extra)
