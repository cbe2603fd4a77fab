"""Changes that make a job fit, best first: the same work for less memory, shorter sequences,
another method, host memory, other GPUs. Each way is a ladder of changes, with the memory that each
frees and what it costs.

A ladder is checked against a lower bound first, then by the live peak, which is quick; the first
that may do is replayed through the allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from itertools import combinations, islice
from typing import Annotated, Any, NamedTuple

from memfit.answers import Advice, Rung, Way
from memfit.band import spread
from memfit.constants import setting
from memfit.errors import InputError
from memfit.estimate import Estimate, estimate, shortfall, surplus
from memfit.hardware import GPU, Cluster, apple_gpus, nvidia_cards, usable
from memfit.hardware.outside import context
from memfit.hardware.prices import price
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.optimizers import OPTIMIZERS
from memfit.plan.memory_lower_bounds import Holds
from memfit.plan.relayouts import relayouts
from memfit.program import Program
from memfit.strategy import FSDP, ONE, Strategy
from memfit.techniques import apply
from memfit.techniques.activation_offload import HOOKS

LONGEST: Annotated[int, setting("changes beside the one that makes a way, at most")] = 3
SHORTEST: Annotated[int, setting("tokens below which no shorter sequence is advised")] = 512
COUNTS: Annotated[tuple[int, ...], setting("GPUs of one machine that are tried")] = (2, 4, 8)
FEWER_BITS = 3  # the pain of numbers with fewer bits
# The ways, best first: what each gives up. `same` gives up nothing but time, or a few bits of the
# optimizer's states.
KINDS = ("same", "shorter", "smaller", "method", "host", "hardware")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change to the job or (`strategy`) to how the GPUs share it. `kind` is one of `KINDS`;
    `pain` orders the changes of one kind: 0 nothing changes, 1 other kernels, 2 time, 3 fewer
    bits."""

    name: str
    kind: str = "same"
    pain: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)
    strategy: Strategy | None = None

    @property
    def about(self) -> tuple[str, ...]:
        """The options it decides."""
        return (*self.changes, *(() if self.strategy is None else ("use",)))


class Setting(NamedTuple):
    job: Job
    strategy: Strategy


def changes(job: Job, strategy: Strategy = ONE) -> Iterator[Change]:
    """Every change to this job that may save memory, the least painful of each kind first."""
    if not job.alloc_conf:
        yield Change(
            name="--alloc-conf expandable_segments:True",
            changes={"alloc_conf": "expandable_segments:True"},
        )
    if job.training:
        yield from kernels(job)
        yield from numbers(job)
        for one in relayouts(strategy):
            kind = "host" if one.host else "same"
            yield Change(name=one.name, kind=kind, pain=2, strategy=one.strategy)
        yield from methods(job)
    else:
        yield from answering(job)
    yield from shorter(job)


def kernels(job: Job) -> Iterator[Change]:
    """The same arithmetic by other code, or in other pieces."""
    if job.checkpointing != "full":
        yield Change(name="--checkpointing full", pain=2, changes={"checkpointing": "full"})
    if job.loss == "plain":
        yield Change(name="--loss liger", pain=1, changes={"loss": "liger"})
    if not job.liger:
        yield Change(name="--liger", pain=1, changes={"liger": True})
    fused = f"{job.optimizer}_fused"
    if fused in OPTIMIZERS:
        yield Change(name=f"--optimizer {fused}", pain=1, changes={"optimizer": fused})
    if not job.packing and job.hugging:
        yield Change(name="--packing", pain=1, changes={"packing": True})
    batch = job.batch
    while batch > 1 and batch % 2 == 0:
        batch //= 2
        times = job.accumulate * job.batch // batch
        yield Change(
            name=f"--batch {batch} --accumulate {times}",
            pain=2,
            changes={"batch": batch, "accumulate": times},
        )
    if job.activation_offload == "none" and (hook := HOOKS.get(job.framework)):
        yield Change(
            name=f"--activation-offload {hook}",
            kind="host",
            pain=2,
            changes={"activation_offload": hook},
        )


