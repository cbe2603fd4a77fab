"""Sizes as exact expressions of named dimensions: sums of products with rational factors, such as
`2*intermediate_size` or `batch*seq*num_experts_per_tok`."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from math import lcm, prod
from typing import TypeAlias

from memfit.errors import InputError

Dims: TypeAlias = Mapping[str, int]
Term: TypeAlias = tuple[Fraction, tuple[str, ...]]
Expression: TypeAlias = tuple[Term, ...]


@lru_cache(maxsize=1 << 14)
def expression(text: str | int) -> Expression:
    """The expression of `2*heads*head_dim + -1/2*vocab + 3`."""
    if isinstance(text, int):
        return ((Fraction(text), ()),)
    terms: list[Term] = []
    for part in text.split(" + "):
        factor, names = Fraction(1), list[str]()
        for piece in part.split("*"):
            if piece[:1] == "-" or piece[:1].isdigit():
                factor *= Fraction(piece)
            else:
                names.append(piece)
        terms.append((factor, tuple(names)))
    return tuple(terms)


def written(found: Expression) -> str | int:
    """The text of an expression; a plain number stays one."""
    if len(found) == 1 and not found[0][1] and found[0][0].denominator == 1:
        return int(found[0][0])
    return " + ".join(_term(*term) for term in found)


def _term(factor: Fraction, names: tuple[str, ...]) -> str:
    pieces = ([] if factor == 1 and names else [str(factor)]) + list(names)
    return "*".join(pieces)


@lru_cache(maxsize=1 << 14)
def whole(text: str | int) -> tuple[tuple[tuple[int, tuple[str, ...]], ...], int]:
    """The expression with whole factors, and what its sum is to be divided by."""
    terms = expression(text)
    divisor = lcm(*(factor.denominator for factor, _ in terms))
    return tuple((int(factor * divisor), names) for factor, names in terms), divisor


def evaluated(text: str | int, dims: Dims) -> int:
    """The size; not a whole number is an error, as is an unknown dimension."""
    if isinstance(text, int):
        return text
    terms, divisor = whole(text)
    total = sum([factor * prod([dims[name] for name in names]) for factor, names in terms])
    if total % divisor:
        found = Fraction(total, divisor)
        raise InputError.one(
            f"sizes of this config do not go together: `{text}` is {found}",
            where="config",
            hint="the model's own code rounds it, or refuses it: `memfit trace` runs that code",
        )
    return total // divisor


def names_in(text: str | int) -> frozenset[str]:
    """The dimensions that an expression names."""
    return frozenset(name for _, names in expression(text) for name in names)
