"""The verbs of memfit, in one table that the command line and Python read.

An option is a field of `Job`, or of `Ask` if it is not about the work itself; flags, keys of a job
file and arguments derive from both.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit import renames, spellings, trace_fallback
from memfit.api.run import command_job, paid_by_run, run_flags, run_of, with_run, worst_job
from memfit.api.scripts import launched, script
from memfit.api.serving import shared_by_default
from memfit.defaults import TRAINERS, assumed, implied_method, without_ligers_loss
from memfit.errors import InputError, Problem, raise_errors
from memfit.job import Job, unknown
from memfit.lazy_dataclass import dataclass
from memfit.model.heads import with_head
from memfit.strategy import ONE, Strategy
from memfit.units import parse_seconds
from memfit.uses import strategy_from
from memfit.words.gpus import cluster_of, gpu_notes
from memfit.words.job_files import given_values
from memfit.words.models import compared, is_program, model_of, producer_of, traced, unbuilt
from memfit.words.options import Ask, Measuring, Run, options
from memfit.words.read import ask_from, gather, job_of, matches, offer, read_into, strategy_of

if TYPE_CHECKING:  # each verb imports what it needs, and no more
    from memfit.answers import Way
    from memfit.estimate import Estimate
    from memfit.hardware import GPU, Cluster
    from memfit.measure.record import Case, Record
    from memfit.model.catalog import Entry
    from memfit.model.modules import Model
    from memfit.model.source import Source
    from memfit.plan.study import Study
    from memfit.runs.walker import Given
    from memfit.tape import Producer, Tape
    from memfit.trace.launch import Progress

ADAPTED = ("lora", "qlora")  # methods with a rank of their own
TRACED_TOKENS = 2**26  # half a GiB of token ids, a few times over


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


@dataclass(frozen=True, kw_only=True)
class Question:
    model: Model
    job: Job
    cluster: Cluster | None
    strategy: Strategy
    ask: Ask
    source: Source | None
    assumed: Mapping[str, Any]  # options that nobody named, as the trainer has them
    subject: str = ""  # the model as it was named
    place: str = ""  # the GPU as it was named, as flags
    notes: tuple[Problem, ...] = ()  # what was assumed about the names as typed
    reasons: tuple[Problem, ...] = ()  # why no formulas answer it, where a trace does
    run: Given | None = None  # over real lengths; `job` has its usual and its longest batch


def question(model: Any, given: Mapping[str, Any], problems: list[Problem]) -> Question:
    """Read and check the arguments of a question. `problems`: those found before."""
    known = options()
    subject, values = given_values(model, given, known, problems)
    problems += [
        unknown("option", str(name), str(name)[:60], tuple(known))
        for name in values
        if name not in known
    ]
    asked = {
        name: value
        for name, value in values.items()
        if name in Ask.__dataclass_fields__ and name != "model"
    }
    ask = ask_from(asked, problems)
    later: list[Problem] = []  # about the place and the model: reported after the job's
    cluster = gather(later, lambda: None, lambda: cluster_of(ask.gpu, ask.memory))
    strategy = gather(later, Strategy, lambda: strategy_of(ask.use, cluster))
    reasons: list[Problem] = []
    source, built = (
        (None, None)
        if subject is None
        else gather(later, lambda: (None, None), lambda: model_of(subject, ask, reasons))
    )
    named = {name: value for name, value in values.items() if name in Job.__dataclass_fields__}
    usual = assumed(
        named,
        {} if built is None else built.config,
        frozenset(name for name, _ in strategy.uses()),
        "bf16" if cluster is None else cluster.gpu.half,
    )
    named = without_ligers_loss(named, str({**usual, **named}.get("framework", "")))
    job = job_of({**usual, **named}, problems)
    job, run = run_of(ask, job, strategy, subject, problems)
    if built is not None and built.layers:
        built = with_head(built, job.head, job.labels)
    problems += [one for one in later if one not in problems]
    layout: Problem | None = None
    several = cluster is not None and cluster.gpus > 1 and not ask.use.strip()
    if several and job.task == "inference" and built is not None and cluster is not None:
        cluster, strategy, layout = shared_by_default(built, job, cluster)
    if built is not None and built.layers:
        wrong: list[Problem] = []
        whole = built
        gather(wrong, lambda: None, lambda: applied(whole, job, cluster, strategy))
        problems += [problem for problem in wrong if ask.by == "formula" or not traced(problem)]
        if ask.by != "formula" and any(map(traced, wrong)):
            reasons += filter(traced, wrong)
            built = unbuilt(built.config, built.name, built.origin)
    if reasons and ask.by == "auto":
        lacking = tuple(trace_fallback.missing(reasons, built.config if built else {}))
        counted = bool(lacking) and rough_bound_counts(source) > 0
        ask = dataclasses.replace(ask, by="bound" if lacking and counted else "trace")
        reasons = [*lacking] or reasons
        problems += () if counted else lacking  # without a count there is no range, either
        if built is not None and "seq" not in named:
            job = trace_fallback.within_positions(job, built.config)
    else:
        reasons = []
    problems += conflicts(ask, job, values)
    if problems or built is None:
        raise InputError(*problems)
    return Question(
        model=built,
        job=job,
        cluster=cluster,
        strategy=strategy,
        ask=ask,
        source=source,
        assumed=usual,
        subject=os.fspath(subject) if isinstance(subject, (str, os.PathLike)) else built.name,
        place=named_place(ask),
        notes=(
            *gpu_notes(ask.gpu),
            *method_notes(usual, named),
            *loop_notes({**usual, **named}, strategy, job),
            *([] if layout is None else [layout]),
        ),
        reasons=tuple(reasons),
        run=run,
    )


def method_notes(usual: Mapping[str, Any], named: Mapping[str, Any]) -> Iterator[Problem]:
    """What is said where another option meant the method."""
    implied = implied_method(named) if "method" in usual else None
    if implied is not None:
        option = implied.option.replace("_", "-")
        yield Problem(
            message=f"`--method {implied.name}` is assumed, because `--{option}` {implied.why}",
            where="job.method",
            hint="`--method` names another",
            level="note",
        )


def loop_notes(known: Mapping[str, Any], strategy: Strategy, job: Job) -> Iterator[Problem]:
    """What is said where no trainer is named and the layout rules out TRL's."""
    trl = TRAINERS["trl"]
    missing = [name for name, _ in strategy.uses() if name not in trl.layouts]
    if job.task == "finetune" and missing and "framework" not in known:
        flags = [
            f"--{name} {getattr(job, name)}"
            for name in ("batch", "seq", "checkpointing", "precision", "optimizer")
            if name not in known
        ]
        listed = ", ".join(f"`{name}`" for name in missing)
        yield Problem(
            message=f"{trl.name}'s trainer has no {listed}: assumes a training loop by hand",
            where="job.framework",
            hint=f"its defaults are `{' '.join(['--framework transformers', *flags])}`",
            level="note",
        )


