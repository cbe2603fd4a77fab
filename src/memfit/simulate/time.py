"""A tape's time: every kernel by what it computes and moves, at the rates that GPUs were measured to reach.

Kernels follow each other on one stream. What the host does between them a tape does not tell: a step of many small kernels takes longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memfit.hardware.rates import Rates
from memfit.job import Job
from memfit.optimizers import OPTIMIZERS
from memfit.simulate.costs import heads, in_place, moved
from memfit.tape import Alloc, Compute, Mark, Tape

PHASES = ("forward", "backward", "step")


@dataclass(frozen=True, kw_only=True)
class Duration:
    """One optimizer step of `tokens` tokens. `parts` sum to `seconds`. `flops` are all that is computed, `model_flops` those of the passes
    without what checkpointing computes again, the backward counted twice the forward; `peak` is what the GPU could do of them in a second."""

    seconds: float
    tokens: int
    parts: Mapping[str, float]
    flops: float
    model_flops: float
    peak: float
    kernels: int
    measured: bool  # the rates are this GPU's, not those of one of its kind
    origin: str = field(repr=False)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model flops utilization."""
        return self.model_flops / self.seconds / self.peak


@dataclass
class Meter:
    """Adds up one phase."""

    rates: Rates
    told: frozenset[str]  # ops whose kernels write a Compute
    parts: dict[str, float] = field(default_factory=dict)
    math: dict[str, float] = field(default_factory=dict)  # flops by the kind of arithmetic
    flops: float = 0.0
    kernels: int = 0
    before: int = 0  # the block made last
    made: Alloc | None = None  # and the last one of attention

    def add(self, kind: str, seconds: float, times: float) -> None:
        self.parts[kind] = self.parts.get(kind, 0.0) + seconds * times
        self.kernels += round(times)

    def block(self, event: Alloc, times: float) -> None:
        if event.op in self.told:
            if "attention" in event.op and event.part != "workspace":
                self.made = event
            self.before = event.size
            return
        if bytes := moved(event, self.before):
            self.add("memory", self.rates.moved(bytes), times)
        self.before = event.size

    def compute(self, event: Compute, times: float, *, backward: bool) -> None:
        self.flops += event.flops * times
        self.math[event.math] = self.math.get(event.math, 0.0) + event.flops * times
        if "attention" in event.op and self.made is not None:
            width, values = heads(self.made)
            length = event.flops / (5 if backward else 2) / values
            seconds = self.rates.attended(event.flops, event.bytes, event.math, width, round(length), backward=backward)
            self.add("attention", seconds, times)
        elif event.flops:
            self.add("matmul", self.rates.product(event.flops, event.bytes, event.math), times)
        else:
            self.add("memory", self.rates.moved(event.bytes), times)


def duration(tape: Tape, rates: Rates, job: Job, trained: int) -> Duration | None:
    """Of the last optimizer step on the tape; None where it has none. `trained`: bytes of the parameters that the optimizer steps."""
    told = frozenset(event.op for event in tape if type(event) is Compute)
    step = max((event.step for event in tape if type(event) is Mark and event.phase == "step"), default=None)
    if step is None or not told:
        return None
    passes, stepping, forward = Meter(rates, told), Meter(rates, told), 0.0
    often = {place: repeat.times for repeat in tape.repeats for place in range(repeat.first, repeat.last)}
    phase, now, micro = "", -2, 0
    for place, event in enumerate(tape):
        if type(event) is Mark:
            micro += event.step == step and event.phase == "forward" and phase != "forward"
            phase, now = event.phase, event.step
        elif now == step and phase in PHASES:
            meter, times = stepping if phase == "step" else passes, often.get(place, 1)
            if type(event) is Alloc:
                meter.block(event, times)
            elif type(event) is Compute:
                forward += event.flops * times if phase == "forward" else 0
                meter.compute(event, times, backward=phase == "backward")
    share = job.accumulate / max(1, micro)  # of an accumulation the tape has two micro-batches
    parts = {kind: seconds * share for kind, seconds in passes.parts.items()}
    optimizer = OPTIMIZERS[job.optimizer]
    parts["optimizer"] = sum(stepping.parts.values()) + rates.moved(in_place(optimizer.name, len(optimizer.states)) * trained)
    return Duration(
        seconds=sum(parts.values()),
        tokens=job.batch * job.seq * job.accumulate,
        parts=dict(sorted(parts.items(), key=lambda one: -one[1])),
        flops=passes.flops * share + stepping.flops,
        model_flops=3 * forward * share,
        peak=rates.rate(max(passes.math, key=lambda math: passes.math[math], default="bf16")),
        kernels=round(passes.kernels * share) + stepping.kernels,
        measured=rates.measured,
        origin=rates.origin,
    )


__all__ = ["Duration", "duration"]
