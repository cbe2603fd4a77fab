"""The error tree, and `Problem`: one thing that is wrong, where, and how to mend it.

    MemfitError
    ├── InputError       what the user gave is unusable; carries every problem at once (exit code 2)
    │   └── SourceError  a model could not be had: hub, folder or file (exit code 2)
    ├── MissingExtra     the feature needs an optional dependency that is not installed (exit code
    2)
    └── TapeError        a producer wrote an illegal tape: a defect of memfit itself

"Does not fit" is no error: it is an `Estimate` with a full answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Literal, Self

from memfit.lazy_dataclass import dataclass

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One error, warning or note about the input. `where` is a dotted path into it (`job.batch`,
    `config.hidden_size`). `fix` is what was typed and what to type instead; an empty text removes
    it."""

    message: str
    where: str = ""
    hint: str = ""
    level: Level = "error"
    fix: tuple[str, str] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        text = self.message + (f" @ {self.where}" if self.where else "")
        return text + (f"\nhint: {self.hint}" if self.hint else "")


class MemfitError(Exception):
    """The base class of all exceptions that memfit raises on purpose."""


class InputError(MemfitError):
    """The input is unusable. Carries every problem at once."""

    def __init__(self, *problems: Problem) -> None:
        self.problems: tuple[Problem, ...] = problems
        super().__init__("\n".join(str(problem) for problem in problems))

    @classmethod
    def one(cls, message: str, *, where: str = "", hint: str = "") -> Self:
        return cls(Problem(message=message, where=where, hint=hint))


class SourceError(InputError):
    """The config or header of a model cannot be fetched or read."""


class MissingExtra(MemfitError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str, otherwise: str = "") -> None:
        hint = f"pip install 'memfit[{extra}]'"
        super().__init__(
            f"{what} needs the extra `{extra}`\nhint: "
            f"{f'{hint}, or {otherwise}' if otherwise else hint}"
        )


class TapeError(MemfitError):
    """A tape breaks its own rules."""


def raise_errors(problems: Iterable[Problem], kind: type[InputError] = InputError) -> None:
    """Raise one exception for all problems of level `error`, or return."""
    errors = [problem for problem in problems if problem.level == "error"]
    if errors:
        raise kind(*errors)