def named_place(ask: Ask) -> str:
    """The GPU as flags."""
    flags = (("gpu", ask.gpu), ("memory", ask.memory))
    return " ".join(f"--{name} {shlex.quote(text)}" for name, text in flags if text)


def compare(
    model: Any, /, variants: Sequence[Mapping[str, Any]], **common: Any
) -> tuple[Estimate, ...]:
    """Estimate several variants of a job. Every variant overrides the options in `common`. One
    `InputError` carries the problems of all variants."""
    problems: list[Problem] = []
    asked: list[Question] = []
    for number, variant in enumerate(variants, 1):
        try:
            asked.append(question(model, {**common, **variant}, []))
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


def applied(model: Model, job: Job, cluster: Cluster | None, strategy: Strategy = ONE) -> None:
    """Let every technique that the job asks for say what is wrong with it on this model; one that
    no family knows has nothing to look at."""
    from memfit.program import Program
    from memfit.techniques import apply

    if model.layers:
        apply(
            Program(
                model=model,
                job=job,
                entries=(),
                weights=model.dtype,
                gpu=None if cluster is None else cluster.gpu,
                strategy=strategy,
            )
        )


def conflicts(ask: Ask, job: Job, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems that arise from combinations of options."""
    from memfit.simulate.settings import Settings

    found: list[Problem] = []
    text = values.get("alloc_conf", "")
    if isinstance(text, str):
        gather(found, Settings, lambda: Settings.parse(text, where="job.alloc_conf"))
    yield from found
    if ask.by == "trace" and job.batch * job.beams * job.reach > TRACED_TOKENS:
        message = f"{job.batch * job.beams * job.reach} tokens are too many for a trace"
        yield Problem(
            message=message,
            where="by",
            hint=f"use at most {TRACED_TOKENS}, or `--by formula`, which has no limit",
        )
    if ask.dataset_tokens and ask.examples:
        yield Problem(
            message="`dataset_tokens` and `examples` both set the size of the dataset",
            where="examples",
            hint="remove one of them",
        )
    if (ask.dataset_tokens or ask.examples) and not job.training:
        yield Problem(
            message="`dataset_tokens` and `examples` apply to training only",
            where="job.task",
            hint="use `--task finetune` or `pretrain`",
        )
    if (ask.dataset_tokens or ask.examples) and ask.by == "trace":
        yield Problem(
            message="a trace does not predict time",
            where="by",
            hint="omit `dataset_tokens` and `examples`; only formulas predict time",
        )
    if not values.get("gpu") and not values.get("memory"):
        for name in (
            "largest_batch",
            "longest_seq",
            "cheapest_precision",
            "advise",
            "dataset_tokens",
            "examples",
        ):
            if getattr(ask, name):
                message = f"`{name}` needs a GPU"
                yield Problem(
                    message=message,
                    where=name,
                    hint="add `--gpu rtx-4090`, or `--memory 24GiB`",
                )


def answer(
    asked: Question, producer: Producer | None = None, *, progress: Progress | None = None
) -> Estimate:
    """The estimate, and with it the answers to the reverse questions; `producer`: another one than
    `ask` names."""
    found, asked = simulated(asked, producer, progress)
    model, job, cluster, ask = asked.model, asked.job, asked.cluster, asked.ask
    found = dataclasses.replace(found, assumed=asked.assumed)
    if any(
        getattr(ask, name)
        for name in (
            "largest_batch",
            "longest_seq",
            "smallest_gpu",
            "cheapest_gpu",
            "cheapest_precision",
        )
    ):
        from memfit.plan.reverse import QUESTIONS

        producer = producer or producer_of(ask.by)
        answers = tuple(
            solve(model, job, cluster, producer, asked.strategy)
            for name, solve in QUESTIONS.items()
            if getattr(ask, name)
        )
        found = dataclasses.replace(found, answers=answers)
    if asked.run is not None:
        found = with_run(found, job, asked.run)
    if ask.advise and cluster is not None:
        from memfit.plan.advice import advice

        known = advice(model, worst_job(job, asked.run), cluster, asked.strategy)
        ways = tuple(spelled(way, asked) for way in known.ways)
        found = dataclasses.replace(found, advice=dataclasses.replace(known, ways=ways))
    time, tokens = found.time, ask.dataset_tokens or ask.examples * job.seq
    if tokens and asked.run is not None:
        time, tokens = paid_by_run(found, asked.run, ask)
    if tokens and cluster is not None and time is not None:
        from memfit.hardware.prices import price
        from memfit.simulate.bill import bill

        listed = price(cluster.gpu)
        each = ask.price or (None if listed is None else listed.dollars)
        found = dataclasses.replace(found, bill=bill(time, cluster, int(tokens), price=each))
    return found


def simulated(
    asked: Question, producer: Producer | None, progress: Progress | None
) -> tuple[Estimate, Question]:
    """The estimate alone, and the question as it was answered: where the formulas find out late
    that they cannot, and `auto` was asked for, by a trace."""
    from memfit.estimate import estimate as simulate
    from memfit.model.likeness import remarks

    model, job, cluster, source = asked.model, asked.job, asked.cluster, asked.source
    problems, total = (
        (asked.notes, None)
        if source is None
        else ((*asked.notes, *source.problems, *compared(source, model)), source.parameters)
    )
    problems = (*problems, *remarks(asked.ask.like, model, total))

    def run(by: Producer | None) -> Estimate:
        return simulate(
            model, job, cluster, asked.strategy, producer=by, problems=problems, total=total
        )

    if producer is not None:
        return run(producer), asked
    if asked.ask.by == "bound":
        from memfit.rough_bound import bound, remark

        found = bound(model, job, cluster, asked.strategy, rough_bound_counts(source))
        noted = (remark(model, asked.reasons), *problems, *found.problems)
        return dataclasses.replace(found, problems=tuple(dict.fromkeys(noted))), asked
    if asked.ask.by == "trace":
        from memfit import estimate_cache

        name = estimate_cache.key(model, job, cluster, asked.strategy, total, problems)
        make = lambda: run(tracer(asked, progress))  # noqa: E731
        try:
            with trace_fallback.joined(asked.reasons):
                found, old = estimate_cache.remembered(name, model, job, cluster, make)
        except InputError as bad:
            if "checkpointing" in asked.assumed and trace_fallback.no_checkpoints(bad):
                return simulated(without_checkpoints(asked), None, progress)
            raise
        return trace_fallback.explained(found, asked.reasons, old), asked
    try:
        return run(None), asked
    except InputError as bad:
        if asked.ask.by != "auto" or not all(map(traced, bad.problems)):
            raise
        raise_errors(trace_fallback.missing(bad.problems, model.config))
        by_trace = dataclasses.replace(
            asked,
            ask=dataclasses.replace(asked.ask, by="trace"),
            model=unbuilt(model.config, model.name, model.origin),
            reasons=bad.problems,
        )
        return simulated(by_trace, None, progress)


def rough_bound_counts(source: Source | None) -> int:
    """Parameters that a rough bound may rest on; 0 for none."""
    from memfit.rough_bound import counted

    return counted(source)


def without_checkpoints(asked: Question) -> Question:
    """The same question without gradient checkpointing, for classes that do not support it. Only
    the trainer's default had turned it on."""
    left = {name: value for name, value in asked.assumed.items() if name != "checkpointing"}
    note = Problem(
        message="this class has no gradient checkpointing, so none is assumed",
        where="job.checkpointing",
        level="note",
    )
    job = asked.job.replace(checkpointing="none")
    return dataclasses.replace(asked, job=job, assumed=left, notes=(*asked.notes, note))


def tracer(asked: Question, progress: Progress | None) -> Producer:
    """The trace in this process where it is asked for by name; one that nobody asked for runs in a
    process of its own, with a limit of time."""
    if not asked.reasons:
        producer = producer_of("trace")
        assert producer is not None
        return producer

    def run(model: Model, job: Job, strategy: Strategy, cluster: Cluster | None) -> Tape:
        from memfit.trace.launch import request_of

        request = request_of(model, job, strategy, None)
        return launched(request, cluster, Run(), asked.ask.offline, progress).tape

    return run


def with_next_way(found: Estimate, asked: Question) -> Estimate:
    """Where it does not surely fit: the best way that does."""
    if found.verdict not in ("no", "tight") or asked.cluster is None:
        return found
    from memfit.plan.advice import next_way

    if found.advice is not None:
        best = found.advice.ways[0] if found.advice.ways else None
    else:
        worst = worst_job(asked.job, asked.run)
        best = next_way(asked.model, worst, asked.cluster, asked.strategy)
        best = None if best is None else spelled(best, asked)
    return dataclasses.replace(found, next_way=best)


def spelled(way: Way, asked: Question) -> Way:
    """With the command that asks for it."""
    from memfit.commands import command, gpu_words

    cluster = asked.cluster if way.cluster is None else way.cluster
    assert cluster is not None
    place = asked.place if cluster == asked.cluster else gpu_words(cluster)
    config, half = asked.model.config, cluster.gpu.half
    job = command_job(way.job, asked.job, asked.run)
    text = command(asked.subject, job, place, way.strategy, config, half) + run_flags(asked.ask)
    return dataclasses.replace(way, command=text)


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
    layout = tuple(how.use.split()) or (
        (f"fsdp={how.world},param_dtype=bf16,reduce_dtype=fp32",) if how.world > 1 else ()
    )
    if how.use and how.world > 1:
        problems.append(
            Problem(
                message="`--world` and `--use` both set the layout",
                where="world",
                hint="one of them",
            )
        )
    strategy = gather(problems, lambda: ONE, lambda: strategy_from(layout, None) if layout else ONE)
    if how.process >= strategy.ranks:
        count = f"{strategy.ranks} process" + ("es" if strategy.ranks > 1 else "")
        problems.append(
            Problem(
                message=f"process {how.process} does not exist: the layout has {count}",
                where="process",
                hint="processes start at 0",
            )
        )
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


def study(
    models: Sequence[Any],
    /,
    *,
    progress: Callable[[int, int, str], None] | None = None,
    **given: Any,
) -> Study:
    """Ways to fine-tune models on machines: what each needs and takes, and what to begin with.
    Options are the fields of `Studying`, and of `Job` those that a study does not go through
    itself."""
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
