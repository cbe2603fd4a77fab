"""The verb `plan` for inference: reads its options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from memfit.errors import InputError, Problem, raise_errors
from memfit.job import Job, option
from memfit.lazy_dataclass import dataclass
from memfit.strategy import ONE, TP, Split, Strategy, even_split
from memfit.units import parse_seconds
from memfit.uses import strategy_from
from memfit.words.options import Planning
from memfit.words.read import gather, read_into

if TYPE_CHECKING:
    from memfit.hardware import Cluster
    from memfit.model.model import Model
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
    """The options of `memfit plan --task inference` that are not part of the job."""

    goal: str = option(
        "throughput",
        ("what to optimize in inference: latency or throughput"),
        group="plan",
    )
    requests: str = option(
        "",
        (f"concurrent requests on all GPUs: a number or `{MANY}`"),
        group="plan",
    )
    weights: str = option(
        "any",
        ("weight formats to try: own, int8, nf4, gptq-8bit, gptq-4bit, awq-4bit, fp8"),
        group="plan",
    )
    max_latency: str = option("", "maximum time of a request, like `5s`", group="plan")
    max_first: str = option("", "maximum time to first token, like `500ms`", group="plan")
    max_token: str = option("", "maximum time per output token, like `40ms`", group="plan")


def misplaced(values: Mapping[str, Any], serving: bool, problems: list[Problem]) -> None:
    """Yield a problem for each option that belongs to another kind of plan."""
    plain: dict[str, Any] = {one.name: one.default for one in dataclasses.fields(Planning)}
    for name in TRAINING if serving else Answering.__dataclass_fields__:
        if name in values and (not serving or values[name] != plain[name]):
            message = (
                f"`{name.replace('_', '-')}` applies to plans to "
                f"{'train' if serving else 'answer'} only"
            )
            hint = "remove it" if serving else "add `--task inference`, or remove it"
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
                message="a plan for inference must generate at least 1 token",
                where="job.new_tokens",
                hint="1 or more",
            )
        )
    if requests is not None and batches:
        problems.append(
            Problem(
                message="`batch` and `requests` both set the number of concurrent requests",
                where="batch",
                hint="remove one of them",
            )
        )
    if goal.name == "latency" and wanted.requests.strip().lower() == MANY:
        message = "the goal `latency` is for one request, not for as many as fit"
        problems.append(
            Problem(
                message=message,
                where="requests",
                hint="give a number, or use `--goal throughput --max-latency 5s`",
            )
        )
    if limits["answer"] and limits["first"] > limits["answer"]:
        message = "the limit of the first token is longer than that of the whole request"
        problems.append(
            Problem(message=message, where="max_first", hint="must be less than `max-latency`")
        )
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
    hint = f"an integer from 1 to {LONGEST}, or `{MANY}`"
    problems.append(
        Problem(message=f"`{text[:40]}` is not a number of requests", where="requests", hint=hint)
    )
    return None


def seconds_of(text: str, name: str, problems: list[Problem]) -> float:
    if not text.strip():
        return 0.0
    found = gather(problems, lambda: 1.0, lambda: parse_seconds(text, name))
    if found <= 0:
        problems.append(
            Problem(
                message=f"`{text[:40]}` must be more than 0 seconds",
                where=name,
                hint="write it like `5s` or `40ms`",
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
                message="`weights` names no format",
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
            f"`{model.family}` has no formulas, and a plan needs them",
            where="model",
            hint="use a model of a known family",
        )
    use, batches = named
    if packed(model) and any(name != OWN for name in asked.weights):
        if OWN not in asked.weights:
            message = "the checkpoint is already quantized"
            raise InputError.one(
                message, where="weights", hint=f"use `{OWN}`, or name the 16-bit checkpoint"
            )
        asked = dataclasses.replace(asked, weights=(OWN,))
    elif job.quant != "none":
        told = tuple(name for name in WEIGHTS if WEIGHTS[name].quant == job.quant) or (OWN,)
        if not set(told) <= set(asked.weights):
            message = f"`quant` is {job.quant}, but `weights` allows {', '.join(asked.weights)}"
            raise InputError.one(message, where="weights", hint="remove one of them")
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
            message=f"`{name}` is not supported in inference",
            where="use",
            hint="use `tp`, or remove it to get replicas",
        )
        for name in others
    ]
    if cluster.gpus_per_node % size:
        message = (
            f"tensor parallel size {size} does not divide the {cluster.gpus_per_node} "
            "GPUs of a node"
        )
        wrong.append(
            Problem(
                message=message, where="use tp", hint="use a size that divides the GPUs of a node"
            )
        )
    strategy = ONE if size == 1 else Strategy(tp=named.tp or TP(size=size))
    alone = dataclasses.replace(cluster, gpus_per_node=size, nodes=1)
    first = gather(
        [], lambda: job, lambda: job.replace(**{name: values[0] for name, values in axes.items()})
    )
    raise_errors((*wrong, *(() if others else told(model, first, alone, strategy))))
    return (strategy,)


def shared_by_default(
    model: Model, job: Job, cluster: Cluster
) -> tuple[Cluster, Strategy, Problem | None]:
    """How several GPUs answer where nobody says: they share the model by tensor parallelism, as
    many of a node as can, else by layers. Groups of them have a copy each, and `cluster` is then
    one group."""
    from memfit.plan.space import divisors
    from memfit.plan.space import problems as told

    gpus, first = cluster.gpus, ""
    for size in reversed(divisors(cluster.gpus_per_node)[1:] if model.layers else []):
        group = dataclasses.replace(cluster, gpus_per_node=size, nodes=1)
        strategy = Strategy(tp=TP(size=size))
        wrong = told(model, job, group, strategy)
        if not wrong:
            others = gpus // size - 1
            rest = f" per group of {size}, one of {others + 1}" if others else ""
            message = f"`--use tp={size}` is assumed: the GPUs share one copy of the model{rest}"
            return group, strategy, layout_note(message, "`--use ddp` puts a copy on each GPU")
        first = first or wrong[0].message
    node = dataclasses.replace(cluster, nodes=1)
    # accelerate's own split of quantized layers is not known, so they are split evenly.
    splits = Split(size=node.gpus), even_split(len(model.layers), node.gpus)
    for split in splits if model.layers else ():
        strategy = Strategy(split=split)
        if not told(model, job, node, strategy):
            named = f"split={node.gpus}" + (f",layers={split.layers}" if split.layers else "")
            message = f"`--use {named}` is assumed: each GPU holds some layers ({first})"
            return node, strategy, layout_note(message, "`--use ddp` puts a copy on each GPU")
    alone = dataclasses.replace(cluster, gpus_per_node=1, nodes=1)
    why = f" ({first})" if first else ""
    message = f"each of {gpus} GPUs holds a copy of the model{why}; this answer is for one of them"
    hint = f"`--use tp={gpus}` would share it" if not model.layers else ""
    return alone, ONE, layout_note(message, hint)


def layout_note(message: str, hint: str) -> Problem:
    return Problem(message=message, where="use", hint=hint, level="note")


__all__ = ["Answering", "asked_of", "misplaced", "shared_by_default", "work_of"]
