"""What would make it fit: the shortest ladder of changes to a job, the least painful one of that
length, each with what it frees and costs.

A change is looked at by what no layout holds less than, then by the live peak, which is quick;
ladders that might do are tried with the allocator replayed, in order of pain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

from memfit.band import spread
from memfit.errors import InputError
from memfit.estimate import Advice, Estimate, Rung, estimate, shortfall, surplus
from memfit.hardware import Cluster, usable
from memfit.hardware.outside import context
from memfit.job import Job
from memfit.model.modules import Model
from memfit.optimizers import OPTIMIZERS
from memfit.plan.memory_lower_bounds import Holds
from memfit.plan.relayouts import relayouts
from memfit.strategy import ONE, Strategy
from memfit.techniques.activation_offload import HOOKS

LONGEST = 4  # rungs; who needs more wants another job


@dataclass(frozen=True, kw_only=True)
class Change:
    """`pain`: 0 nothing changes, 1 the same numbers by other kernels, 2 time, 3 numbers of fewer
    bits, or the host's time, 4 another method. Of the job, or (`strategy`) of how the GPUs share
    it."""

    name: str
    pain: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    strategy: Strategy | None = None

    @property
    def about(self) -> tuple[str, ...]:
        """The options it decides."""
        return (*self.changes, *(() if self.strategy is None else ("use",)))


class Asked(NamedTuple):
    job: Job
    strategy: Strategy


def changes(job: Job, strategy: Strategy = ONE) -> Iterator[Change]:
    """What may be done about this job, the least painful first."""
    if not job.alloc_conf:
        yield Change(
            name="--alloc-conf expandable_segments:True",
            pain=0,
            changes={"alloc_conf": "expandable_segments:True"},
        )
    if job.training:
        yield from training(job)
        for one in relayouts(strategy):
            yield Change(name=one.name, pain=3 if one.host else 2, strategy=one.strategy)
    elif job.quant == "none":
        yield Change(name="--quant int8", pain=3, changes={"quant": "int8"})
        yield Change(name="--quant nf4", pain=3, changes={"quant": "nf4"})
    if job.precision == "fp32":
        yield Change(name="--precision bf16", pain=3, changes={"precision": "bf16"})


def training(job: Job) -> Iterator[Change]:
    if job.loss == "plain":
        yield Change(name="--loss liger", pain=1, changes={"loss": "liger"})
    if not job.liger:
        yield Change(name="--liger", pain=1, changes={"liger": True})
    fused = f"{job.optimizer}_fused"
    if fused in OPTIMIZERS:
        yield Change(name=f"--optimizer {fused}", pain=1, changes={"optimizer": fused})
    if job.checkpointing != "full":
        yield Change(name="--checkpointing full", pain=2, changes={"checkpointing": "full"})
    if job.activation_offload == "none" and (kind := HOOKS.get(job.framework)):
        yield Change(
            name=f"--activation-offload {kind}", pain=2, changes={"activation_offload": kind}
        )
    batch = job.batch
    while batch > 1 and batch % 2 == 0:
        batch //= 2
        times = job.accumulate * job.batch // batch
        yield Change(
            name=f"--batch {batch} --accumulate {times}",
            pain=2,
            changes={"batch": batch, "accumulate": times},
        )
    small = f"{job.optimizer.removesuffix('_fused').removesuffix('_loop')}_8bit"
    if small in OPTIMIZERS:
        yield Change(name=f"--optimizer {small}", pain=3, changes={"optimizer": small})
    if job.method == "full":
        yield Change(name="--method lora", pain=4, changes={"method": "lora"})
        yield Change(name="--method qlora", pain=5, changes={"method": "qlora"})
    elif job.method == "lora":
        yield Change(name="--method qlora", pain=4, changes={"method": "qlora"})


def advice(model: Model, job: Job, cluster: Cluster, strategy: Strategy = ONE) -> Advice:
    """By formulas, whatever answers the job itself."""
    if not model.layers:
        raise InputError.one(
            f"no formulas for `{model.family}`, and changes are weighed by them",
            where="advise",
            hint="leave `advise` out",
        )
    if surplus(model, job, cluster, strategy=strategy) <= 0:
        return Advice(rungs=(), helps=True)
    asked, weighed = Asked(job, strategy), Weighed(model, cluster)
    for length in range(1, LONGEST + 1):
        for ladder in ladders(asked, length):
            if weighed.fits(climbed(asked, ladder)):
                return Advice(rungs=tuple(rungs(model, asked, cluster, ladder)), helps=True)
    return Advice(rungs=(), helps=False)


class Weighed:
    """By how many bytes a job does not fit; None where it is refused. What is asked twice is
    computed once."""

    def __init__(self, model: Model, cluster: Cluster) -> None:
        self.model, self.cluster, self.holds = model, cluster, Holds(model)
        self.known: dict[Asked, int | None] = {}
        self.most = int(
            (usable(cluster.gpu) - context(cluster.gpu).low) / spread().high
        )  # live bytes; more do not fit for certain

    def fits(self, asked: Asked) -> bool:
        if (short := self.short(asked)) is None or short > 0:
            return False
        over = tried(lambda: surplus(self.model, asked.job, self.cluster, strategy=asked.strategy))
        return over is not None and over <= 0

    def short(self, asked: Asked) -> int | None:
        """Of the live peak alone, or of what nothing holds less than."""
        if asked not in self.known:
            least = (
                tried(lambda: self.holds.least(*asked, (asked.job.batch, asked.job.accumulate)))
                if asked.job.training
                else 0
            )
            told = None if least is None else least - self.most
            if told is not None and told <= 0:
                told = tried(lambda: shortfall(self.model, asked.job, self.cluster, asked.strategy))
            self.known[asked] = told
        return self.known[asked]


def tried(question: Callable[[], int]) -> int | None:
    try:
        return question()
    except InputError:
        return None


def ladders(asked: Asked, length: int) -> list[tuple[Change, ...]]:
    """All of so many rungs, no two about the same option, the least painful first."""
    found = [
        ladder
        for ladder in combinations(changes(*asked), length)
        if len(names := [name for change in ladder for name in change.about]) == len(set(names))
    ]
    return sorted(
        found,
        key=lambda ladder: (
            max(one.pain for one in ladder),
            sum(one.pain for one in ladder),
            -ladder[-1].changes.get("batch", 0),
        ),
    )


def climbed(asked: Asked, ladder: tuple[Change, ...]) -> Asked:
    values = {name: value for change in ladder for name, value in change.changes.items()}
    layouts = [change.strategy for change in ladder if change.strategy is not None]
    return Asked(
        asked.job.replace(**values) if values else asked.job,
        layouts[-1] if layouts else asked.strategy,
    )


def rungs(
    model: Model, asked: Asked, cluster: Cluster, ladder: tuple[Change, ...]
) -> Iterator[Rung]:
    before = estimate(model, asked.job, cluster, asked.strategy)
    first = pace(before)
    for at in range(len(ladder)):
        job, strategy = climbed(asked, ladder[: at + 1])
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
    """Seconds a token."""
    return None if found.time is None else found.time.seconds / found.time.tokens


__all__ = ["advice"]
