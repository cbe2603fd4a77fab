"""How long a generation takes: the prompt's pass, then one pass a token, each as long as its
kernels or as the host needs to launch them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field
from itertools import pairwise

from memfit.hardware.rates import KERNELS, Rates
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.simulate.time import Calls, Meter, alone
from memfit.tape import Alloc, Comm, Compute, Mark, Tape

PASSES = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """`batch` sequences, each of `new_tokens` tokens: `prefill` makes the first one, each other
    takes `token` seconds on average, of which the GPU waits `waiting` for the host. A model that
    generates nothing makes one pass over `read` tokens of each sequence."""

    prefill: float
    token: float
    waiting: float
    batch: int
    new_tokens: int
    kernels: int  # of a token
    measured: bool
    origin: str = field(repr=False)
    read: int = 0

    @property
    def seconds(self) -> float:
        return self.prefill + self.token * (self.new_tokens - 1)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all sequences, or those that are read where none is new."""
        return self.batch * (self.new_tokens or self.read) / self.seconds


@dataclass(frozen=True)
class Pass:
    step: int
    device: float
    kernels: int
    eager: float  # seconds that the host needs for a kernel

    @property
    def seconds(self) -> float:
        return max(self.device, self.kernels * self.eager)


def generation(tape: Tape, rates: Rates, job: Job, *, calls: Calls = alone) -> Generation | None:
    """None where nothing is generated, or links or kernels are not known. The tape has some of the
    passes; between two of them time runs evenly."""
    told = frozenset(event.op for event in tape if type(event) is Compute)
    found = list(passes(tape, lambda: Meter(rates, told, calls, KERNELS.get(job.attention))))
    if (
        not told
        or not found
        or found[0][0] != "prefill"
        or any(meter.unknown for _, _, meter in found)
    ):
        return None
    known = [
        Pass(step, sum(meter.parts.values()), meter.kernels, rates.eager)
        for _, step, meter in found
    ]
    prefill, decodes = known[0], known[1:]
    return Generation(
        prefill=prefill.seconds,
        token=mean([(one.step, one.seconds) for one in decodes]),
        waiting=mean([(one.step, one.seconds - one.device) for one in decodes]),
        batch=job.batch * job.beams,
        new_tokens=job.new_tokens,
        kernels=round(mean([(one.step, one.kernels) for one in decodes])),
        measured=rates.measured,
        origin=rates.origin,
        read=0 if job.new_tokens else job.seq,
    )


def passes(tape: Tape, fresh: Callable[[], Meter]) -> Iterator[tuple[str, int, Meter]]:
    """(phase, number, what it takes) of every pass on the tape."""
    often = {
        place: repeat.times for repeat in tape.repeats for place in range(repeat.first, repeat.last)
    }
    now: tuple[str, int, Meter] | None = None
    for place, event in enumerate(tape):
        if type(event) is Mark:
            if now is None or now[:2] != (event.phase, event.step):
                if now is not None:
                    yield now
                now = (event.phase, event.step, fresh()) if event.phase in PASSES else None
        elif now is not None:
            times = often.get(place, 1)
            if type(event) is Alloc:
                now[2].block(event, times)
            elif type(event) is Compute:
                now[2].compute(event, times)
            elif type(event) is Comm:
                now[2].call(event, times)
    if now is not None:
        yield now


def mean(points: list[tuple[int, float]]) -> float:
    """Over the passes from the first to the last."""
    if len(points) < 2:
        return points[0][1] if points else 0.0
    area = sum(
        (after - before) * (first + second) / 2
        for (before, first), (after, second) in pairwise(points)
    )
    return area / (points[-1][0] - points[0][0])


__all__ = ["Generation", "generation"]
