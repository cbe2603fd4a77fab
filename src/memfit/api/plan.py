"""The verb `plan`: reads its options and searches for the best configuration."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from memfit.api.defaults import FIRST, with_defaults
from memfit.api.run import planned_over_lengths
from memfit.api.serving import Answering, asked_of, misplaced
from memfit.api.serving import work_of as answering
from memfit.errors import InputError, Problem, raise_errors
from memfit.job import Job
from memfit.model.heads import heads_of, label_head, with_head
from memfit.option_values import field_problems, from_text, unknown
from memfit.uses import strategy_from
from memfit.words.gpus import cluster_of
from memfit.words.job_files import given_values
from memfit.words.models import planned_model, producer_of
from memfit.words.options import Planning, options
from memfit.words.read import ask_from, gather, job_of, read_into

if TYPE_CHECKING:
    from memfit.hardware import Cluster
    from memfit.measure.record import Case, Record
    from memfit.model.model import Model
    from memfit.plan.planning import Checked, Plan, Progress, Row, Wish
    from memfit.plan.space import Work
    from memfit.strategy import Strategy
    from memfit.tape import Tape

STEP = 64  # sequences of a step, where nobody says and no trainer is assumed
PLACE = ("gpu", "use", "offline", "like", "prune")  # of `Ask`: where, and of which model
WITHOUT = (
    "largest_batch",
    "longest_seq",
    "smallest_gpu",
    "cheapest_gpu",
    "cheapest_precision",
    "advise",
    "by",
    "accumulate",
    "memory",
    "steps",
    "evaluate_every",
    "save_every",
)
INFINIBAND = ("ib", "infiniband")
NO_GPUS = re.compile(r"^\s*0+\s*[x×*]\s*(?P<rest>.+)", re.IGNORECASE)


def headed(model: Model | None, job: Job, serving: bool, problems: list[Problem]) -> Model | None:
    """The model with the job's head. Plans for inference are about tokens a second, which models
    with an encoder or with labels do not have."""
    labelled = model is not None and bool(label_head(model.config, job.head))
    if serving and model is not None and (heads_of(model.config) or labelled):
        what = "with a head of labels" if labelled else "with an encoder"
        problems.append(
            Problem(
                message=f"not supported yet: plans for the inference of models {what}",
                where="task",
                hint="`memfit estimate MODEL --task inference --largest-batch` says how much fits",
            )
        )
    return None if model is None else with_head(model, job.head, job.labels)


def plan(
    model: str | os.PathLike[str] | Mapping[str, Any] | Model = "",
    /,
    *,
    progress: Progress | None = None,
    **given: Any,
) -> Plan:
    """Ranked strategies for a model and GPUs. Options are the fields of `Planning`, and those of
    `estimate`: of the job's own, those that are not named are tried with several values, and what
    is named may be several, with commas, or `any`."""
    from memfit.plan.market import WORD, machines

    problems: list[Problem] = []
    subject, values = values_of(model, given, problems)
    serving = str(values.get("task", "")) == "inference"
    wanted = read_into(
        Planning,
        {name: values[name] for name in Planning.__dataclass_fields__ if name in values},
        problems,
    )
    ask = ask_from({name: values[name] for name in PLACE if name in values}, problems)
    market = ask.gpu.strip().lower() == WORD
    if market and (wanted.price or ask.use.strip()):
        message = f"`{WORD}` chooses the machine and its layout by public prices"
        problems.append(
            Problem(message=message, where="gpu", hint="remove `price` and `use`, or name the GPUs")
        )
    gpus = next(machines())[1].gpu.id if market else NO_GPUS.sub(r"\g<rest>", ask.gpu)
    cluster = gather(problems, lambda: None, lambda: gpus_of(gpus, wanted.network))
    built = (
        None
        if subject is None
        else gather(problems, lambda: None, lambda: planned_model(subject, ask))
    )
    named = {name: value for name, value in values.items() if name in Job.__dataclass_fields__}
    axes, batches = axes_of(named, problems, serving), batches_of(named.pop("batch", ""), problems)
    common, assumed, usual = (
        (named, {}, {}) if serving else with_defaults(named, axes, built, cluster, ask.use)
    )
    job = job_of({name: value for name, value in common.items() if name not in axes}, problems)
    built = headed(built, job, serving, problems)
    asked = asked_of(values, job, batches, problems) if serving else None
    work: Work | None = None
    if asked is not None and built is not None and cluster is not None:
        work = gather(
            problems,
            lambda: None,
            partial(answering, built, job, axes, asked, (ask.use, batches), cluster),
        )
    raise_errors(problems)
    if built is None or cluster is None:
        raise InputError.one("a plan needs a GPU", where="gpu", hint="add `--gpus 8xh100-sxm`")
    work = work or dataclasses.replace(
        work_of(
            built,
            job.replace(**first(axes, job)),
            axes,
            (wanted, ask.use, batches, int(assumed.get("batch", 0))),
            cluster,
        ),
        usual=usual,
        assumed=assumed,
        sparing={} if "optimizer" in named or not assumed else FIRST,
    )
    if wanted.verify:
        producer_of("trace")
    if wanted.measure and not market:
        measurable(cluster)
    wish = wish_of(
        wanted if "top" in values or not serving else dataclasses.replace(wanted, top=1),
        job,
        progress,
    )
    return seconded(solved(work, cluster, wish, "" if market else ask.gpu), wanted, wish)


def values_of(
    model: Any, given: Mapping[str, Any], problems: list[Problem]
) -> tuple[Any, dict[str, Any]]:
    """The model and the options of a plan, with those of its job file."""
    known = {**options(), **Planning.__dataclass_fields__, **Answering.__dataclass_fields__}
    subject, values = given_values(model, given, known, problems)
    values.pop("model", None)
    misplaced(values, str(values.get("task", "")) == "inference", problems)
    problems += [
        unknown("option", str(name), str(name)[:60], tuple(known))
        for name in values
        if name not in known
    ]
    problems += without(values)
    return subject, planned_over_lengths(values, subject, problems)


def solved(work: Work, cluster: Cluster, wish: Wish, gpu: str) -> Plan:
    """The plan on these GPUs. An empty `gpu` means the machines on the market, the cheapest first.
    `0x` a GPU shows what one of them would do."""
    from memfit.plan.market import cheapest
    from memfit.plan.planning import none_at_all, once
    from memfit.plan.planning import plan as train
    from memfit.plan.serving import once as serve_once
    from memfit.plan.serving import serve

    serving = work.serving is not None
    if not gpu:
        return cheapest(work, cluster.network, wish, serve_once if serving else once)
    answer = serve if serving else train
    if NO_GPUS.fullmatch(gpu):
        return none_at_all(work, cluster, wish, solve=answer)
    return answer(work, cluster, wish)


def without(values: dict[str, Any]) -> Iterator[Problem]:
    """Options of an estimate that mean nothing in a plan; they leave `values`."""
    for name in WITHOUT:
        if values.pop(name, None):
            message = f"`{name.replace('_', '-')}` does not apply to a plan"
            yield Problem(message=message, where=name, hint="remove it")


def seconded(found: Plan, wanted: Planning, wish: Wish) -> Plan:
    """The plan with the front over all candidates and with traces or measurements of the first
    rows, where requested."""
    from memfit.plan.frontier import frontier
    from memfit.plan.planning import judged

    found = frontier(found, wish) if wanted.front and found.rows else found
    found = judged(found, wanted.verify, traced) if wanted.verify else found
    return judged(found, wanted.measure, measured) if wanted.measure else found


def traced(row: Row) -> Checked:
    """Trace the real code of this row's rank in a separate process."""
    from memfit.estimate import estimate
    from memfit.plan.planning import Checked
    from memfit.trace.launch import launch, request_of

    def producer(model: Model, job: Job, strategy: Strategy, cluster: Cluster | None) -> Tape:
        return launch(
            request_of(model, job, strategy, None if cluster is None else cluster.gpu), offline=True
        ).tape

    one = row.estimate
    try:
        said = estimate(one.model, one.job, one.cluster, one.strategy, producer=producer)
    except InputError as bad:
        return Checked(by="trace", why=bad.problems[0].message)
    return Checked(by="trace", device=said.device, fits=said.verdict == "fits")


