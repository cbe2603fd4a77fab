"""(Model, Job, Strategy, Cluster) -> Tape, by formulas: no torch, milliseconds, any size."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from memfit import kernels
from memfit.hardware import Cluster
from memfit.job import Job
from memfit.lower.body import runs_sdpa
from memfit.lower.compact import Notes, repeats
from memfit.lower.engines import distinct_ranks, foldable, passing, scripted, steady
from memfit.lower.expand import expanded
from memfit.lower.frameworks import programs_of
from memfit.lower.recorder import Recorder
from memfit.lower.requests import Request, requests
from memfit.lower.walk_cache import once
from memfit.model.model import Model
from memfit.optimizers import OPTIMIZERS
from memfit.program import BOTH, Ends, Program, placed
from memfit.strategy import ONE, Strategy
from memfit.tape import Event, Repeat, Tape
from memfit.techniques import apply

if TYPE_CHECKING:
    from memfit.lower.script import Keep, Script


# Decoding passes on a compact tape: their time grows along a line, and the last one holds most.
PASSES = 4
LIVE_PASSES = 2  # the first and the last: no other one holds most


class Walk(NamedTuple):
    """`short`: the walk that this one was written out from."""

    events: tuple[Event, ...]
    repeats: tuple[Repeat, ...]
    program: Program
    short: Walk | None = None


def lower(
    model: Model,
    job: Job,
    strategy: Strategy | None = None,
    cluster: Cluster | None = None,
    *,
    compact: bool = False,
    passes: int = PASSES,
) -> Tape:
    """The tape of one rank. `compact`: identical layers stand once, with a count, and of the
    decoding passes of a generation at most so many are written (0: as many as on a flat tape)."""
    layout = strategy or ONE
    found = (
        shortest(model, job, cluster, layout, 0 if job.training else passes)
        if compact
        else full(model, job, cluster, layout)
    )
    rank = 0 if strategy is None else strategy.rank
    tape = partial(Tape, source="formula", rank=rank)
    return tape(
        events=found.events,
        repeats=found.repeats,
        short=found.short and tape(events=found.short.events, repeats=found.short.repeats),
    )


def distinct(
    model: Model,
    job: Job,
    cluster: Cluster | None,
    strategy: Strategy,
    *,
    every: bool = True,
    lightest: bool = True,
) -> tuple[tuple[int, int], ...]:
    """(rank, how many are like it) of the ranks whose memory differs; of partitions those among
    which the worst is, and the lightest, unless not `lightest`; not `every`: the one that is likely
    the worst."""
    if not job.training:
        return strategy.distinct()
    return (
        distinct_ranks(
            strategy,
            lambda: programmed(model, job, cluster, strategy, True),
            every=every,
            lightest=lightest,
        )
        or strategy.distinct()
    )


def shortest(
    model: Model, job: Job, cluster: Cluster | None, strategy: Strategy, passes: int
) -> Walk:
    """With as few layers walked as tell all."""
    if waits(job):
        return whole(walked(model, job, cluster, strategy, None))
    ends = unlike(model, job, strategy)
    if ends != BOTH:
        silent = untold(model, job, cluster, strategy)
        found = None if silent else walked(model, job, cluster, strategy, ends, passes)
        if found is not None:
            return found
        silent.append(ends)
    return whole(walked(model, job, cluster, strategy, BOTH, passes))


def untold(model: Model, job: Job, cluster: Cluster | None, strategy: Strategy) -> list[Ends]:
    """Walks without their ends that did not tell what the layers have that they leave out, in this
    search: of more or longer sequences they do not, either."""
    sizes = ("batch", "seq", "accumulate", "alloc_conf")
    same = tuple((one.name, getattr(job, one.name)) for one in fields(job) if one.name not in sizes)
    gpu = None if cluster is None else cluster.gpu
    return once((model, gpu), ("untold", same, strategy), list, lambda _: 0)


def waits(job: Job) -> bool:
    """Activations wait on the host: what one layer saves goes while the next ones run."""
    return job.training and job.activation_offload != "none"


def unlike(model: Model, job: Job, strategy: Strategy = ONE) -> Ends:
    """Engines that spread the work gather and free what is not one layer's; optimizers that go from
    parameter to parameter keep variables. Where the first layer's input gets no gradient, as in
    adapters' training, its backward is not that of the others. Scores that a layer returns and no
    graph keeps are freed by the next one, and the first has none before it. A norm that writes the
    gradient of its input over that of its output changes what the last layer may add to."""
    optimizer = OPTIMIZERS[job.optimizer]
    one_by_one = (
        optimizer.order == "mixed"
        or optimizer.when != "after"
        or any("{" in rule.step for rule in optimizer.rules)
    )
    if strategy or job.framework == "megatron" or (job.training and one_by_one):
        return BOTH
    frozen = job.training and job.method != "full"
    checkpointed = job.training and job.checkpointing != "none"
    scores = (checkpointed or job.evaluate or not job.training) and (
        job.attention == "eager" or not runs_sdpa(model) or late(model, job)
    )
    return Ends(
        frozen or scores or (checkpointed and job.checkpointing == "every"),
        job.liger or "norms" in job.unsloth,
    )


def late(model: Model, job: Job) -> bool:
    """Whether captured layers return what the next one frees."""
    return model.graphs is not None and not (model.encodes or job.training) and model.graphs.late


def crosses(model: Model, job: Job) -> bool:
    """Whether gradients go past the next layer, or layers share weights or leave something to the
    encoder's end, so that no layer stands for others."""
    return (
        model.graphs is not None and (model.encodes or job.training) and bool(model.graphs.crosses)
    )


