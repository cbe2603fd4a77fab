"""What a technique is: when it is wanted, what is wrong with wanting it, and how it marks the Program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memfit.errors import Problem
from memfit.job import Job
from memfit.program import Program


def no_problem(program: Program) -> Iterator[Problem]:
    return iter(())


@dataclass(frozen=True, kw_only=True)
class Technique:
    """`check` yields what `apply` could not do right."""

    name: str
    cite: str
    wanted: Callable[[Job], bool]
    apply: Callable[[Program], Program]
    check: Callable[[Program], Iterator[Problem]] = no_problem


def names(text: str) -> tuple[str, ...]:
    """`a, b` as names."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
