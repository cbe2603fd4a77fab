"""A size seen under several sets of dimensions, written as the one exact expression that gives all
of them. What no expression of the searched form gives is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from itertools import combinations, combinations_with_replacement
from math import prod

from memfit.graph.dims import Dims, Term, evaluated, expression, written

FACTORS = tuple(
    Fraction(one)
    for one in (
        *(1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64, 128, 256, 4096),
        *("1/2", "1/4", "1/8", "1/32", "1/64", "1/3", "1/6", "3/2", -1),
    )
)
SCALE = 192  # makes every factor a whole number
LARGEST = 4  # names in one product
CONSTANTS = (*range(-8, 9), 64, -64, 128, -128)
Sizes = tuple[int, ...]


class Unsolved(Exception):
    """No exact expression gives these sizes."""


class Solver:
    """Finds expressions for sizes seen in runs with these dimensions, one mapping a run. Those that
    follow from others are named where nothing else will do."""

    def __init__(self, runs: Sequence[Dims], following: Collection[str] = ()) -> None:
        self.runs = tuple(runs)
        self.following = frozenset(following)
        self.known: dict[Sizes, str | int | None] = {}
        self.names = tuple(name for name in self.runs[0] if self._varied(name))
        self.constant_names = tuple(name for name in self.runs[0] if not self._varied(name))
        self.products: dict[Sizes, list[Term]] = {}
        for names in self._monomials(LARGEST):
            values = [prod(run[name] for name in names) for run in self.runs]
            for factor in FACTORS:
                scaled = int(factor * SCALE)
                key = tuple(scaled * value for value in values)
                self.products.setdefault(key, []).append((factor, names))
        self.short = [
            (term, self._values(term))
            for names in self._monomials(2)
            for factor in FACTORS[:2]
            for term in [(factor, names)]
        ]

    def check(self) -> None:
        """Two dimensions that no run tells apart would be taken for each other."""
        known: dict[Sizes, str] = {}
        for name in self.names:
            values = tuple(run[name] for run in self.runs)
            if values in known:
                raise Unsolved(f"`{name}` and `{known[values]}` are alike in every run")
            known[values] = name

    def _varied(self, name: str) -> bool:
        return len({run[name] for run in self.runs}) > 1

    def _monomials(self, largest: int) -> Iterator[tuple[str, ...]]:
        for count in range(1, largest + 1):
            for names in combinations_with_replacement(self.names, count):
                if all(names.count(name) <= 2 for name in set(names)):
                    yield names

    def solved(self, sizes: Sequence[int]) -> str | int:
        """The expression of one size over all runs."""
        key = tuple(sizes)
        if key not in self.known:
            self.known[key] = self._search(key)
        found = self.known[key]
        if found is None:
            raise Unsolved(f"no exact expression gives {list(key)}")
        assert all(evaluated(found, run) == size for run, size in zip(self.runs, key, strict=True))
        return found

    def _search(self, sizes: Sizes) -> str | int | None:
        if len(set(sizes)) == 1:
            return sizes[0]
        product = self._product(sizes)
        if product is not None:
            return written((product,))
        for constant in CONSTANTS:
            found = self._product(tuple(size - constant for size in sizes))
            if found is not None:
                return written((found, (Fraction(constant), ())))
        return self._sum(sizes) or self._divided(sizes) or self._three(sizes)

    def _sum(self, sizes: Sizes) -> str | int | None:
        """Of two products, of which one has at most two names. Sums of more would fit anything."""
        for first, values in self.short:
            found = self._product(
                tuple(size - value for size, value in zip(sizes, values, strict=True))
            )
            if found is not None:
                return written(_sorted(first, found))
        return None

    def _three(self, sizes: Sizes) -> str | int | None:
        """Of three plain dimensions, as of embeddings that are put side by side; the only such."""
        found = [
            names
            for names in combinations(self.names, 3)
            if all(
                sum(run[name] for name in names) == size
                for run, size in zip(self.runs, sizes, strict=True)
            )
        ]
        if len(found) != 1:
            return None
        return written(_sorted(*((Fraction(1), (name,)) for name in found[0])))

    def _divided(self, sizes: Sizes) -> str | int | None:
        """A dimension times a sum."""
        for name in self.names:
            parts = [divmod(size, run[name]) for size, run in zip(sizes, self.runs, strict=True)]
            if any(left for _, left in parts) or min(size for size, _ in parts) < 2:
                continue
            try:
                inner = self.solved([size for size, _ in parts])
            except Unsolved:
                continue
            return written(tuple((factor, (*names, name)) for factor, names in expression(inner)))
        return None

    def _product(self, sizes: Sizes) -> Term | None:
        """The one product that gives these sizes; a plain one goes before one with a factor."""
        found = self.products.get(tuple(SCALE * size for size in sizes))
        if found is None:
            return None
        plain = [one for one in found if one[0] == 1] or found
        shortest = min(len(names) for _, names in plain)
        plain = [one for one in plain if len(one[1]) == shortest]
        plain = [one for one in plain if not self.following & {*one[1]}] or plain
        if len(plain) > 1:
            texts = " or ".join(f"`{written((one,))}`" for one in plain[:3])
            raise Unsolved(f"{list(sizes)} may be {texts}")
        return plain[0]

    def _values(self, term: Term) -> Sizes:
        return tuple(int(term[0]) * prod(run[name] for name in term[1]) for run in self.runs)


def _sorted(*terms: Term) -> tuple[Term, ...]:
    return tuple(sorted(terms, key=lambda term: (term[1], term[0])))
