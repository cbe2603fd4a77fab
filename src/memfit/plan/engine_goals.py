"""The goals and results of a plan for a serving engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.errors import Problem
from memfit.hardware import Cluster
from memfit.lazy_dataclass import dataclass
from memfit.presentation import Presented
from memfit.serving.base import Subject
from memfit.serving.planned import PlannedEngine
from memfit.serving.result import ServingAnswer


@dataclass(frozen=True, kw_only=True)
class Load:
    """`users` at once, each with `prompt` tokens in and `output` out; 0: not said. `first` and
    `token`: seconds that the first token and each other one may take; 0: any."""

    users: int = 0
    prompt: int = 0
    output: int = 0
    first: float = 0.0
    token: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of one request."""
        return self.prompt + self.output

    @property
    def given(self) -> bool:
        """Whether anything is said of it."""
        return bool(self.users or self.length or self.first or self.token)


def users_fit(count: int) -> str:
    """`1 user fits`, `2 users fit`."""
    return "1 user fits" if count == 1 else f"{count:,} users fit"


@dataclass(frozen=True, kw_only=True)
class EngineQuestion:
    """A model, an engine and its version, what the user fixed of its options, and the load."""

    planned: PlannedEngine
    subject: Subject
    load: Load
    fixed: Mapping[str, Any]
    version: str = ""
    top: int = 5


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds to the first token and of each other one, prompts of others between them included;
    tokens per second of all users on all GPUs."""

    first: float
    token: float
    tokens_per_second: float
    measured: bool  # the rates are this GPU's own


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """One configuration: `replicas` copies of the model on `tensor` GPUs each."""

    weights: str
    cache: str
    tensor: int
    replicas: int
    users: int  # that fit on all GPUs at once
    length: int  # tokens of each of their requests
    answer: ServingAnswer
    options: Mapping[str, Any]
    command: str
    speed: Speed | None = None
    dollars: float | None = None  # of a million output tokens
    missed: tuple[str, ...] = ()  # goals, in words

    @property
    def fits(self) -> bool:
        return not self.missed


@dataclass(frozen=True, kw_only=True)
class Grid:
    """GiB on the fullest GPU by tokens of a request and users of one replica, and the most users
    that fit for each length."""

    lengths: tuple[int, ...]
    users: tuple[int, ...]
    cells: tuple[tuple[int, ...], ...]  # bytes: a row for each length
    most: tuple[int, ...]
    limit: int  # bytes on the GPU that the engine may use


@dataclass(frozen=True, kw_only=True, repr=False)
class EnginePlan(Presented):
    """Rows in the order of the plan; `close` is what comes nearest where none fits."""

    question: EngineQuestion
    cluster: Cluster
    rows: tuple[EngineRow, ...]
    close: tuple[EngineRow, ...] = ()
    grid: Grid | None = None
    dollars: float | None = None  # of an hour of one GPU
    price_note: str = ""
    market: bool = False  # the cheapest machine was looked for
    passed: tuple[str, ...] = ()  # cheaper machines, each with its reason
    problems: tuple[Problem, ...] = ()

    @property
    def fits(self) -> bool:
        return bool(self.rows)


__all__ = ["EnginePlan", "EngineQuestion", "EngineRow", "Grid", "Load", "Speed", "users_fit"]