def measurable(cluster: Cluster) -> None:
    """Refused before anything is planned: another GPU than the one here cannot be measured."""
    from memfit.hardware import auto_gpu
    from memfit.measure.run import device_here

    hint = "`--verify` checks by a trace, without a GPU"
    if device_here() != "cuda":
        raise InputError.one("this machine has no GPU to measure on", where="measure", hint=hint)
    if (here := auto_gpu()).id != cluster.gpu.id:
        raise InputError.one(
            f"this machine has {here.name}, but the plan is for {cluster.gpu.name}",
            where="measure",
            hint=hint,
        )


def measured(row: Row) -> Checked:
    """What a few real steps, or answers, hold and take."""
    from memfit.measure.run import measure
    from memfit.plan.planning import Checked

    try:
        return recorded(measure(case_of(row)), row)
    except InputError as bad:
        return Checked(by="measured", why=bad.problems[0].message)


def case_of(row: Row) -> Case:
    from memfit.measure.record import Case
    from memfit.uses import uses

    one = row.estimate
    return Case(
        model=one.model.name,
        config=dict(one.model.config),
        job=one.job,
        use=tuple(uses(one.strategy)),
        rank=one.strategy.rank,
    )


def recorded(record: Record, row: Row) -> Checked:
    from memfit.plan.planning import Checked

    if record.result != "ok":
        return Checked(
            by="measured", fits=record.result != "oom", why=record.error or record.result
        )
    steps = record.step_seconds[1:] or record.step_seconds
    seconds = sum(steps) / len(steps) if steps else None
    device = None if record.reserved is None else record.reserved + row.estimate.outside
    return Checked(by="measured", device=device, seconds=seconds)


