"""What would make it fit: the shortest ladder of changes to a job, the least painful one of that length, each with what it frees and costs.

A change is looked at by the live peak, which is quick; ladders that might do are then tried with the allocator replayed, in order of pain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from memfit.errors import InputError
from memfit.estimate import Advice, Estimate, Rung, estimate, shortfall, surplus
from memfit.hardware import Cluster
from memfit.job import Job
from memfit.model.modules import Model
from memfit.optimizers import OPTIMIZERS
from memfit.strategy import ONE, Strategy

LONGEST = 4  # rungs; who needs more wants another job


@dataclass(frozen=True, kw_only=True)
class Change:
    """`pain`: 0 nothing changes, 1 the same numbers by other kernels, 2 time, 3 numbers of fewer bits, 4 another method."""

    name: str
    pain: int
    changes: Mapping[str, Any]


def changes(job: Job) -> Iterator[Change]:
    """What may be done about this job, the least painful first."""
    if not job.alloc_conf:
        yield Change(name="--alloc-conf expandable_segments:True", pain=0, changes={"alloc_conf": "expandable_segments:True"})
    if job.training:
        yield from training(job)
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
    if job.activation_offload == "none" and (kind := hooks_of(job)):
        yield Change(name=f"--activation-offload {kind}", pain=2, changes={"activation_offload": kind})
    batch = job.batch
    while batch > 1 and batch % 2 == 0:
        batch //= 2
        times = job.accumulate * job.batch // batch
        yield Change(name=f"--batch {batch} --accumulate {times}", pain=2, changes={"batch": batch, "accumulate": times})
    small = f"{job.optimizer.removesuffix('_fused').removesuffix('_loop')}_8bit"
    if small in OPTIMIZERS:
        yield Change(name=f"--optimizer {small}", pain=3, changes={"optimizer": small})
    if job.method == "full":
        yield Change(name="--method lora", pain=4, changes={"method": "lora"})
        yield Change(name="--method qlora", pain=5, changes={"method": "qlora"})
    elif job.method == "lora":
        yield Change(name="--method qlora", pain=4, changes={"method": "qlora"})


def hooks_of(job: Job) -> str:
    """The way to keep activations on the host that its framework has, if any."""
    return {"trl": "streams", "torchtune": "streams", "transformers": "wrapper"}.get(job.framework, "")


def advice(model: Model, job: Job, cluster: Cluster, strategy: Strategy = ONE) -> Advice:
    """By formulas, whatever answers the job itself."""
    if not model.layers:
        raise InputError.one(
            f"no formulas for `{model.family}`, and changes are weighed by them", where="advise", hint="leave `advise` out"
        )
    if surplus(model, job, cluster, strategy=strategy) <= 0:
        return Advice(rungs=(), helps=True)
    known: dict[Job, int | None] = {}

    def over(candidate: Job, precise: bool) -> int | None:
        """None where the job is refused."""
        if precise:
            return tried(lambda: surplus(model, candidate, cluster, strategy=strategy))
        if candidate not in known:
            known[candidate] = tried(lambda: shortfall(model, candidate, cluster, strategy))
        return known[candidate]

    for length in range(1, LONGEST + 1):
        for ladder in ladders(job, length, lambda candidate: over(candidate, False)):
            left = over(climbed(job, ladder), True)
            if left is not None and left <= 0:
                return Advice(rungs=tuple(rungs(model, job, cluster, strategy, ladder)), helps=True)
    return Advice(rungs=(), helps=False)


def tried(question: Callable[[], int]) -> int | None:
    try:
        return question()
    except InputError:
        return None


def ladders(job: Job, length: int, over: Callable[[Job], int | None]) -> list[tuple[Change, ...]]:
    """Those of so many rungs, no two about the same option, that the live peak does not rule out; the least painful first."""
    found: list[tuple[Change, ...]] = []
    for ladder in combinations(changes(job), length):
        names = [name for change in ladder for name in change.changes]
        left = over(climbed(job, ladder)) if len(names) == len(set(names)) else None
        if left is not None and left <= 0:
            found.append(ladder)
    found.sort(key=lambda ladder: (max(one.pain for one in ladder), sum(one.pain for one in ladder), -ladder[-1].changes.get("batch", 0)))
    return found


def climbed(job: Job, ladder: tuple[Change, ...]) -> Job:
    return job.replace(**{name: value for change in ladder for name, value in change.changes.items()})


def rungs(model: Model, job: Job, cluster: Cluster, strategy: Strategy, ladder: tuple[Change, ...]) -> Iterator[Rung]:
    before = estimate(model, job, cluster, strategy)
    first = pace(before)
    for at in range(len(ladder)):
        after = estimate(model, climbed(job, ladder[: at + 1]), cluster, strategy)
        now = pace(after)
        slower = None if first is None or now is None else now / first - 1
        yield Rung(
            name=ladder[at].name, freed=before.device - after.device, slower=slower, device=after.device, verdict=after.verdict or ""
        )
        before = after


def pace(found: Estimate) -> float | None:
    """Seconds a token."""
    return None if found.time is None else found.time.seconds / found.time.tokens


__all__ = ["advice"]
