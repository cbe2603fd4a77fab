"""What a search asks for more than once, kept while it runs: a quick answer walks what the precise
one of the same candidate replays."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
EVENTS = 1_000_000  # kept at most: some 150 MB


class Recent:
    """The last ones found, of at most so many events together."""

    def __init__(self, events: int = EVENTS) -> None:
        self.events, self.total = events, 0
        self.found: dict[Hashable, tuple[Any, int, tuple[object, ...]]] = {}

    def take(
        self,
        same: tuple[object, ...],
        key: Hashable,
        make: Callable[[], T],
        weigh: Callable[[T], int],
    ) -> T:
        """`same`: objects that are meant themselves, whatever equals them. They are held, so that
        no others get their numbers."""
        whole = tuple(map(id, same)), key
        known = self.found.pop(whole, None)
        if known is None:
            made = make()
            known = made, weigh(made), same
            self.total += known[1]
        self.found[whole] = known  # behind all others
        while self.total > self.events and len(self.found) > 1:
            self.total -= self.found.pop(next(iter(self.found)))[1]
        found: T = known[0]
        return found


_RECENT: ContextVar[Recent | None] = ContextVar("recent", default=None)


@contextmanager
def remembering() -> Iterator[None]:
    """Within, what was found last is not looked for again."""
    token = _RECENT.set(_RECENT.get() or Recent())
    try:
        yield
    finally:
        _RECENT.reset(token)


def once(
    same: tuple[object, ...], key: Hashable, make: Callable[[], T], weigh: Callable[[T], int]
) -> T:
    """What `make` finds, or found before (see `Recent.take`)."""
    recent = _RECENT.get()
    return make() if recent is None else recent.take(same, key, make, weigh)


__all__ = ["Recent", "once", "remembering"]