def gpus_of(text: str, network: str) -> Cluster | None:
    from memfit.hardware import find_link

    found, named = cluster_of(text, ""), network.strip().lower()
    if (
        found is None or not named or named in INFINIBAND
    ):  # of the GPU's own time, which is what its vendor's machines have
        return found
    return dataclasses.replace(found, network=find_link(network))


def axes_of(
    named: Mapping[str, Any], problems: list[Problem], serving: bool = False
) -> dict[str, tuple[Any, ...]]:
    """The values of each open option: those named, or those that are tried."""
    from memfit.plan.inference import SERVED
    from memfit.plan.space import AXES

    fields = {one.name: one for one in dataclasses.fields(Job)}
    found: dict[str, tuple[Any, ...]] = {}
    for name, tried in (SERVED if serving else AXES).items():
        value = named.get(name, "any")
        pieces = (
            [piece.strip() for piece in value.split(",")]
            if isinstance(value, str)
            else list(value)
            if isinstance(value, (list, tuple))
            else [value]
        )
        if pieces == ["any"]:
            found[name] = tried
            continue
        read = [
            from_text(piece, str(fields[name].type)) if isinstance(piece, str) else piece
            for piece in pieces
        ]
        problems += [problem for one in read for problem in field_problems(fields[name], one)]
        found[name] = tuple(dict.fromkeys(read))
    return found


def batches_of(value: Any, problems: list[Problem]) -> tuple[int, ...]:
    pieces = (
        [piece for piece in str(value).split(",") if piece.strip()]
        if not isinstance(value, (list, tuple))
        else list(value)
    )
    read = [from_text(str(piece).strip(), "int") for piece in pieces]
    batch = Job.__dataclass_fields__["batch"]
    problems += [problem for one in read for problem in field_problems(batch, one)]
    return tuple(one for one in read if isinstance(one, int))


def first(axes: Mapping[str, tuple[Any, ...]], job: Job) -> dict[str, Any]:
    """A job to begin with, as far as the first values go together."""
    values = {name: given[0] for name, given in axes.items() if len(given) == 1}
    return values if job.task != "pretrain" else {**values, "method": "full"}


def work_of(
    model: Model,
    job: Job,
    axes: dict[str, tuple[Any, ...]],
    asked: tuple[Planning, str, tuple[int, ...], int],
    cluster: Cluster,
) -> Work:
    from memfit.plan.space import Work

    wanted, use, batches, usual = asked
    if not model.layers:
        raise InputError.one(
            f"a plan needs formulas, and `{model.family}` has none",
            where="model",
            hint="use a model of a known family",
        )
    sequences = wanted.global_batch or -(-wanted.tokens_per_step // job.seq)
    if not sequences:
        each = max(usual, *batches, 0) if usual else max(1, STEP // cluster.gpus)
        sequences = cluster.gpus * each
    named = strategies_of(use, cluster) if use.strip() else ()
    return Work(
        model=model,
        job=job,
        axes=axes,
        sequences=sequences,
        batches=batches,
        strategies=named,
        offload=wanted.offload,
    )


def strategies_of(use: str, cluster: Cluster) -> tuple[Strategy, ...]:
    return (strategy_from(use.split(), cluster.gpus),)


def wish_of(wanted: Planning, job: Job, progress: Progress | None) -> Any:
    from memfit.plan.planning import Wish
    from memfit.plan.policies import POLICIES

    POLICIES.find(wanted.policy, where="policy")
    return Wish(
        each=wanted.top,
        tokens=wanted.dataset_tokens or wanted.examples * job.seq,
        dollars=wanted.price or None,
        policy=wanted.policy,
        budget=wanted.budget_money or None,
        hours=wanted.budget_hours or None,
        progress=progress,
    )


__all__ = ["plan"]