def numbers(job: Job) -> Iterator[Change]:
    """The same work in fewer bits."""
    small = f"{job.optimizer.removesuffix('_fused').removesuffix('_loop')}_8bit"
    if small in OPTIMIZERS:
        yield Change(name=f"--optimizer {small}", pain=FEWER_BITS, changes={"optimizer": small})
    narrow = {"fp32": "bf16", "autocast-bf16": "bf16-autocast", "autocast-fp16": "fp16-autocast"}
    if (name := narrow.get(job.precision)) is not None:
        yield Change(name=f"--precision {name}", pain=FEWER_BITS, changes={"precision": name})


def methods(job: Job) -> Iterator[Change]:
    """Adapters instead of full fine-tuning, next to 16-bit weights."""
    narrow = {"autocast-bf16": "bf16-autocast", "autocast-fp16": "fp16-autocast"}
    values: dict[str, Any] = {}
    if (name := narrow.get(job.precision)) is not None:
        values["precision"] = name
    for method in {"full": ("lora", "qlora"), "lora": ("qlora",)}.get(job.method, ()):
        yield Change(name=f"--method {method}", kind="method", changes={"method": method, **values})


def answering(job: Job) -> Iterator[Change]:
    if job.quant == "none":
        for quant in ("int8", "nf4"):
            yield Change(name=f"--quant {quant}", kind="method", changes={"quant": quant})
    if job.precision == "fp32":
        yield Change(name="--precision bf16", pain=FEWER_BITS, changes={"precision": "bf16"})
    batch = job.batch
    while batch > 1:
        batch //= 2
        yield Change(name=f"--batch {batch}", kind="smaller", changes={"batch": batch})


def shorter(job: Job) -> Iterator[Change]:
    seq = job.seq
    while seq >= 2 * SHORTEST:
        seq //= 2
        yield Change(name=f"--seq {seq}", kind="shorter", changes={"seq": seq})


def advice(model: Model, job: Job, cluster: Cluster, strategy: Strategy = ONE) -> Advice:
    """By formulas, whatever answers the job itself."""
    if not model.layers:
        raise InputError.one(
            f"`--advise` needs formulas, and `{model.family}` has none",
            where="advise",
            hint="remove `--advise`",
        )
    if surplus(model, job, cluster, strategy=strategy) <= 0:
        return Advice(ways=(), helps=True)
    found = tuple(ways(model, Setting(job, strategy), cluster))
    return Advice(ways=found, helps=bool(found))


def next_way(model: Model, job: Job, cluster: Cluster, strategy: Strategy = ONE) -> Way | None:
    """The best way alone, without the working of its rungs."""
    if not model.layers:
        return None
    return next(ways(model, Setting(job, strategy), cluster, rungs=False), None)


def ways(model: Model, setting: Setting, cluster: Cluster, *, rungs: bool = True) -> Iterator[Way]:
    """One way of each kind, the best first. Without `rungs` a way has only its end."""
    weighed = Weighed(model, cluster)
    pool = list(changes(*setting))
    same = [one for one in pool if one.kind == "same"]
    for kind in KINDS:
        heads = [one for one in pool if one.kind == kind] if kind != "same" else [None]
        ladders_of_kind = (
            least(weighed, setting, one, same)
            for one in heads
            if one is None or weighed.answers(climbed(setting, (one,)))
        )
        ladder = next(filter(None, ladders_of_kind), None)
        if ladder is not None:
            yield way(model, setting, cluster, kind, ladder, rungs)
    yield from islice(hardware(model, setting, cluster), 1 if not rungs else None)


def least(
    weighed: Weighed, setting: Setting, head: Change | None, same: list[Change]
) -> tuple[Change, ...] | None:
    """The shortest ladder that begins with `head` and fits, the least painful of that length. One
    that keeps every bit comes before any that does not."""
    first = () if head is None else (head,)
    taken = {name for one in first for name in one.about}
    pool = [one for one in same if not taken & set(one.about)]
    exact = [one for one in pool if one.pain < FEWER_BITS]
    return shortest(weighed, setting, first, exact) or (
        None if exact == pool else shortest(weighed, setting, first, pool)
    )


