"""The likely range of an answer, and its verdict: does what a job holds fit what a GPU offers?"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from memfit.answers import (
    Band,
    Failure,
)
from memfit.band import (
    ENOUGH_CASES,
    ENOUGH_SOURCES,
    Regime,
    Spread,
    evidence,
    share_between,
    spread,
    spread_of,
    varied,
)
from memfit.errors import InputError, Problem
from memfit.hardware import (
    GPU,
    Cluster,
    Span,
    communicators,
    context,
    usable,
)
from memfit.job import Job
from memfit.simulate.memory import Memory, moment
from memfit.simulate.replay import Replay, replay
from memfit.simulate.settings import Settings
from memfit.strategy import Strategy
from memfit.tape import Tape

# What depends on the code that runs; the rest (weights, gradients, states, an optimizer's copies)
# follows from shapes alone.
PASSING = ("activations", "logits", "temporaries", "workspace", "inputs", "communication")
Place: TypeAlias = "tuple[Cluster | None, Strategy]"  # which GPUs, and how they share the work
_UNKNOWN = GPU(id="unknown", name="unknown", memory=1, memory_range=(1, 1))


def outside_of(job: Job, place: Place) -> tuple[Span, Span]:
    """What lives outside torch's allocator, and of that what NCCL holds."""
    cluster, strategy = place
    gpu = _UNKNOWN if cluster is None else cluster.gpu
    bare = context(gpu)
    if not strategy:
        return bare, Span(0, 0, "")
    groups = tuple((ranks, stride) for _, ranks, stride in strategy.groups)
    links = communicators(
        gpu,
        groups,
        strategy.ranks if cluster is None else cluster.gpus_per_node,
        job.version("torch"),
    )
    return Span(bare.low + links.low, bare.high + links.high, bare.cite), links


def middle(span: Span) -> int:
    return (span.low + span.high) // 2


def total_of(settings: Settings, gpu: GPU | None) -> int | None:
    """Only a memory fraction asks for the memory of the device."""
    if settings.memory_fraction >= 1:
        return None
    if gpu is None:
        raise InputError.one(
            "a memory fraction needs a GPU",
            where="job.alloc_conf",
            hint="add `--gpu`",
        )
    return gpu.memory


def room_of(gpu: GPU) -> tuple[int, int]:
    """What the GPU offers to one process: at least, at most."""
    return usable(gpu), max(usable(gpu), gpu.memory_range[1] - gpu.held)


def regime_of(job: Job, place: Place) -> Regime:
    """What published figures an answer is compared with."""
    cluster, strategy = place
    counter = "reserved" if cluster is None else "device"
    return Regime(counter, strategy.ranks > 1, job.longest > job.seq)


def band_of(found: Memory, outside: Span, limited: Replay | None, regime: Regime) -> Band:
    """Below, figures were some per cent less than predicted, but the allocator cannot give back
    what is live; above, it keeps what it caches. Both ends move by as much as published cases were
    off."""
    said = spread_of(regime)
    least = round(said.floor * found.allocated) + outside.low
    origin = _origin(said, regime)
    if found.reserved is None:
        passing = sum(found.parts.get(part, 0) for part in PASSING)
        high = round(said.high * found.allocated) + outside.high + passing // 4
        return Band(
            low=least,
            high=high,
            least=least,
            origin=(f"{origin}; plus a quarter of the temporary memory for allocator gaps"),
        )
    held = found.reserved if limited is None or limited.oom else limited.peak_reserved
    predicted = held + (outside.low + outside.high) // 2
    return Band(
        low=max(least, round(said.low * predicted)),
        high=upper_end(max(held, found.reserved), outside, regime),
        least=least,
        origin=f"{origin}; and the context's own range",
    )


def upper_end(reserved: int, outside: Span, regime: Regime) -> int:
    return round(spread_of(regime).high * reserved) + outside.high


def _origin(said: Spread, regime: Regime) -> str:
    """What the band rests on, and whether that is evidence for a figure like this one."""
    every = spread()
    off = f"{100 * every.low - 100:+.0f} to {100 * every.high - 100:+.0f} %"
    cases, sources = evidence(regime)
    words = (
        f"{100 * share_between(every.low, every.high):.0f} % of {every.cases} published peaks "
        f"({every.sources} sources, weighted equally) are {off} from the prediction"
    )
    if said.high > every.high:
        long = varied()
        words += (
            f"; {len(long)} of batches of varying lengths "
            f"({_sources(len({one.source for one in long}))}) are up to "
            f"{100 * said.high - 100:+.0f} %"
        )
    if cases >= ENOUGH_CASES and sources >= ENOUGH_SOURCES:
        return words
    known = f"{cases} of {_sources(sources)}" if cases else "none"
    return f"{words}; published runs of this kind ({regime}): {known}"


def _sources(count: int) -> str:
    return "1 source" if count == 1 else f"{count} sources"


def verdict_of(
    band: Band, room: tuple[int, int] | None, limited: Replay | None = None
) -> str | None:
    """What a band says of a GPU. `limited`: a replay with no more memory than that."""
    if room is None:
        return None
    if band.least > room[1] or (limited is not None and limited.oom is not None):
        return "no"
    return "fits" if band.high <= room[0] else "tight"


def allocator_advice(
    tape: Tape,
    job: Job,
    found: Memory,
    judged: tuple[Band, tuple[int, int] | None, str | None],
    off: float,
) -> tuple[Problem, ...]:
    """Where the allocator's gaps decide, whether expandable segments would turn the verdict: they
    leave next to none. `off`: what the band's upper end makes of a byte that is held."""
    band, room, verdict = judged
    if room is None or verdict == "fits" or job.alloc_conf or found.reserved is None:
        return ()

    def without(saved: int) -> str | None:
        return verdict_of(dataclasses.replace(band, high=band.high - round(off * saved)), room)

    if without(found.reserved - found.allocated) == verdict:  # the most that could be saved
        return ()
    saved = found.reserved - replay(tape, Settings(expandable_segments=True)).peak_reserved
    better = without(saved)
    if saved <= 0 or better == verdict:
        return ()
    message = f"with expandable segments it {'fits' if better == 'fits' else 'may fit'}"
    return (
        Problem(
            message=message,
            where="job.alloc_conf",
            hint="`--alloc-conf expandable_segments:True`",
            level="note",
        ),
    )


def failure_of(tape: Tape, limited: Replay | None) -> Failure | None:
    if limited is None or limited.oom is None:
        return None
    return Failure(
        at=moment(tape, limited.oom.event or 0), asked=limited.oom.asked, left=limited.oom.free
    )