def full(model: Model, job: Job, cluster: Cluster | None, strategy: Strategy = ONE) -> Walk:
    """Layer by layer: written out from the inner ones of each kind, or walked."""
    if not steady(strategy) or waits(job):
        return whole(walked(model, job, cluster, strategy, None))
    found = whole(walked(model, job, cluster, strategy, BOTH))
    flat = (
        once(
            (found.events,),
            "flat",
            lambda: expanded(found.events, found.repeats, found.program.entries, model.path),
            lambda events: len(events or ()),
        )
        if found.repeats
        else found.events
    )
    return (
        whole(walked(model, job, cluster, strategy, None))
        if flat is None
        else found._replace(events=cast("tuple[Event, ...]", flat), repeats=(), short=found)
    )


def allocator_requests(
    model: Model, job: Job, cluster: Cluster | None, strategy: Strategy = ONE
) -> Iterator[Request] | None:
    """What the flat tape asks of the allocator, which is not written for it. None where layers are
    walked one by one whatever they are. Raises `Unclear` where only the tape tells."""
    if not steady(strategy) or waits(job):
        return None
    found = whole(walked(model, job, cluster, strategy, BOTH))
    return requests(found.events, found.repeats, found.program.entries, model.path)


def whole(found: Walk | None) -> Walk:
    """Where the ends of every run are walked nothing stays untold."""
    assert found is not None
    return found


def walked(
    model: Model,
    job: Job,
    cluster: Cluster | None = None,
    strategy: Strategy = ONE,
    ends: Ends | None = BOTH,
    passes: int = 0,
) -> Walk | None:
    """Layer by layer (`ends` None), or with one layer for all that are like it but those at the
    ends. None where such a walk does not tell what the layers have that it leaves out. Jobs that
    differ in the allocator's settings alone share their walk."""
    job = job.replace(alloc_conf="") if job.alloc_conf else job
    compact = (
        ends is not None and not model.stored and foldable(strategy) and not crosses(model, job)
    )  # a file's blocks differ from layer to layer
    gpu, short = None if cluster is None else cluster.gpu, ends if compact else None
    return once(
        (model, gpu),
        ("walk", job, strategy, short, passes),
        lambda: walk(model, job, cluster, strategy, short, passes),
        lambda found: 0 if found is None else len(found.events),
    )


def walk(
    model: Model,
    job: Job,
    cluster: Cluster | None,
    strategy: Strategy,
    ends: Ends | None,
    passes: int = 0,
) -> Walk | None:
    """The same, where it is known whether layers stand for others."""
    compact = ends is not None
    program = programmed(model, job, cluster, strategy, compact, ends or BOTH)
    r = Recorder()
    r.passes = passes
    r.notes = Notes() if compact and ends != BOTH else None
    r.cublas = kernels.cublas_workspace(program.capability, job.version("torch"))
    r.sums = partial(kernels.column_sum, sms=program.processors, capability=program.capability)
    held = run(
        r,
        program,
        folded(model, job, cluster, strategy)
        if scripted(strategy) and not waits(job) and not crosses(model, job)
        else None,
    )
    spans = repeats(r, program)
    events = tuple(r.events)
    r.events.clear()  # what engine and body hold of each other would keep them
    del held  # the tape ends within the run: what is alive then stays so
    return None if spans is None else Walk(events, spans, program)


def programmed(
    model: Model,
    job: Job,
    cluster: Cluster | None,
    strategy: Strategy,
    short: bool,
    ends: Ends = BOTH,
) -> Program:
    """The job put on the model; `short`: with one layer for all that are like it."""
    every = job.checkpoint_every if job.checkpointing == "every" else 1
    entries = placed(
        model.layers, short and not job.recompute_layers, every, ends=ends
    )  # the first layers are unlike the others then
    gpu = cluster.gpu if cluster else None
    return apply(
        Program(
            model=model, job=job, entries=entries, weights=model.dtype, gpu=gpu, strategy=strategy
        )
    )


def folded(
    model: Model, job: Job, cluster: Cluster | None, strategy: Strategy
) -> tuple[Program, Keep]:
    """With one layer for all that are like it; and scripts of its passes, which those of other
    ranks, optimizers and accumulations are, too."""
    gpu, frozen = None if cluster is None else cluster.gpu, OPTIMIZERS[job.optimizer].freezes
    name = "script", job.replace(optimizer="sgd", accumulate=1), frozen, passing(strategy)

    def keep(of: Hashable, make: Callable[[], Script]) -> Script:
        return once((model, gpu), (*name, of), make, lambda found: len(found.events))

    return programmed(model, job, cluster, strategy, True), keep


def run(r: Recorder, program: Program, folded: tuple[Program, Keep] | None) -> object:
    """What the program still holds when it ends."""
    if program.job.training:
        from memfit.lower.train import train

        return train(r, program, folded)
    from memfit.lower.infer import infer

    return (programs_of(program).generates or infer)(r, program)
