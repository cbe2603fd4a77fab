"""Tables from a style to the function that runs it. A model has one or two of some fifty styles, so
that the module of a style is loaded when a model first asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any


class Styles(Mapping[str, Callable[..., Any]]):
    """`places` name a module of `package` and its function, or its table of functions by style:
    `gpt_neo.gptj`, `llama.STYLES`."""

    def __init__(self, package: str, places: Mapping[str, str]) -> None:
        self.package, self.places = package, places
        self.loaded: dict[str, Callable[..., Any]] = {}

    def __getitem__(self, style: str) -> Callable[..., Any]:
        if style not in self.loaded:
            module, _, name = self.places[style].partition(".")
            found = getattr(import_module(f"{self.package}.{module}"), name)
            self.loaded[style] = found[style] if isinstance(found, Mapping) else found
        return self.loaded[style]

    def __contains__(self, style: object) -> bool:
        return style in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


__all__ = ["Styles"]
