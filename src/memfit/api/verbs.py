"""The verbs of memfit, in one table that the command line and Python read.

An option is a field of `Job`, or of `Ask` if it is not about the work itself; flags, keys of a job
file and arguments derive from both.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit import renames, spellings, trace_fallback
from memfit.api.answer import answer, with_next_way
from memfit.api.question import Question, question
from memfit.api.scripts import launched, script
from memfit.errors import InputError, Problem, raise_errors
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.strategy import ONE, Strategy
from memfit.units import parse_seconds
from memfit.uses import strategy_from
from memfit.words.models import is_program, model_of
from memfit.words.options import Ask, Measuring, Run, options
from memfit.words.read import gather, job_of, matches, offer, read_into

if TYPE_CHECKING:  # each verb imports what it needs, and no more
    from memfit.estimate import Estimate
    from memfit.hardware import GPU, Cluster
    from memfit.measure.record import Case, Record
    from memfit.model.catalog import Entry
    from memfit.model.model import Model
    from memfit.plan.study import Study
    from memfit.tape import Tape
    from memfit.trace.launch import Progress

ADAPTED = ("lora", "qlora")  # methods with a rank of their own


@dataclass(frozen=True, kw_only=True)
class Verb:
    name: str
    help: str


def estimate(
    model: str | os.PathLike[str] | Mapping[str, Any] | Model = "",
    /,
    *,
    progress: Progress | None = None,
    **given: Any,
) -> Estimate:
    """Predict the memory and time of a job. `model` is a name, a path, a parsed config, a built
    `Model` or a job file (`*.yaml`), whose values the arguments override. Options are the fields of
    `Ask` and `Job`. One `InputError` carries all problems. `progress` is called during a trace."""
    from memfit.lower.walk_cache import remembering

    asked = question(model, given, [])
    with remembering():
        return with_next_way(answer(asked, progress=progress), asked)


def compare(
    model: Any, /, variants: Sequence[Mapping[str, Any]], **common: Any
) -> tuple[Estimate, ...]:
    """Estimate several variants of a job. Every variant overrides the options in `common`, and with
    `model` the model. One `InputError` carries the problems of all variants."""
    problems: list[Problem] = []
    asked: list[Question] = []
    for number, variant in enumerate(variants, 1):
        try:
            given = {**common, **variant}
            asked.append(question(given.pop("model", model), given, []))
        except InputError as bad:
            problems += [
                dataclasses.replace(one, where=f"variant {number}: {one.where}")
                for one in bad.problems
            ]
    raise_errors(problems)
    return tuple(answer(one) for one in asked)


def trace(
    subject: str | os.PathLike[str] | Mapping[str, Any] | Model = "",
    /,
    *arguments: str,
    progress: Progress | None = None,
    **given: Any,
) -> Estimate:
    """Run a model's real code, or an unmodified script (`*.py`) with its arguments, without a GPU
    in a separate process, and predict its memory. Options are the fields of `Run` and those of
    `estimate`. A script takes only `gpu`, `memory`, `offline` and `alloc_conf`, because the script
    defines the job."""
    problems: list[Problem] = []
    given = {name: value for name, value in given.items() if value is not None}
    run = read_into(
        Run, {name: given.pop(name) for name in Run.__dataclass_fields__ if name in given}, problems
    )
    if isinstance(subject, (str, os.PathLike)) and is_program(os.fspath(subject)):
        return script(os.fspath(subject), arguments, run, given, problems, progress)
    if arguments:
        listed = ", ".join(f"`{one[:40]}`" for one in arguments[:4])
        problems.append(
            Problem(
                message=f"unexpected arguments after the model: {listed}",
                where="arguments",
                hint="only a script (`*.py`) takes arguments",
            )
        )
    asked = question(subject, {**given, "by": "trace"}, problems)
    notes: list[Problem] = []

    def producer(model: Model, job: Job, strategy: Strategy, cluster: Cluster | None) -> Tape:
        from memfit.trace.launch import request_of

        found = launched(
            request_of(model, job, strategy, None), cluster, run, asked.ask.offline, progress
        )
        notes.extend(found.notes)
        return found.tape

    found = answer(asked, producer)
    return dataclasses.replace(found, problems=(*found.problems, *notes))


def models(pattern: str = "") -> tuple[Entry, ...]:
    """List the bundled models whose name or type contains every word of `pattern`; `*` matches
    anything."""
    from memfit.model import catalog

    entries = tuple(
        entry for entry in catalog.entries() if matches(pattern, f"{entry.name} {entry.model_type}")
    )
    if not entries:
        close = catalog.nearest(pattern)
        raise InputError.one(
            f"no model of the catalog matches `{pattern[:80]}`",
            where="pattern",
            hint=offer(close) or "`memfit models` lists all",
        )
    return entries


def gpus(pattern: str = "") -> tuple[GPU, ...]:
    """List the known GPUs whose name contains every word of `pattern`; `*` matches anything."""
    from memfit.hardware import all_gpus, own_gpus
    from memfit.hardware.vendors import refusal
    from memfit.registry import nearest

    if pattern and (unsupported := refusal(pattern, "pattern")):
        raise InputError(unsupported)
    known = (*own_gpus().values(), *all_gpus())
    found = tuple(
        gpu
        for gpu in known
        if matches(pattern, " ".join((gpu.id, gpu.name, gpu.vendor, gpu.arch or "", *gpu.aliases)))
    )
    if not found:
        close = offer(nearest(pattern, (gpu.id for gpu in known)))
        raise InputError.one(
            f"no GPU matches `{pattern[:80]}`",
            where="pattern",
            hint=close or "`memfit gpus` lists all",
        )
    return found


def measure(
    model: Any = "", *, campaign: str = "", only: str = "", told: Any = None, **given: Any
) -> list[Record]:
    """Run a few real steps of a job, or the cases of a campaign until its budget is spent. Options
    are the fields of `Measuring` and `Job`. Running out of memory is a result, not an error."""
    from memfit.measure import campaign as campaigns
    from memfit.measure.record import Case
    from memfit.measure.run import measure as one

    problems: list[Problem] = []
    values = {name: value for name, value in given.items() if value is not None}
    known = (*Measuring.__dataclass_fields__, *Job.__dataclass_fields__)
    values = spellings.plain(values, known, problems)
    spread = bool({"use", "world"} & values.keys()) and values.get("method") not in ADAPTED
    for old in renames.OPTIONS if spread else ():
        if old.command == "measure" and old.old in values and old.new not in values:
            renames.warn(old)
            values[old.new] = values.pop(old.old)
    how = read_into(
        Measuring,
        {name: values.pop(name) for name in Measuring.__dataclass_fields__ if name in values},
        problems,
    )
    budget = gather(problems, lambda: 0.0, lambda: parse_seconds(how.budget, "budget"))
    if campaign:
        problems += [
            Problem(message=f"`{name}` is set by the campaign's file", where=name)
            for name in values
        ]
        nothing: list[Case] = []
        todo = gather(problems, lambda: nothing, lambda: planned(campaign, only))
        raise_errors(problems)
        folder = Path(how.out or "records")
        return campaigns.run(
            todo,
            folder,
            budget=budget,
            limit=how.case_limit,
            told=told or (lambda case, record: None),
        )
    job = job_of(values, problems)
    source, built = gather(
        problems, lambda: (None, None), lambda: model_of(model, Ask(by="trace", offline=True))
    )
    layout = measured_layout(how, problems)
    raise_errors(problems)
    assert built is not None
    if "seq" not in values:
        job = trace_fallback.within_positions(job, built.config)
    name = source.name if source is not None else built.name
    case = Case(
        model=name or "model",
        config=dict(built.config),
        job=job,
        steps=how.measured_steps,
        use=layout,
        rank=how.process,
        history=how.history,
        engine=how.engine,
    )
    return [one(case, Path(how.out) if how.out else None, limit=how.case_limit)]


def measured_layout(how: Measuring, problems: list[Problem]) -> tuple[str, ...]:
    """The layout of a measurement, of which the process has to be one."""
    layout = tuple(how.use.split()) or (
        (f"fsdp={how.world},param_dtype=bf16,reduce_dtype=fp32",) if how.world > 1 else ()
    )
    if how.use and how.world > 1:
        message = "`--world` and `--use` both set the layout"
        problems.append(Problem(message=message, where="world", hint="one of them"))
    strategy = gather(problems, lambda: ONE, lambda: strategy_from(layout, None) if layout else ONE)
    if how.process >= strategy.ranks:
        count = f"{strategy.ranks} process" + ("es" if strategy.ranks > 1 else "")
        message = f"process {how.process} does not exist: the layout has {count}"
        problems.append(Problem(message=message, where="process", hint="processes start at 0"))
    return layout


def study(
    models: Any,
    /,
    *,
    progress: Callable[[int, int, str], None] | None = None,
    **given: Any,
) -> Study:
    """Ways to fine-tune a model, or several, on machines: what each needs and takes, and what to
    begin with. Options are the fields of `Studying`, and of `Job` those that a study does not go
    through itself."""
    from memfit.api.study import matrix_of
    from memfit.plan.study import study as run

    return run(
        matrix_of(models, {name: value for name, value in given.items() if value is not None}),
        progress or (lambda *told: None),
    )


def planned(campaign: str, only: str = "") -> list[Case]:
    """The cases of a campaign's file, the most valuable first."""
    from memfit.measure.campaign import read

    def config(name: str) -> Mapping[str, Any]:
        _, model = model_of(name, Ask(by="trace", offline=True))
        return model.config

    return [case for case in read(Path(campaign), cache(config)) if only in case.name]


VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb(
            name="estimate",
            help="predict the GPU memory of a job, and whether it fits",
        ),
        Verb(
            name="card",
            help="show what a GPU can do with a model: inference and fine-tuning",
        ),
        Verb(name="compare", help="compare variants of a job side by side"),
        Verb(
            name="study",
            help="compare ways to fine-tune, and recommend one",
        ),
        Verb(
            name="plan",
            help="find the best configuration for a model and GPUs",
        ),
        Verb(
            name="trace",
            help="run the model's real code, or your script, without a GPU",
        ),
        Verb(
            name="measure",
            help="run a few real steps and record their memory and time",
        ),
        Verb(name="models", help="list the bundled models"),
        Verb(name="gpus", help="list the known GPUs"),
        Verb(
            name="accuracy",
            help="compare predictions with published measurements",
        ),
        Verb(
            name="report",
            help="write an estimate and your measurement to a file for an issue",
        ),
        Verb(
            name="cache",
            help="show or clear finished traces and cards on disk",
        ),
        Verb(
            name="capture",
            help="capture the layer graphs of a model family",
        ),
        Verb(
            name="new-family",
            help="make the row and the graphs of a model type",
        ),
    )
}


__all__ = [
    "VERBS",
    "Ask",
    "Verb",
    "compare",
    "estimate",
    "gpus",
    "measure",
    "models",
    "options",
    "planned",
    "study",
    "trace",
]