def shortest(
    weighed: Weighed, setting: Setting, first: tuple[Change, ...], pool: list[Change]
) -> tuple[Change, ...] | None:
    """The shortest ladder of `pool` behind `first` that fits. One change is tried before any two,
    and often ends the search before all of them are looked at."""
    if first and weighed.fits(climbed(setting, first)):
        return first  # though together with others it may not
    for alone in ladders(pool, 1):
        if weighed.answers(climbed(setting, alone)) and weighed.fits(
            climbed(setting, (*first, *alone))
        ):
            return (*first, *alone)
    pool = [one for one in pool if weighed.answers(climbed(setting, (one,)))]
    strongest: dict[tuple[str, ...], Change] = {one.about: one for one in pool}
    needed: set[tuple[str, ...]] = set()
    together = climbed(setting, (*first, *strongest.values()))
    if weighed.answers(together):
        without = {
            about: weighed.fits(
                climbed(
                    setting, (*first, *(one for one in strongest.values() if one.about != about))
                )
            )
            for about in strongest
        }
        if not weighed.fits(together):  # at most one of them does harm
            harmful = next((about for about, fits in without.items() if fits), None)
            left = [one for one in pool if one.about != harmful]
            return None if harmful is None else shortest(weighed, setting, first, left)
        needed = {about for about, fits in without.items() if not fits}
    for length in range(max(len(needed), 2), LONGEST + 1):
        for some in ladders(pool, length):
            if needed <= {one.about for one in some} and weighed.fits(
                climbed(setting, (*first, *some))
            ):
                return (*first, *some)
    return None


def ladders(pool: list[Change], length: int) -> list[tuple[Change, ...]]:
    """All ladders of `length` rungs, no two about the same option, the least painful first."""
    found = [
        ladder
        for ladder in combinations(pool, length)
        if len(names := [name for one in ladder for name in one.about]) == len(set(names))
    ]
    return sorted(
        found,
        key=lambda ladder: (
            max((one.pain for one in ladder), default=0),
            sum(one.pain for one in ladder),
            -ladder[-1].changes.get("batch", 0) if ladder else 0,
        ),
    )


def climbed(setting: Setting, ladder: tuple[Change, ...]) -> Setting:
    values = {name: value for change in ladder for name, value in change.changes.items()}
    layouts = [change.strategy for change in ladder if change.strategy is not None]
    return Setting(
        setting.job.replace(**values) if values else setting.job,
        layouts[-1] if layouts else setting.strategy,
    )


def hardware(model: Model, setting: Setting, cluster: Cluster) -> Iterator[Way]:
    """More of the same GPU, with everything sharded, where machines have several; then the cheapest
    GPU on which the job fits as it is."""
    alone = setting.strategy == ONE and cluster.gpus == 1 and cluster.gpu.form != "unified"
    holds = Holds(model)
    for count in COUNTS if alone and setting.job.training else ():
        other = replace(cluster, gpus_per_node=count)
        shared = Setting(setting.job, Strategy(fsdp=FSDP(size=count)))
        if (found := fitting(holds, shared, other)) is not None:
            yield end("hardware", (f"{count}x{cluster.gpu.id}",), shared, found)
            break
    for gpu in larger(cluster.gpu):
        other = replace(cluster, gpu=gpu)
        if (found := fitting(holds, setting, other)) is not None:
            yield end("hardware", (gpu.id,), setting, found)
            break


def larger(gpu: GPU) -> list[GPU]:
    """GPUs with more usable memory: those with a public price first, cheapest first; of a Mac, Macs
    before all others."""
    macs = apple_gpus() if gpu.vendor == "apple" else []
    some = [one for one in (*macs, *nvidia_cards()) if usable(one) > usable(gpu)]
    costs = {one.id: known.dollars for one in some if (known := price(one)) is not None}

    def order(one: GPU) -> tuple[bool, bool, float, int]:
        return one not in macs, one.id not in costs, costs.get(one.id, 0), usable(one)

    return sorted(some, key=order)


def fitting(holds: Holds, setting: Setting, cluster: Cluster) -> Estimate | None:
    model, (job, strategy) = holds.model, setting
    short = quick_shortfall(holds, setting, cluster)
    if short is None or short > 0:
        return None
    found = estimate(model, job, cluster, strategy)
    return found if found.verdict == "fits" else None


