"""`study`: from words to what it is to cover, found sound, or everything that is wrong with it."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit import spellings
from memfit.defaults import assumed, assumed_for_methods, without_ligers_loss
from memfit.errors import InputError, Problem, raise_errors
from memfit.hardware import Cluster, find_gpu, parse_cluster
from memfit.job import ATTENTIONS, Job, job_from
from memfit.job import CHECKPOINTING as CHECKPOINTED
from memfit.model.heads import with_head
from memfit.model.model import Model
from memfit.option_values import field_problems, from_text, unknown
from memfit.plan.study import ALONE, METHODS, SPREAD, Matrix
from memfit.strategy import LAYOUTS, ONE
from memfit.uses import strategy_from
from memfit.words.models import planned_model
from memfit.words.options import Ask, Studying
from memfit.words.read import gather, job_of, read_into

if TYPE_CHECKING:
    from memfit.truth.case import Case

VARIED = {"checkpointing": CHECKPOINTED, "attention": ATTENTIONS}  # options with several values
AXES = ("task", "method", "seq", "quant")  # options of a job that a study goes through itself


def matrix_of(models: Any, given: Mapping[str, Any]) -> Matrix:
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
    named = {name: value for name, value in rest.items() if name not in AXES}
    if isinstance(models, (str, os.PathLike, Mapping)):
        models = [models]
    built = [model for one in models for model in known_model(one, how.offline, problems)]
    clusters = [cluster for one in listed(how.gpus) for cluster in known_cluster(one, problems)]
    texts = how.lengths if "lengths" in given else usual_length(built, named, how.lengths)
    lengths = [number for one in listed(texts) for number in length(one, problems)]
    methods = chosen("methods", how.methods, METHODS, problems)
    varied = {
        name: chosen(name, getattr(how, name), values, problems) for name, values in VARIED.items()
    }
    layouts = layouts_of(how, clusters, problems)
    filled = {"model": models, "gpus": how.gpus, "lengths": how.lengths, "methods": methods}
    problems += [
        Problem(
            message="no model is given" if name == "model" else f"`{name}` is empty",
            where=name,
            hint="give at least one; separate several by "
            + ("spaces" if name == "model" else "commas"),
        )
        for name, some in {**filled, **varied}.items()
        if not some
    ]
    usual = usual_options(named, methods, built, clusters, how.use)
    named = without_ligers_loss(named, str({**usual, **named}.get("framework", "")))
    job = job_of({**usual, **named}, problems)
    raise_errors(problems)
    return Matrix(
        models=[with_head(model, job.head, job.labels) for model in built],
        clusters=clusters,
        lengths=lengths,
        methods=methods,
        layouts=layouts,
        base=job,
        precision=str(given.get("precision", "")),
        assumed=usual,
        **varied,
    )


def usual_length(models: Sequence[Model], named: Mapping[str, Any], otherwise: str) -> str:
    """The length that all of the models are studied at where none is named: what their trainer cuts
    texts to, as far as each has positions."""
    found = [
        min(
            int(assumed(named, model.config, frozenset(), "bf16").get("seq", otherwise)),
            model.positions or int(otherwise),
        )
        for model in models
    ]
    return str(min(found)) if found else otherwise


def usual_options(
    named: Mapping[str, Any],
    methods: Sequence[str],
    models: Sequence[Model],
    clusters: Sequence[Cluster],
    use: str,
) -> dict[str, Any]:
    """The trainer's defaults that nobody named and that no way of the study changes; none where it
    does not train all of the models."""
    layouts = frozenset({"zero", *re.findall(r"[a-z]+", use.partition(",")[0])})
    half = clusters[0].gpu.half if clusters else "bf16"
    found = [
        assumed_for_methods(named, methods, (model.config, layouts, half))[0] for model in models
    ]
    if not found or any(one.get("framework") != found[0].get("framework") for one in found):
        return {}
    varied = (*AXES, *VARIED, "precision")
    return {name: value for name, value in found[0].items() if name not in varied}


def layouts_of(how: Studying, clusters: Sequence[Cluster], problems: list[Problem]) -> list[str]:
    """The layouts that are compared: names of the table, or one as `--use` takes it."""
    known = {name.lower(): name for name in (*SPREAD, *ALONE)}
    names = [name.lower() for name in listed(how.layouts)]
    problems += [
        one_layout(name)
        if name.partition("=")[0] in LAYOUTS
        else unknown("layout", name, "layouts", tuple(known.values()))
        for name in names
        if name not in known
    ]
    for cluster in clusters if names and not how.use else ():
        fitting = {name.lower() for name in (SPREAD if cluster.gpus > 1 else ALONE)}
        if not fitting & set(names) and set(names) <= set(known):
            machine = "several GPUs" if cluster.gpus > 1 else "one GPU"
            message = f"`{how.layouts}` has no layout for {machine} ({cluster.gpu.name})"
            known_here = SPREAD if cluster.gpus > 1 else ALONE
            hint = "use " + ", ".join(f"`{name}`" for name in known_here)
            problems.append(Problem(message=message, where="layouts", hint=hint))
    for cluster in clusters if how.use else ():
        gather(problems, lambda: ONE, partial(strategy_from, how.use.split(), cluster.gpus))
    if how.use and names:
        message = "`layouts` and `use` both choose the layouts"
        problems.append(Problem(message=message, where="use", hint="remove one of them"))
    return [how.use] if how.use else [known[name] for name in names if name in known]


def one_layout(name: str) -> Problem:
    return Problem(
        message=f"`{name}` is not one of the layouts that a study compares",
        where="layouts",
        hint=f"use `--use {name}` to study this layout alone",
    )


def chosen(name: str, text: str, known: Sequence[str], problems: list[Problem]) -> list[str]:
    found = listed(text)
    problems += [unknown(name, one, name, tuple(known)) for one in found if one not in known]
    return found


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
    if found and not text[:1].isdigit():
        dataset = f"`memfit estimate --lengths {text[:60]}` takes a dataset"
        hint = f"a study compares fixed lengths; {dataset}"
        found = [dataclasses.replace(one, hint=hint) for one in found]
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
