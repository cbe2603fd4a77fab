"""Options, jobs and layouts from values as they are written. Problems are gathered, not raised one
by one."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from memfit.errors import InputError, Problem
from memfit.job import Job, job_from
from memfit.option_values import field_problems, from_text
from memfit.strategy import ONE, Strategy
from memfit.uses import strategy_from
from memfit.words.options import Ask

if TYPE_CHECKING:  # each function imports what it needs, and no more
    from memfit.hardware import Cluster

T = TypeVar("T")


def gather(problems: list[Problem], otherwise: Callable[[], T], make: Callable[[], T]) -> T:
    """Return what `make` returns. If it raises, add its problems to `problems` and return what
    `otherwise` returns."""
    try:
        return make()
    except InputError as bad:
        problems += [problem for problem in bad.problems if problem not in problems]
        return otherwise()


def ask_from(values: Mapping[str, Any], problems: list[Problem]) -> Ask:
    """What can be read of `values`; the rest joins `problems`."""
    return read_into(Ask, values, problems)


def read_into(kind: type[T], values: Mapping[str, Any], problems: list[Problem]) -> T:
    fields = kind.__dataclass_fields__  # type: ignore[attr-defined]
    good = {}
    for name, value in values.items():
        read = from_text(value, str(fields[name].type)) if isinstance(value, str) else value
        if isinstance(value, (list, tuple)) and str(fields[name].type) == "str":
            read = " ".join(str(item) for item in value)
        if name == "memory" and isinstance(value, int) and not isinstance(value, bool):
            read = str(value)
        found = [
            dataclasses.replace(problem, where=name)
            for problem in field_problems(fields[name], read)
        ]
        problems += found
        if not found:
            good[name] = read
    return kind(**good)


def job_of(values: Mapping[str, Any], problems: list[Problem]) -> Job:
    """Build the Job. If an option is wrong, add its problems and build the Job without it, so that
    the other checks can run."""
    try:
        return job_from(values)
    except InputError as bad:
        problems += bad.problems
        blamed = {problem.where for problem in bad.problems}
    return gather(
        [],
        Job,
        lambda: job_from(
            {name: value for name, value in values.items() if f"job.{name}" not in blamed}
        ),
    )


def strategy_of(use: str, cluster: Cluster | None) -> Strategy:
    """How the work is spread; several GPUs and no word of it are replicas."""
    if not use.strip() and (cluster is None or cluster.gpus == 1):
        return ONE
    return strategy_from(use.split(), None if cluster is None else cluster.gpus)


def matches(pattern: str, text: str) -> bool:
    low = text.lower()
    return all(fnmatch.fnmatchcase(low, f"*{word}*") for word in pattern.lower().split())


def offer(close: list[str]) -> str:
    return "did you mean " + ", ".join(f"`{one}`" for one in close) + "?" if close else ""
