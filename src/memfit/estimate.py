"""One question, one answer: what a job on a model holds of a GPU, whether that fits, and what
would."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from functools import cached_property
from typing import Any

from memfit.answers import (
    Advice,
    Answer,
    Band,
    Failure,
    Parameters,
    Rank,
    Rung,
    Script,
    Way,
    WholeRun,
)
from memfit.band import (
    spread,
    spread_of,
)
from memfit.errors import InputError, Problem
from memfit.hardware import (
    GPU,
    Cluster,
    Span,
)
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.lower import (
    LIVE_PASSES,
    PASSES,
    allocator_requests,
    distinct,
    lower,
    waits,
)
from memfit.lower.engines import foldable
from memfit.lower.expand import Unclear
from memfit.lower.host import Host, host
from memfit.lower.walk_cache import once
from memfit.model.model import Model
from memfit.parallel.pipeline.check import alike
from memfit.presentation import Presented
from memfit.program_facts import assumptions_of, marked_program, parameters_of
from memfit.simulate.bill import Bill
from memfit.simulate.generating import Generation
from memfit.simulate.memory import Memory, memory
from memfit.simulate.pace import generation_time, kernels, step_time, untold
from memfit.simulate.peaks import peaks
from memfit.simulate.replay import Replay, replay, reserved_peak
from memfit.simulate.settings import Settings
from memfit.simulate.time import Duration
from memfit.simulate.working import Alike
from memfit.strategy import ONE, Strategy
from memfit.tape import Producer, Tape
from memfit.techniques.base import TRACE
from memfit.verdicts import (
    Place,
    allocator_advice,
    band_of,
    failure_of,
    middle,
    outside_of,
    regime_of,
    room_of,
    total_of,
    upper_end,
    verdict_of,
)


@dataclass(frozen=True, kw_only=True, repr=False)
class Estimate(Presented):
    """The answer to a question: memory, time, verdict and their working. Without a GPU, `verdict`
    and `cluster` are None and the kernels are those of an A100."""

    model: Model = field(repr=False)
    job: Job
    cluster: Cluster | None = field(repr=False)
    strategy: Strategy = ONE
    memory: Memory
    context: Span
    nccl: Span
    usable: tuple[int, int] | None
    host: Host
    band: Band
    verdict: str | None
    failure: Failure | None
    retries: int
    parameters: Parameters
    source: str
    problems: tuple[Problem, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[Rank, ...] = ()
    answers: tuple[Answer, ...] = ()
    advice: Advice | None = None
    next_way: Way | None = None  # the best that fits, where this job does not surely fit
    bill: Bill | None = None  # of a dataset, where one was named
    run: WholeRun | None = None  # over real lengths, where they were named
    squeezed: int | None = (
        None  # what the allocator holds at most where it had to give back its cache on this GPU
    )
    assumed: Mapping[str, Any] = field(default_factory=dict)  # options that nobody named
    script: Script | None = (
        None  # then `model` has only its name, and `job` nothing but the allocator's options
    )

    @property
    def fits(self) -> bool:
        """Whether a run is worth trying: `tight` means that memfit does not know."""
        return self.verdict != "no"

    @property
    def gpu(self) -> GPU | None:
        return None if self.cluster is None else self.cluster.gpu

    @property
    def outside(self) -> int:
        """Bytes outside the allocator: the middle of the ranges of the CUDA context and of NCCL."""
        return middle(self.context) + middle(self.nccl)

    @property
    def held(self) -> int:
        """Reserved bytes, or the peak of allocated bytes if the allocator was not replayed."""
        return self.memory.allocated if self.memory.reserved is None else self.memory.reserved

    @property
    def reach(self) -> int:
        """Upper end of the band on live bytes alone, which every allocator needs."""
        return _reach(self.memory.allocated, self.context.high + self.nccl.high)

    @property
    def device(self) -> int:
        return self.held + self.outside

    @cached_property
    def time(self) -> Duration | None:
        """Of one optimizer step, from the same tape, written short, and those of a pipeline's other
        stages; None where that is not known: inference, a trace, no GPU or link named."""
        if self.cluster is None or self.script or not self.job.training or self.source != "formula":
            return None
        pp, ranks = self.strategy.pp, [rank for rank, _ in self.strategy.distinct()]
        stages = alike(pp, len(self.model.layers)) if pp is not None and pp.size > 1 else (0,)
        own = self.strategy.rank * len(ranks) // self.strategy.ranks
        tapes = {
            stage: self._short
            if stage == own
            else lower(
                self.model,
                self.job,
                dataclasses.replace(self.strategy, rank=ranks[stage]),
                self.cluster,
                compact=True,
            )
            for stage in dict.fromkeys(stages)
        }
        return step_time(
            [(stage, tapes[stage]) for stage in stages],
            self.memory,
            self.cluster,
            self.job,
            self.strategy,
            (self.parameters.total, self.parameters.trainable),
            self.model.dtype,
        )

    @cached_property
    def generation(self) -> Generation | None:
        """How long it takes, where tokens are generated; None as `time` is."""
        if self.cluster is None or self.script or self.job.training or self.source != "formula":
            return None
        return generation_time(self._short, self.cluster, self.job, self.strategy)

    @cached_property
    def kernels(self) -> tuple[Alike, ...]:
        """The kernels behind `time` or `generation` on this rank; empty if neither is known."""
        if self.cluster is None or (self.time is None and self.generation is None):
            return ()
        return kernels(self._short, self.cluster, self.job, self.strategy)

    @property
    def _short(self) -> Tape:
        """This rank's tape, one layer for many, where layers fold."""
        tape = self.memory.tape
        if tape.short is not None:
            return tape.short
        if tape.repeats or self.cluster is None or waits(self.job) or not foldable(self.strategy):
            return tape
        return lower(self.model, self.job, self.strategy, self.cluster, compact=True)

    @property
    def untimed(self) -> str:
        """The reason why the time is not known; empty if it is known, or if no GPU is given."""
        nothing = not self.job.training and self.job.new_tokens < 1
        if (
            self.cluster is None
            or self.script
            or nothing
            or self.source != "formula"
            or self.time is not None
            or self.generation is not None
        ):
            return ""
        return untold(self.memory.tape, self.cluster, self.strategy)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part, largest first; they sum to `device`. Without the last two they sum to
        `allocated`."""
        gaps = (
            {}
            if self.memory.fragmentation is None
            else {"fragmentation": self.memory.fragmentation}
        )
        links = {"nccl": middle(self.nccl)} if self.strategy else {}
        return {**self.memory.parts, **gaps, "context": middle(self.context), **links}


def estimate(
    model: Model,
    job: Job,
    cluster: Cluster | None = None,
    strategy: Strategy = ONE,
    *,
    producer: Producer | None = None,
    precise: bool = True,
    problems: tuple[Problem, ...] = (),
    total: int | None = None,
) -> Estimate:
    """`producer` writes the tape (default: the formulas). Not `precise`: live bytes only, identical
    layers walked once.

    `total`: the number of parameters where no family built the model; without it they are counted
    on the tape. Of several ranks whose memory differs, the answer is that of the worst; `ranks` has
    all.
    """
    _counted(cluster, strategy)
    alike = (
        strategy.distinct()
        if producer is not None
        else distinct(model, job, cluster, strategy, every=precise)
    )
    return _of_worst(
        alike,
        lambda rank: _of_rank(
            model,
            job,
            (cluster, dataclasses.replace(strategy, rank=rank)),
            producer,
            precise,
            problems,
            total,
        ),
    )


def of_worst_rank(model: Model, job: Job, cluster: Cluster, strategy: Strategy) -> Estimate:
    """As `estimate`, without looking at the rank that holds least."""
    _counted(cluster, strategy)
    return _of_worst(
        distinct(model, job, cluster, strategy, lightest=False),
        lambda rank: of_rank(model, job, cluster, dataclasses.replace(strategy, rank=rank)),
    )


def _of_worst(alike: Sequence[tuple[int, int]], answer: Callable[[int], Estimate]) -> Estimate:
    """Of ranks whose memory differs, with how many are like each."""
    found = [answer(rank) for rank, _ in alike]
    worst = max(found, key=lambda one: one.device)
    return dataclasses.replace(
        worst,
        ranks=tuple(
            Rank(
                rank=rank,
                alike=count,
                allocated=one.memory.allocated,
                device=one.device,
                verdict=one.verdict,
            )
            for (rank, count), one in sorted(zip(alike, found, strict=True), key=lambda one: one[0])
        ),
    )


def of_rank(
    model: Model,
    job: Job,
    cluster: Cluster | None,
    strategy: Strategy,
    *,
    producer: Producer | None = None,
) -> Estimate:
    """The answer for the rank that `strategy` names, whichever is the worst."""
    _counted(cluster, strategy)
    return _of_rank(model, job, (cluster, strategy), producer, True, (), None)


def _of_rank(
    model: Model,
    job: Job,
    place: Place,
    producer: Producer | None,
    precise: bool,
    problems: tuple[Problem, ...],
    total: int | None,
) -> Estimate:
    cluster, strategy = place
    gpu = None if cluster is None else cluster.gpu
    settings, tape, found = _simulated(model, job, place, producer, precise)
    outside, links = outside_of(job, place)
    room = None if gpu is None else room_of(gpu)
    limited = None
    if room and found.reserved is not None and found.reserved + outside.low > room[1]:
        limited = replay(
            tape, settings, max(0, room[1] - outside.low), total=total_of(settings, gpu)
        )
    regime = regime_of(job, place)
    band = band_of(found, outside, limited, regime)
    verdict = verdict_of(band, room, limited)
    program, notes = marked_program(model, job, gpu, strategy)
    known = parameters_of(
        marked_program(model, job, gpu)[0] if strategy else program, tape, total
    )  # of the whole model
    off = spread_of(regime).high
    advice = allocator_advice(tape, job, found, (band, room, verdict), off) if precise else ()
    return Estimate(
        model=model,
        job=job,
        cluster=cluster,
        strategy=strategy,
        memory=found,
        context=Span(outside.low - links.low, outside.high - links.high, outside.cite),
        nccl=links,
        usable=room,
        host=host(
            program,
            program.model.parameters if strategy and program.model.layers else known.total,
            pinned(tape, strategy) if waits(job) else 0,
            strategy.ranks if cluster is None else min(strategy.ranks, cluster.gpus_per_node),
        ),
        band=band,
        verdict=verdict,
        failure=failure_of(tape, limited),
        retries=0 if limited is None or limited.oom else limited.retries,
        squeezed=limited.peak_reserved
        if limited is not None and not limited.oom and limited.retries
        else None,
        parameters=known,
        source=tape.source,
        problems=tuple(
            dict.fromkeys((*problems, *notes, *assumptions_of(program), *tape.notes, *advice))
        ),
        versions=tape.versions,
    )


def pinned(tape: Tape, strategy: Strategy) -> int:
    from memfit.simulate.pinned_memory import parked

    return parked(tape, together=strategy.size("pp") > 1)


def surplus(
    model: Model,
    job: Job,
    cluster: Cluster,
    producer: Producer | None = None,
    *,
    strategy: Strategy = ONE,
    precise: bool = True,
) -> int:
    """By how much it does not fit: what the band reaches to, less what the GPU offers at least.
    `estimate` says `fits` where this is not positive. Not `precise`: the live peak against what it
    offers at most, so that nothing fits where this is positive."""
    _counted(cluster, strategy)
    alike = (
        strategy.distinct()
        if producer is not None
        else distinct(model, job, cluster, strategy, every=False)
    )
    return max(
        _beyond(model, job, (cluster, dataclasses.replace(strategy, rank=rank)), producer, precise)
        for rank, _ in alike
    )


def _beyond(
    model: Model,
    job: Job,
    place: tuple[Cluster, Strategy],
    producer: Producer | None,
    precise: bool,
) -> int:
    (outside, _), (low, high) = outside_of(job, place), room_of(place[0].gpu)
    if precise:
        held = _reserved(model, job, place, producer)
        return upper_end(held, outside, regime_of(job, place)) - low
    return _live(model, job, place, producer) + outside.low - high


def _reserved(model: Model, job: Job, place: Place, producer: Producer | None) -> int:
    """What the allocator holds at most; of formulas without their tape written out."""
    found = None
    if producer is None:
        settings = Settings.parse(job.alloc_conf, where="job.alloc_conf")
        total = total_of(settings, None if place[0] is None else place[0].gpu)
        with uncollected(), suppress(Unclear, NotImplementedError):
            asked = allocator_requests(model, job, *place)
            found = None if asked is None else reserved_peak(asked, settings, total=total)
    if found is None:
        found = _simulated(model, job, place, producer, True)[2].reserved
        assert found is not None
    return found


def shortfall(
    model: Model,
    job: Job,
    cluster: Cluster,
    strategy: Strategy = ONE,
) -> int:
    """What the band of the live peak alone, which no allocator falls short of, lacks: the formulas
    never say `fits` where this is positive."""
    place = cluster, strategy
    (outside, _), (low, _) = outside_of(job, place), room_of(cluster.gpu)
    return _reach(_live(model, job, place), outside.high) - low


def _live(
    model: Model,
    job: Job,
    place: Place,
    producer: Producer | None = None,
) -> int:
    """The most bytes that are alive."""
    with uncollected():
        return peaks(_tape(model, job, place, producer, False, LIVE_PASSES)).allocated


def _reach(live: int, outside: int) -> int:
    return round(spread().high * live) + outside


def _simulated(
    model: Model, job: Job, place: Place, producer: Producer | None, precise: bool
) -> tuple[Settings, Tape, Memory]:
    settings = Settings.parse(job.alloc_conf, where="job.alloc_conf")
    with uncollected():
        tape = _tape(model, job, place, producer, precise)
        run = _replayed(tape, settings, place[0]) if precise else None
    if run is not None and run.oom is not None:
        asked = f"one allocation of {run.oom.asked} bytes is larger than any device"
        raise InputError.one(asked, where="job", hint="use a smaller `batch` or `seq`")
    return settings, tape, memory(tape, run)


def _replayed(tape: Tape, settings: Settings, cluster: Cluster | None) -> Replay:
    total = total_of(settings, None if cluster is None else cluster.gpu)
    return once(
        (tape.events,),
        ("replay", settings, total),
        lambda: replay(tape, settings, total=total),
        lambda found: 1,
    )


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the cycle collector, which would look through a growing tape again and again: two
    fifths of the time, and nothing found."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _counted(cluster: Cluster | None, strategy: Strategy) -> None:
    gpus = strategy.ranks if cluster is None else cluster.gpus
    if gpus != strategy.ranks:
        message = (
            f"the layout has {strategy.ranks} ranks, but there "
            f"{'is 1 GPU' if gpus == 1 else f'are {gpus} GPUs'}"
        )
        raise InputError.one(
            message,
            where="use",
            hint="give both the GPUs and the layout, like `--gpu 8xh100-sxm --use fsdp=8`",
        )


def _tape(
    model: Model,
    job: Job,
    place: Place,
    producer: Producer | None,
    precise: bool,
    passes: int = PASSES,
) -> Tape:
    cluster, strategy = place
    if producer is not None:
        return producer(model, job, strategy, cluster)
    try:
        return lower(model, job, strategy, cluster, compact=not precise, passes=passes)
    except NotImplementedError as missing:
        raise InputError.one(
            f"not supported yet: {str(missing).partition('(')[0][:80] or 'this job'}",
            where="job",
            hint=TRACE,
        ) from missing


def band_of_replayed(found: Estimate, memory: Memory) -> Band:
    """For a run whose lengths were replayed: what is left is how far runs of one length are off."""
    regime = regime_of(dataclasses.replace(found.job, longest=0), (found.cluster, found.strategy))
    context, links = found.context, found.nccl
    outside = Span(context.low + links.low, context.high + links.high, context.cite)
    return band_of(memory, outside, None, regime)


__all__ = [
    "Advice",
    "Answer",
    "Band",
    "Estimate",
    "Failure",
    "Host",
    "Parameters",
    "Rank",
    "Rung",
    "Script",
    "Way",
    "band_of_replayed",
    "estimate",
    "of_rank",
    "shortfall",
    "surplus",
    "uncollected",
]
