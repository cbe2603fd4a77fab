"""`plan` for answers: from words to what is asked of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from memfit.errors import InputError, Problem, raise_errors
from memfit.job import Job, option
from memfit.lazy_dataclass import dataclass
from memfit.strategy import ONE, TP, Strategy
from memfit.units import parse_seconds
from memfit.uses import strategy_from
from memfit.words import Planning, gather, read_into

if TYPE_CHECKING:
    from memfit.hardware import Cluster
    from memfit.model.modules import Model
    from memfit.plan.goals import Asked
    from memfit.plan.space import Work

MANY = "as-many-as-fit"
TRAINING = (
    "global_batch",
    "tokens_per_step",
    "examples",
    "policy",
    "front",
    "offload",
)  # of `Planning`, what means nothing here
LIMITS = {"max_latency": "answer", "max_first": "first", "max_token": "token"}
LONGEST = 10**7  # requests at once


@dataclass(frozen=True, kw_only=True)
class Answering:
    """What a plan for task `inference` is asked beside."""

    goal: str = option(
        "throughput",
        (
            "of answers: `latency`, the least seconds of one, or `throughput`, the most "
            "tokens a second"
        ),
        group="plan",
    )
    requests: str = option(
        "",
        (
            f"answers at once on the whole machine: a number, or `{MANY}`; empty: one for "
            "`latency`, as many as fit for `throughput`"
        ),
        group="plan",
    )
    weights: str = option(
        "any",
        (
            "forms of the weights to choose from, with commas: own, int8, nf4, gptq-8bit, "
            "gptq-4bit, awq-4bit, fp8"
        ),
        group="plan",
    )
    max_latency: str = option("", "what a whole answer may take, like `5s`", group="plan")
    max_first: str = option("", "what the first token may take, like `500ms`", group="plan")
    max_token: str = option("", "what each further token may take, like `40ms`", group="plan")


def misplaced(values: Mapping[str, Any], serving: bool, problems: list[Problem]) -> None:
    """Options of the one kind of plan in the other."""
    plain: dict[str, Any] = {one.name: one.default for one in dataclasses.fields(Planning)}
    for name in TRAINING if serving else Answering.__dataclass_fields__:
        if name in values and (not serving or values[name] != plain[name]):
            message = (
                f"`{name.replace('_', '-')}` is of a plan to {'train' if serving else 'answer'}"
            )
            hint = "leave it away" if serving else "`--task inference`, or leave it away"
            problems.append(Problem(message=message, where=name, hint=hint))


def asked_of(
    values: Mapping[str, Any], job: Job, batches: tuple[int, ...], problems: list[Problem]
) -> Asked:
    """What the words of `Answering` mean; what is wrong with them joins `problems`."""
    from memfit.plan.goals import GOALS, Asked, Limits

    wanted = read_into(
        Answering,
        {name: values[name] for name in Answering.__dataclass_fields__ if name in values},
        problems,
    )
    goal = gather(
        problems, lambda: GOALS["throughput"], lambda: GOALS.find(wanted.goal, where="goal")
    )
    limits = {LIMITS[name]: seconds_of(getattr(wanted, name), name, problems) for name in LIMITS}
    requests = requests_of(wanted.requests, problems)
    if job.new_tokens < 1:
        problems.append(
            Problem(
                message="an answer of no tokens takes no plan",
                where="job.new_tokens",
                hint="1 or more",
            )
        )
    if requests is not None and batches:
        problems.append(
            Problem(
                message="`batch` and `requests` both say how many at once",
                where="batch",
                hint="leave one of them away",
            )
        )
    if goal.name == "latency" and wanted.requests.strip().lower() == MANY:
        message = "the quickest answer is that of one request, and as many as fit are asked for"
        problems.append(
            Problem(
                message=message,
                where="requests",
                hint="say how many, or `--goal throughput --max-latency 5s`",
            )
        )
    if limits["answer"] and limits["first"] > limits["answer"]:
        message = "the first token may take longer than the whole answer"
        problems.append(Problem(message=message, where="max_first", hint="less than `max-latency`"))
    count = 1 if requests is None and goal.name == "latency" and not batches else requests or 0
    return Asked(
        goal=goal.name,
        requests=count,
        weights=forms(wanted.weights, problems),
        limits=Limits(**limits),
    )


def requests_of(text: str, problems: list[Problem]) -> int | None:
    """0: as many as fit; None: nobody says."""
    plain = text.strip().lower().replace("_", "").replace(",", "")
    if not plain or plain == MANY:
        return 0 if plain else None
    if plain.isdecimal() and 1 <= int(plain) <= LONGEST:
        return int(plain)
    hint = f"a whole number from 1 to {LONGEST}, or `{MANY}`"
    problems.append(
        Problem(message=f"`{text[:40]}` is no number of requests", where="requests", hint=hint)
    )
    return None


def seconds_of(text: str, name: str, problems: list[Problem]) -> float:
    if not text.strip():
        return 0.0
    found = gather(problems, lambda: 1.0, lambda: parse_seconds(text, name))
    if found <= 0:
        problems.append(
            Problem(
                message=f"nothing takes `{text[:40]}`",
                where=name,
                hint="more than 0 seconds, like `5s` or `40ms`",
            )
        )
    return found


def forms(text: str, problems: list[Problem]) -> tuple[str, ...]:
    """The rows named, in the order of the table."""
    from memfit.plan.weights import WEIGHTS

    names = [one.strip().lower() for one in text.split(",") if one.strip()]
    if names == ["any"]:
        return tuple(WEIGHTS)
    known = [
        gather(problems, lambda: None, partial(WEIGHTS.find, one, where="weights")) for one in names
    ]
    if not names:
        problems.append(
            Problem(
                message="no form of weights is left to choose from",
                where="weights",
                hint="`any`, or " + ", ".join(WEIGHTS),
            )
        )
    return tuple(
        name for name in WEIGHTS if any(one is not None and one.name == name for one in known)
    )


def work_of(
    model: Model,
    job: Job,
    axes: dict[str, tuple[Any, ...]],
    asked: Asked,
    named: tuple[str, tuple[int, ...]],
    cluster: Cluster,
) -> Work:
    """`named`: layouts and batches."""
    from memfit.plan.space import Work
    from memfit.plan.weights import OWN, WEIGHTS, packed

    if not model.layers:
        raise InputError.one(
            f"no formulas for `{model.family}`, and a plan rests on them",
            where="model",
            hint="a model of a known family",
        )
    use, batches = named
    if packed(model) and any(name != OWN for name in asked.weights):
        if OWN not in asked.weights:
            message = "the checkpoint is stored quantized already, and nobody packs it again"
            raise InputError.one(
                message, where="weights", hint=f"`{OWN}`, or name the checkpoint in 16 bits"
            )
        asked = dataclasses.replace(asked, weights=(OWN,))
    elif job.quant != "none":
        told = tuple(name for name in WEIGHTS if WEIGHTS[name].quant == job.quant) or (OWN,)
        if not set(told) <= set(asked.weights):
            message = f"`quant` is {job.quant}, and `weights` {', '.join(asked.weights)}"
            raise InputError.one(message, where="weights", hint="leave one of them away")
        asked = dataclasses.replace(asked, weights=told)
    return Work(
        model=model,
        job=job,
        axes=axes,
        sequences=asked.requests,
        batches=batches,
        serving=asked,
        strategies=layouts_of(use, model, job, axes, cluster) if use.strip() else (),
    )


def layouts_of(
    use: str, model: Model, job: Job, axes: Mapping[str, tuple[Any, ...]], cluster: Cluster
) -> tuple[Strategy, ...]:
    """The tensor parallelism named; replicas of it share no work, and need no layout."""
    from memfit.plan.space import problems as told

    named = strategy_from(use.split(), cluster.gpus)
    others = [name for name, _ in named.uses() if name not in ("tp", "ddp")]
    size = named.size("tp")
    wrong = [
        Problem(
            message=f"no formula for answers by `{name}`",
            where="use",
            hint="`tp`, or leave it away: replicas follow",
        )
        for name in others
    ]
    if cluster.gpus_per_node % size:
        message = f"{size} GPUs of a group do not divide the {cluster.gpus_per_node} of a node"
        wrong.append(
            Problem(message=message, where="use tp", hint="2, 4 or 8, as many as there are")
        )
    strategy = ONE if size == 1 else Strategy(tp=named.tp or TP(size=size))
    alone = dataclasses.replace(cluster, gpus_per_node=size, nodes=1)
    first = gather(
        [], lambda: job, lambda: job.replace(**{name: values[0] for name, values in axes.items()})
    )
    raise_errors((*wrong, *(() if others else told(model, first, alone, strategy))))
    return (strategy,)


__all__ = ["Answering", "asked_of", "misplaced", "work_of"]
