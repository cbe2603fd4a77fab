"""A size seen under several sets of dimensions, written as the one exact expression that gives all
of them. What no expression of the searched form gives is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations_with_replacement
from math import prod

from memfit.graph.dims import Dims, Term, evaluated, written

FACTORS = tuple(
    Fraction(one) for one in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, "1/2", "1/4", "1/8", "1/3", "3/2", -1)
)
LARGEST = 4  # names in one product


class Unsolved(Exception):
    """No exact expression gives these sizes."""


class Solver:
    """Finds expressions for sizes seen in runs with these dimensions, one mapping a run. `small`:
    dimensions that are added or subtracted as they are (a kernel's width, a chunk)."""

    def __init__(self, runs: Sequence[Dims]) -> None:
        self.runs = tuple(runs)
        self.known: dict[tuple[int, ...], str | int] = {}
        self.names = tuple(name for name in self.runs[0] if self._varied(name))
        self.constant_names = tuple(name for name in self.runs[0] if not self._varied(name))
        self.products: dict[tuple[Fraction, ...], list[Term]] = {}
        for names in self._monomials():
            values = [prod(run[name] for name in names) for run in self.runs]
            for factor in FACTORS:
                key = tuple(factor * value for value in values)
                self.products.setdefault(key, []).append((factor, names))

    def check(self) -> None:
        """Two dimensions that no run tells apart would be taken for each other."""
        known: dict[tuple[int, ...], str] = {}
        for name in self.names:
            values = tuple(run[name] for run in self.runs)
            if values in known:
                raise Unsolved(f"`{name}` and `{known[values]}` are alike in every run")
            known[values] = name

    def _varied(self, name: str) -> bool:
        return len({run[name] for run in self.runs}) > 1

    def _monomials(self) -> Iterator[tuple[str, ...]]:
        for count in range(1, LARGEST + 1):
            for names in combinations_with_replacement(self.names, count):
                if all(names.count(name) <= 2 for name in set(names)):
                    yield names

    def solved(self, sizes: Sequence[int]) -> str | int:
        """The expression of one size over all runs."""
        key = tuple(sizes)
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self._search(key)
            assert all(
                evaluated(found, run) == size for run, size in zip(self.runs, key, strict=True)
            )
        return found

    def _search(self, sizes: tuple[int, ...]) -> str | int:
        if len(set(sizes)) == 1:
            return sizes[0]
        product = self._product(tuple(map(Fraction, sizes)))
        if product is not None:
            return written((product,))
        for constant in (*range(-8, 9), 64, -64, 128, -128):
            rest = tuple(Fraction(size - constant) for size in sizes)
            if (found := self._product(rest)) is not None:
                return written((found, (Fraction(constant), ())))
        for first in self._short():
            rest = tuple(
                size - value for size, value in zip(sizes, self._values(first), strict=True)
            )
            if len(set(rest)) == 1:
                return written((first, (rest[0], ())))
            if (found := self._product(rest)) is not None:
                return written(self._sorted(first, found))
        for first in self._short():
            left = tuple(
                size - value for size, value in zip(sizes, self._values(first), strict=True)
            )
            for second in self._short():
                rest = tuple(
                    size - value for size, value in zip(left, self._values(second), strict=True)
                )
                if (found := self._product(rest)) is not None:
                    return written(self._sorted(first, second, found))
        raise Unsolved(f"no exact expression gives {list(sizes)}")

    def _product(self, sizes: tuple[Fraction, ...]) -> Term | None:
        """The one product that gives these sizes; a plain one goes before one with a factor."""
        found = self.products.get(sizes, [])
        plain = [one for one in found if one[0] == 1] or found
        shortest = min((len(names) for _, names in plain), default=0)
        plain = [one for one in plain if len(one[1]) == shortest]
        if len(plain) > 1:
            texts = " or ".join(f"`{written((one,))}`" for one in plain[:3])
            raise Unsolved(f"{[int(one) for one in sizes]} may be {texts}")
        return plain[0] if plain else None

    def _short(self) -> Iterator[Term]:
        """Products of one or two names with a small factor, for sums of products."""
        for names in self._monomials():
            if len(names) > 2:
                return
            for factor in FACTORS[:4]:
                yield factor, names

    def _values(self, term: Term) -> list[Fraction]:
        return [term[0] * prod(run[name] for name in term[1]) for run in self.runs]

    def _sorted(
        self, *terms: Term
    ) -> tuple[Term, ...]:
        return tuple(sorted(terms, key=lambda term: (term[1], term[0])))
