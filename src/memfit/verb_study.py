"""`study`: from words to what it is to cover, found sound, or everything that is wrong with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit import spellings
from memfit.errors import InputError, Problem, raise_errors
from memfit.hardware import Cluster, find_gpu, parse_cluster
from memfit.job import Job, field_problems, from_text, job_from, unknown
from memfit.model.modules import Model
from memfit.plan.study import ALONE, METHODS, SPREAD, Matrix
from memfit.words import Ask, Studying, gather, job_of, planned_model, read_into

if TYPE_CHECKING:
    from memfit.truth.case import Case

AXES = (
    "task",
    "method",
    "checkpointing",
    "attention",
    "seq",
    "quant",
)  # options of a job that a study goes through itself


def matrix_of(models: Sequence[Any], given: Mapping[str, Any]) -> Matrix:
    problems: list[Problem] = []
    left = [name for name in Job.__dataclass_fields__ if name not in AXES]
    given = spellings.plain(given, (*Studying.__dataclass_fields__, *left), problems)
    how = read_into(
        Studying,
        {name: given[name] for name in given if name in Studying.__dataclass_fields__},
        problems,
    )
    rest = {
        name: value for name, value in given.items() if name not in Studying.__dataclass_fields__
    }
    problems += [
        Problem(message=f"`{name}` is varied by the study itself", where=name, hint="remove it")
        for name in AXES
        if name in rest
    ]
    job = job_of({name: value for name, value in rest.items() if name not in AXES}, problems)
    if isinstance(models, str):
        models = [models]
    built = [model for one in models for model in known_model(one, how.offline, problems)]
    clusters = [cluster for one in listed(how.gpus) for cluster in known_cluster(one, problems)]
    lengths = [number for one in listed(how.lengths) for number in length(one, problems)]
    methods = listed(how.methods)
    problems += [
        unknown("method", name, "methods", METHODS) for name in methods if name not in METHODS
    ]
    known = {name.lower(): name for name in (*SPREAD, *ALONE)}
    layouts = [name.lower() for name in listed(how.layouts)]
    problems += [
        unknown("layout", name, "layouts", tuple(known.values()))
        for name in layouts
        if name not in known
    ]
    for name, some in (
        ("model", models),
        ("gpus", how.gpus),
        ("lengths", how.lengths),
        ("methods", methods),
    ):
        if not some:
            problems.append(
                Problem(
                    message="`{}` is empty",
                    where=name,
                    hint="give at least one; separate several by commas",
                )
            )
    raise_errors(problems)
    return Matrix(
        models=built,
        clusters=clusters,
        lengths=lengths,
        methods=methods,
        layouts=[known[name] for name in layouts],
        base=job,
        precision=str(given.get("precision", "")),
    )


def listed(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def known_model(name: Any, offline: bool, problems: list[Problem]) -> list[Model]:
    """None or one."""
    model = gather(problems, lambda: None, lambda: planned_model(name, Ask(offline=offline)))
    if model is None:
        return []
    if not model.layers:
        problems.append(
            Problem(
                message=f"`{model.family}` has no formulas",
                where="model",
                hint="a study needs formulas",
            )
        )
    return [model]


def known_cluster(name: str, problems: list[Problem]) -> list[Cluster]:
    cluster = gather(problems, lambda: None, lambda: parse_cluster(name, where="gpus"))
    return [] if cluster is None else [cluster]


def length(text: str, problems: list[Problem]) -> list[int]:
    value = from_text(text, "int")
    found = [
        dataclasses.replace(one, where="lengths")
        for one in field_problems(Job.__dataclass_fields__["seq"], value)
    ]
    problems += found
    return [] if found else [int(value)]


def recorded(folder: Path) -> list[Case]:
    """Runs that `memfit measure` wrote down on a GPU, as measured cases: their live peak, and what
    was reserved."""
    from memfit.measure.compare import strategy_of
    from memfit.measure.record import records
    from memfit.truth.case import Case

    found = records(folder)
    if not found:
        raise InputError.one(
            f"`{str(folder)[:200]}` has no records",
            where="records",
            hint="`memfit measure --out FOLDER` writes them",
        )
    return [
        Case(
            id=record.case,
            source="own records",
            model=record.model,
            job=job_from(record.job),
            gpu=find_gpu(record.gpu),
            metric=metric,
            value=value,
            strategy=strategy_of(record),
        )
        for record in found.values()
        if record.result == "ok" and record.by == "cuda"
        for metric, value in (
            ("peak_allocated", record.allocated),
            ("peak_reserved", record.reserved),
        )
        if value is not None
    ]


__all__ = ["AXES", "matrix_of", "recorded"]
