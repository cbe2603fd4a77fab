"""One name, one thing: a table that refuses unknown names and offers the nearest known one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from memfit.errors import InputError, Problem

T = TypeVar("T")
ALIKE = 0.6  # similarity from which a name is close enough to be offered


def nearest(name: str, known: Iterable[str], count: int = 3, *, cutoff: float = 0.5) -> list[str]:
    """The known names most like `name`, best first; case and separators do not count. `cutoff`: the
    least similarity, from 0 to 1."""

    def plain(text: str) -> str:
        return "".join(letter for letter in text.lower() if letter.isalnum())

    by_plain: dict[str, str] = {}
    for candidate in known:
        by_plain.setdefault(plain(candidate), candidate)
    wanted = plain(name[:200])
    import difflib  # on no way of an answer

    close = difflib.get_close_matches(wanted, by_plain, n=count, cutoff=cutoff)
    inside = [key for key in by_plain if wanted and wanted in key and key not in close]
    return [by_plain[key] for key in (close + sorted(inside, key=len))[:count]]


class Registry(Mapping[str, T], Generic[T]):
    """A mapping from canonical names to things; aliases lead to the same thing."""

    def __init__(self, kind: str, *, where: str = "") -> None:
        self.kind, self.where = kind, where or kind
        self._things: dict[str, T] = {}
        self._aliases: dict[str, str] = {}

    def add(self, name: str, thing: T, *aliases: str) -> T:
        for key in (name, *aliases):
            if key.lower() in self._aliases:
                raise ValueError(f"{self.kind} `{key}` is registered twice")
            self._aliases[key.lower()] = name
        self._things[name] = thing
        return thing

    def register(self, name: str, *aliases: str) -> Callable[[T], T]:
        """Decorator: `@FAMILIES.register("llama")`."""
        return lambda thing: self.add(name, thing, *aliases)

    def find(self, name: str, *, where: str = "", hint: str = "") -> T:
        """The thing called `name`, or an `InputError` that offers the nearest names."""
        key = self._aliases.get(name.lower())
        if key is not None:
            return self._things[key]
        close = nearest(name, self._aliases)
        offer = "did you mean " + ", ".join(f"`{one}`" for one in close) + "?" if close else ""
        known = f"one of {', '.join(list(self)[:12])}"
        raise InputError(
            Problem(
                message=f"unknown {self.kind} `{name[:80]}`",
                where=where or self.where,
                hint=" ".join(filter(None, (offer, hint))) or known,
                fix=(name, close[0]) if close else None,
            )
        )

    def __getitem__(self, name: str) -> T:
        return self._things[self._aliases[name.lower()]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def __len__(self) -> int:
        return len(self._things)
