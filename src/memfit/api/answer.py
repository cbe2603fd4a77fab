"""From a question to its answer: by formulas, by the trace where there are none, and with the next
step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memfit import trace_fallback
from memfit.api.question import Question, rough_bound_counts
from memfit.api.run import command_job, paid_by_run, run_flags, with_run, worst_job
from memfit.api.scripts import launched
from memfit.errors import InputError, Problem, raise_errors
from memfit.job import Job
from memfit.strategy import Strategy
from memfit.words.models import compared, producer_of, traced, unbuilt
from memfit.words.options import Run

if TYPE_CHECKING:  # each verb imports what it needs, and no more
    from memfit.answers import Way
    from memfit.estimate import Estimate
    from memfit.hardware import Cluster
    from memfit.model.model import Model
    from memfit.tape import Producer, Tape
    from memfit.trace.launch import Progress


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
    """The trace, in this process where it is asked for by name. A trace that nobody asked for runs
    in a separate process with a time limit."""
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
    text = command(asked.subject, job, place, way.strategy, config, half, asked=asked.job)
    text += run_flags(asked.ask)
    return dataclasses.replace(way, command=text)


__all__ = ["answer", "simulated", "with_next_way"]
