"""A tape's time: every kernel by what it computes and moves, at the rates that GPUs were measured
to reach.

Kernels follow each other on one stream. Collectives on other streams run beside them and slow them
down: what does not fit behind the kernels of its phase is waited for. Those on the same stream are
waited for in full. A micro-batch takes no less than the host needs to launch its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import NamedTuple

from memfit.hardware.rates import KERNELS, NEWEST, TRAINED, Kernel, Rates
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.optimizers import OPTIMIZERS
from memfit.simulate.costs import TOGETHER, heads, moved
from memfit.simulate.host_step import Away
from memfit.simulate.peaks import spans
from memfit.tape import Alloc, Comm, Compute, Event, Mark, Phase, Tape

PASSES = ("forward", "backward")
# Products of weights that lie in fp8 blocks are Triton kernels of transformers' own, launched from
# Python (integrations/finegrained_fp8.py): published runs of small batches took 2 to 50 times as
# long as such weights take to be read, and nobody's table has the kernels.
UNMEASURED = frozenset({"fp8"})
Calls = Callable[[Comm], float | None]  # seconds of a collective; None: not known
BESIDE = "beside"  # what runs on other streams; what does not fit behind kernels is a part's
GRADIENTS = "_backward"  # ends the names of the kernels of attention's gradients
ALOUD = ("to_host", "to_device")  # activations that leave, and come back
BACKWARD = 2  # times the forward's arithmetic: a product's two gradients


@dataclass(frozen=True, kw_only=True)
class Duration:
    """One optimizer step of `tokens` tokens, on `ranks` GPUs together. `parts` sum to `seconds`;
    `host` among them is what is waited for there, `launch` what small kernels wait for it. `flops`
    are all that one of them computes, `model_flops` those of the passes without what checkpointing
    computes again: the backward twice the forward, less the gradients of weights that are not
    trained; `peak` is what the GPU could do of them in a second. `hidden`: seconds of communication
    and copies behind kernels."""

    seconds: float
    stepping: float  # of them, the optimizer's, with its collectives
    tokens: int
    ranks: int
    parts: Mapping[str, float]
    hidden: float
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

    @property
    def hfu(self) -> float:
        """Hardware flops utilization: with what checkpointing computes again, and attention's
        second product of scores."""
        return self.flops / self.seconds / self.peak


class Priced(NamedTuple):
    """A kernel or call of a `kind` of `Duration.parts`, or beside kernels: what it moves, how long
    one takes, and how often it is run."""

    kind: str
    event: Event
    moved: float
    seconds: float
    times: float


@dataclass
class Meter:
    """Adds up one phase. `told`: ops whose kernels write a Compute."""

    rates: Rates
    told: frozenset[str]
    calls: Calls
    attention: Kernel | None = None  # whose rate the job's option tells; None: the operator does
    parts: dict[str, float] = field(default_factory=dict)
    math: dict[str, float] = field(default_factory=dict)  # flops by the kind of arithmetic
    products: float = 0.0  # flops of products with weights
    beside: float = 0.0  # seconds of collectives on other streams
    copied: int = 0  # bytes to and from the host, on streams of their own
    kernels: int = 0
    unknown: bool = False  # a collective's links are, or how fast a product is
    before: int = 0  # the block made last,
    last: tuple[str, str, str] = ("", "", "")  # by its op, module and part
    made: Alloc | None = None  # and the largest one of attention since its last kernel
    listing: list[Priced] | None = None  # every kernel and call, where the working is asked for
    known: dict[tuple[float, float, str], float] = field(
        default_factory=dict
    )  # seconds of products, which layers have in common

    def add(self, kind: str, seconds: float, times: float, event: Event, moved: float) -> None:
        self.parts[kind] = self.parts.get(kind, 0.0) + seconds * times
        self.kernels += round(times)
        if self.listing is not None:
            self.listing.append(Priced(kind, event, moved, seconds, times))

    def wait(self, kind: str, seconds: float) -> None:
        self.parts[kind] = self.parts.get(kind, 0.0) + seconds
        self.kernels += 1

    def block(self, event: Alloc, times: float) -> None:
        if event.op == "partial_sums":  # 128 times as large as what is put by in it
            return
        if event.op in self.told:
            if (
                "attention" in event.op
                and event.part != "workspace"
                and (self.made is None or event.size > self.made.size)
            ):
                self.made = event
        elif event.op == "to_device":
            self.copied += round(event.size * times)
        elif event.op in TOGETHER and (event.op, event.where, event.part) == self.last:
            self.add(
                "memory",
                event.size / (self.rates.bandwidth * self.rates.copy),
                times,
                event,
                event.size,
            )
            self.kernels -= round(times)  # the kernel before writes this, too
        elif bytes := moved(event, self.before):
            self.add("memory", self.rates.moved(bytes), times, event, bytes)
        self.before, self.last = event.size, (event.op, event.where, event.part)

    def compute(self, event: Compute, times: float) -> None:
        self.math[event.math] = self.math.get(event.math, 0.0) + event.flops * times
        if "attention" in event.op and self.made is not None:
            name, backward = (
                event.op.removesuffix(GRADIENTS),
                event.op.endswith(GRADIENTS),
            )  # a recomputation stands in the backward, too
            width, values = heads(self.made)
            length = event.flops / (5 if backward else 2) / values
            kernel, shape = self.attention or KERNELS.get(name, NEWEST), (width, round(length))
            seconds = self.rates.attended(
                kernel, event.flops, event.bytes, event.math, shape, backward=backward
            )
            self.add("attention", seconds, times, event, event.bytes)
            self.made = None
        elif event.math in UNMEASURED:
            self.unknown = True
        elif event.flops:
            self.products += event.flops * times
            key = event.flops / event.kernels, event.bytes / event.kernels, event.math
            if key not in self.known:
                self.known[key] = self.rates.product(*key)
            self.add("matmul", self.known[key] * event.kernels, times, event, event.bytes)
            self.kernels += round(times * (event.kernels - 1))
        else:
            self.add("memory", self.rates.moved(event.bytes), times, event, event.bytes)

    def call(self, event: Comm, times: float) -> None:
        if (
            event.group == "host" and event.op in ALOUD and not event.stream
        ):  # on the stream that computes
            if self.rates.host is None:
                self.unknown = True
            else:
                self.add("host", event.size / self.rates.host, times, event, event.size)
            return
        if event.group == "host":
            self.copied += round(event.size * times)
            return
        seconds = self.calls(event)
        if seconds is None:
            self.unknown = True
        elif event.stream:
            self.beside += seconds * times
            if self.listing is not None:
                self.listing.append(Priced(BESIDE, event, event.size, seconds, times))
        else:
            self.add("communication", seconds, times, event, event.size)

    def finish(self) -> float:
        """Kernels are slower while a collective runs beside them, for it takes processors; what
        does not fit behind them is waited for. Returns the seconds of collectives that cost none.
        """
        kernels = sum(self.parts.values())
        waited = max(self.beside, kernels + self.rates.taken * self.beside) - kernels
        copies = self.copied / self.rates.host if self.copied and self.rates.host else 0.0
        late = max(
            0.0, copies + (self.beside if copies and self.rates.shared else 0.0) - kernels - waited
        )
        if waited:
            self.wait("communication", waited)
        if late:
            self.wait("host", late)
        return self.beside - waited + copies - late

    @property
    def flops(self) -> float:
        return sum(self.math.values())


@dataclass(frozen=True, kw_only=True)
class Spread:
    """`shares`: ranks with batches of their own, of `ranks` in all. `trained`: the share of the
    weights whose gradients are wanted."""

    shares: int = 1
    ranks: int = 1
    trained: float = 1.0


ONE = Spread()


def alone(event: Comm) -> float | None:
    """The calls of one GPU."""
    return None


def add_parts(
    parts: dict[str, float],
    more: Mapping[str, float],
    often: float,
    named: Callable[[str], str] = str,
) -> None:
    """Add the seconds of each kind, so many times, under another name."""
    for kind, seconds in more.items():
        name = named(kind)
        parts[name] = parts.get(name, 0.0) + often * seconds


def duration(
    tape: Tape,
    rates: Rates,
    job: Job,
    trained: int,
    *,
    calls: Calls = alone,
    spread: Spread = ONE,
    turns: float = 0,
    host: Away | None = None,
) -> Duration | None:
    """Of the last optimizer step on the tape; None where it has none, or links or kernels are not
    known. `trained`: bytes of the parameters that the optimizer of this rank steps on the GPU,
    `host`: what the host does instead; `turns`: for how many passes each pass on the tape stands,
    where the schedule of a pipeline tells."""
    told = frozenset(event.op for event in tape if type(event) is Compute)
    steps = [event.step for event in tape if type(event) is Mark and event.phase == "step"]
    if not steps or not told:
        return None
    known: dict[tuple[float, float, str], float] = {}
    micro, stepping = walk(
        tape, max(steps), lambda: Meter(rates, told, calls, KERNELS.get(job.attention), known=known)
    )
    if not micro:
        return None
    times = each(job, len(micro), turns)
    passes = [
        (often, meter)
        for often, phases in zip(times, micro, strict=True)
        for meter in phases.values()
    ]
    if any(
        meter.unknown or (meter.copied and rates.host is None)
        for _, meter in (*passes, (1, stepping))
    ):
        return None
    if host is not None:
        if rates.host is None:
            return None
        for phases in micro:
            phases["backward"].copied += host.gradients
        stepping.wait("host", host.seconds + host.weights / rates.host)
    elif trained:
        stepping.wait("optimizer", rates.moved(OPTIMIZERS[job.optimizer].moved * trained))
    hidden = sum(often * meter.finish() for often, meter in passes) + stepping.finish()
    late = sum(
        often * waiting(phases, rates.eager * TRAINED)
        for often, phases in zip(times, micro, strict=True)
    )
    parts = {"launch": late} if late else {}
    for often, meter in passes:
        add_parts(parts, meter.parts, often)
    apart = ("communication", "host")
    add_parts(parts, stepping.parts, 1.0, lambda kind: kind if kind in apart else "optimizer")
    forward = [(often, phases["forward"]) for often, phases in zip(times, micro, strict=True)]
    return Duration(
        seconds=sum(parts.values()),
        stepping=sum(stepping.parts.values()),
        tokens=job.batch * job.seq * job.accumulate * spread.shares,
        ranks=spread.ranks,
        parts=dict(sorted(parts.items(), key=lambda one: -one[1])),
        hidden=hidden,
        flops=sum(often * meter.flops for often, meter in passes) + stepping.flops,
        model_flops=sum(
            often * ((1 + BACKWARD) * meter.flops - spared(job, spread) * meter.products)
            for often, meter in forward
        ),
        peak=rates.rate(
            max(forward[0][1].math.items(), key=lambda one: one[1], default=("bf16", 0))[0]
        ),
        kernels=round(sum(often * meter.kernels for often, meter in passes)) + stepping.kernels,
        measured=rates.measured,
        origin=rates.origin,
    )


def each(job: Job, written: int, turns: float) -> list[float]:
    """How often each micro-batch on the tape is run: of an accumulation it has the first and the
    last, behind which gradients are summed up; those between are like the first."""
    if turns:
        return [turns] * written
    return (
        [float(job.accumulate)]
        if written == 1
        else [job.accumulate - written + 1.0] + [1.0] * (written - 1)
    )


def spared(job: Job, spread: Spread) -> float:
    """Of a product's two gradients those that nobody asks for: its frozen weight's, and its input's
    where all below is frozen, too."""
    return (2 if job.method == "freeze" else 1) * (1 - spread.trained)


def waiting(phases: Mapping[str, Meter], eager: float) -> float:
    """What the GPU waits in a micro-batch for the host, which runs ahead of it wherever a kernel is
    longer than its launch."""
    return max(
        0.0, sum(meter.kernels * eager - sum(meter.parts.values()) for meter in phases.values())
    )


def walk(tape: Tape, step: int, fresh: Callable[[], Meter]) -> tuple[list[dict[str, Meter]], Meter]:
    """Every event of the step, as often as it happens: of each micro-batch by pass, and of the
    optimizer."""
    micro: list[dict[str, Meter]] = []
    stepping = fresh()
    phase: Phase = "load"
    meter: Meter | None = None
    first = next(
        (place for place, event in enumerate(tape) if type(event) is Mark and event.step == step), 0
    )
    for span in spans(tape):
        times = span.times
        for event in tape.events[max(first, span.first) : span.last]:
            if type(event) is Mark:
                mine = event.step == step
                if mine and event.phase == "forward" and (phase != "forward" or not micro):
                    micro.append({name: fresh() for name in PASSES})
                phase = event.phase
                meter = (
                    None
                    if not mine
                    else stepping
                    if phase == "step"
                    else micro[-1].get(phase)
                    if micro
                    else None
                )
            elif meter is None:
                continue
            elif type(event) is Alloc:
                meter.block(event, times)
            elif type(event) is Compute:
                meter.compute(event, times)
            elif type(event) is Comm:
                meter.call(event, times)
    return micro, stepping


__all__ = ["Duration", "duration"]
