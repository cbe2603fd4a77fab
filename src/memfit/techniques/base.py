"""What a technique is: when it is wanted, what is wrong with wanting it, and how it marks the
Program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from memfit.errors import Problem
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.optimizers import OPTIMIZERS
from memfit.program import Program, placed
from memfit.strategy import Strategy

# of problems that the formulas alone have
TRACE = "`--by trace` runs the real code instead (extra `trace`)"


def no_problem(program: Program) -> Iterator[Problem]:
    return iter(())


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """A module whose `overlay(programs, program)` replaces code of the model's pieces; a lower
    `order` goes first."""

    module: str
    applies: Callable[[Program], bool]
    order: int = 50


@dataclass(frozen=True, kw_only=True)
class Engines:
    """The code around a model whose data a layout spreads: modules by the name of their `ENGINE`.
    `choose` picks a name; of several layouts the one of the lowest `precedence` does."""

    modules: Mapping[str, str]
    choose: Callable[[Strategy], str]
    precedence: int = 0


@dataclass(frozen=True, kw_only=True)
class Technique:
    """`check` yields what `apply` could not do right."""

    name: str
    order: int  # a lower one marks the Program first
    cite: str
    apply: Callable[[Program], Program]
    wanted: Callable[[Job], bool] = lambda job: False
    check: Callable[[Program], Iterator[Problem]] = no_problem
    layout: str = ""  # the field of Strategy that asks for it, if one does
    overlays: tuple[Overlay, ...] = ()
    engines: Engines | None = None

    def serves(self, program: Program) -> bool:
        if self.layout:
            return program.strategy.engages(self.layout)
        return self.wanted(program.job)


def names(text: str) -> tuple[str, ...]:
    """`a, b` as names."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def flattened(job: Job) -> Iterator[Problem]:
    """Optimizers that cannot step what lies flat (galore-torch 1.0 galore_projector.py,
    apollo-torch 1.0.3 random_projector.py: `shape[1]`)."""
    if job.training and OPTIMIZERS[job.optimizer].low_rank:
        message = (
            f"`{job.optimizer}` needs two-dimensional gradients, but sharded parameters are flat"
        )
        yield Problem(message=message, where="job.optimizer", hint="use another `--optimizer`")


def numbered(program: Program, parts: tuple[str, ...]) -> Program:
    """Parts of names with a number may mean some layers and not others, so that none stands for its
    neighbours then."""
    if any(sign.isdigit() for part in parts for sign in part) and any(
        entry.times > 1 for entry in program.entries
    ):
        return program.replace(entries=placed(program.model.layers, False))
    return program