def way(
    model: Model,
    setting: Setting,
    cluster: Cluster,
    kind: str,
    ladder: tuple[Change, ...],
    rungs: bool,
) -> Way:
    changed = climbed(setting, ladder)
    found = estimate(model, changed.job, cluster, changed.strategy)
    one = end(kind, tuple(change.name for change in ladder), changed, found)
    return replace(one, rungs=tuple(climb(model, setting, cluster, ladder))) if rungs else one


def end(kind: str, names: tuple[str, ...], setting: Setting, found: Estimate) -> Way:
    return Way(
        kind=kind,
        names=names,
        job=setting.job,
        strategy=setting.strategy,
        cluster=found.cluster,
        device=found.device,
        verdict=found.verdict or "",
        host=found.host.size,
    )


def bound_shortfall(holds: Holds, setting: Setting, cluster: Cluster) -> int | None:
    """Bytes that a job lacks by a lower bound on its live peak, at most 0 where the bound does not
    decide; None where the job is refused."""
    job, strategy = setting
    most = int((usable(cluster.gpu) - context(cluster.gpu).low) / spread().high)  # live bytes
    least = tried(lambda: holds.least(job, strategy, (job.batch, job.accumulate)))
    return None if least is None else least - most


def quick_shortfall(holds: Holds, setting: Setting, cluster: Cluster) -> int | None:
    """The same, by the live peak itself where the bound does not decide."""
    least = bound_shortfall(holds, setting, cluster)
    if least is None or least > 0:
        return least
    return tried(lambda: shortfall(holds.model, setting.job, cluster, setting.strategy))


class Weighed:
    """By how many bytes a job does not fit; None where it is refused. Every setting is computed
    once."""

    def __init__(self, model: Model, cluster: Cluster) -> None:
        self.model, self.cluster, self.holds = model, cluster, Holds(model)
        self.known: dict[Setting, int | None] = {}
        self.fitting: dict[Setting, bool] = {}

    def answers(self, setting: Setting) -> bool:
        """Whether there is an answer, however large."""
        return self.legal(setting) and self.short(setting) is not None

    def legal(self, setting: Setting) -> bool:
        """Whether its techniques go together on this model."""
        program = Program(
            model=self.model,
            job=setting.job,
            entries=(),
            weights=self.model.dtype,
            gpu=self.cluster.gpu,
            strategy=setting.strategy,
        )
        try:
            apply(program)
        except InputError:
            return False
        return True

    def fits(self, setting: Setting) -> bool:
        """Whether it fits beyond doubt: the upper end of its likely range does."""
        if (short := self.short(setting)) is None or short > 0:
            return False
        if setting not in self.fitting:
            job, strategy = setting
            over = tried(lambda: surplus(self.model, job, self.cluster, strategy=strategy))
            self.fitting[setting] = over is not None and over <= 0
        return self.fitting[setting]

    def short(self, setting: Setting) -> int | None:
        """Of the live peak alone, or of a lower bound on it."""
        if setting not in self.known:
            self.known[setting] = quick_shortfall(self.holds, setting, self.cluster)
        return self.known[setting]


def tried(question: Callable[[], int]) -> int | None:
    try:
        return question()
    except InputError:
        return None


def climb(
    model: Model, setting: Setting, cluster: Cluster, ladder: tuple[Change, ...]
) -> Iterator[Rung]:
    before = estimate(model, setting.job, cluster, setting.strategy)
    first = pace(before)
    for at in range(len(ladder)):
        job, strategy = climbed(setting, ladder[: at + 1])
        after = estimate(model, job, cluster, strategy)
        now = pace(after)
        slower = None if first is None or now is None else now / first - 1
        yield Rung(
            name=ladder[at].name,
            freed=before.device - after.device,
            slower=slower,
            device=after.device,
            verdict=after.verdict or "",
            host=after.host.size if after.host.size > before.host.size else None,
        )
        before = after


def pace(found: Estimate) -> float | None:
    """Seconds per token."""
    return None if found.time is None else found.time.seconds / found.time.tokens


__all__ = ["KINDS", "advice", "next_way"]
