"""The working of a step's time: kernels and calls that are alike, what each computes and moves, and
how long it takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from memfit.hardware.rates import KERNELS, Rates
from memfit.job import Job
from memfit.simulate.generating import passes
from memfit.simulate.memory import starred
from memfit.simulate.time import BESIDE, Calls, Meter, Priced, each, walk
from memfit.tape import Alloc, Comm, Compute, Mark, Tape

ALONE = ("communication", "host", BESIDE)  # these stay apart in the optimizer's step, too


class Alike(NamedTuple):
    """Kernels of one part of the time that differ in their layer alone: `flops`, bytes `moved` and
    `seconds` of one, run `times` times. `ranks`: that a call is among."""

    part: str
    phase: str
    where: str
    op: str
    math: str
    flops: int
    moved: int
    seconds: float
    ranks: int
    times: int

    @property
    def total(self) -> float:
        return self.seconds * self.times


def step_kernels(
    tape: Tape, rates: Rates, job: Job, calls: Calls, *, turns: float = 0
) -> tuple[Alike, ...]:
    """Of the last optimizer step on the tape, all its micro-batches together."""
    told = frozenset(event.op for event in tape if type(event) is Compute)
    step = max(
        (event.step for event in tape if type(event) is Mark and event.phase == "step"),
        default=None,
    )
    if step is None:
        return ()
    micro, stepping = walk(
        tape, step, lambda: Meter(rates, told, calls, KERNELS.get(job.attention), listing=[])
    )
    often = each(job, len(micro), turns)
    listed = [
        (phase, times, meter)
        for times, phases in zip(often, micro, strict=True)
        for phase, meter in phases.items()
    ]
    return gathered(
        (phase, times, one)
        for phase, times, meter in [*listed, ("step", 1.0, stepping)]
        for one in meter.listing or ()
    )


def token_kernels(tape: Tape, rates: Rates, job: Job, calls: Calls) -> tuple[Alike, ...]:
    """Of the prompt's pass and of the last token's."""
    told = frozenset(event.op for event in tape if type(event) is Compute)
    found = list(
        passes(tape, lambda: Meter(rates, told, calls, KERNELS.get(job.attention), listing=[]))
    )
    ends = found[:1] + found[1:][-1:]
    return gathered((phase, 1.0, one) for phase, _, meter in ends for one in meter.listing or ())


def gathered(listed: Iterable[tuple[str, float, Priced]]) -> tuple[Alike, ...]:
    """The longest of all first."""
    counts: dict[Alike, float] = defaultdict(float)
    for phase, often, one in listed:
        counts[key(phase, one)] += often * one.times
    found = [kind._replace(times=round(count)) for kind, count in counts.items()]
    return tuple(sorted(found, key=lambda one: (-one.total, one)))


def key(phase: str, one: Priced) -> Alike:
    event, part = one.event, "optimizer" if phase == "step" and one.kind not in ALONE else one.kind
    assert isinstance(event, (Alloc, Compute, Comm))
    flops, math = (event.flops, event.math) if isinstance(event, Compute) else (0, "")
    ranks = event.ranks if isinstance(event, Comm) else 0
    return Alike(
        part,
        phase,
        starred(event.where),
        event.op,
        math,
        flops,
        round(one.moved),
        one.seconds,
        ranks,
        0,
    )


__all__ = ["Alike", "step_kernels", "token_kernels"]
