"""Answers to published cases: memfit's figure, the published one and those of the baselines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache

from memfit.errors import InputError
from memfit.estimate import Estimate, estimate, of_rank
from memfit.hardware import GPU, Cluster, usable
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.simulate.run import Course, cut, replay_run
from memfit.simulate.settings import Settings
from memfit.strategy import Strategy
from memfit.tape import Producer
from memfit.truth.baselines import BASELINES, Baseline
from memfit.truth.baselines.peers import PEERS, say
from memfit.truth.case import KERNEL, Case, Refused, Unfit
from memfit.truth.models import built
from memfit.truth.single import Kernel, peak
from memfit.truth.traced import Traced, asked_here, kept

OURS, TRACE = "memfit", "memfit, trace"
OWN = (
    "not supported yet",
    "memfit refuses the job",
    "a defect of memfit",
)  # reasons that are memfit's
PEAKS = (
    "peak_allocated",
    "peak_active",
    "peak_reserved",
    "nvidia-smi",
    "peak_allocated_plus_context",
    "peak_unspecified",
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One case with what memfit and the baselines say of it. `parts` and `moment` are of memfit's
    estimate; `least` and `most` are what its band widens."""

    case: Case
    predicted: int
    least: int
    most: int
    verdict: str | None
    parts: Mapping[str, int]
    moment: str
    seconds: Mapping[str, float]  # method -> processor time of one answer
    others: Mapping[str, int] = field(default_factory=dict)
    traced: Traced | None = (
        None  # the trace's answer, where one is kept; it is among the others, too
    )
    failed: Mapping[str, str] = field(default_factory=dict)  # method -> what its code broke on
    refusals: Mapping[str, bool] = field(
        default_factory=dict
    )  # method -> it says that the GPU is too small

    def error(self, method: str = OURS) -> float | None:
        """predicted / measured − 1; None where there is no figure, or the method does not apply."""
        said = self.predicted if method == OURS else self.others.get(method)
        return None if said is None or not self.case.value else said / self.case.value - 1


@dataclass(frozen=True, kw_only=True)
class KernelOutcome:
    """One kernel's measured peak, and what its formula says."""

    kernel: Kernel
    predicted: int

    @property
    def error(self) -> float:
        return self.predicted / self.kernel.value - 1


MEAN = "mean over GPUs"  # a row's scope
Ask = Callable[[Case], tuple[Model, Estimate, float]]


def question(case: Case) -> tuple[object, ...]:
    """What tells one run from another; rows that have it in common differ only in what of it they
    tell."""
    return (
        case.model,
        case.stored,
        case.config,
        case.added_tokens,
        case.job,
        case.gpu,
        case.strategy,
        case.rank,
        case.alike,
    )


def asker(producer: Producer | None) -> Ask:
    """One estimate for rows of one run that follow one another; a tape is large, so no other is
    kept. A trace is asked with the versions that are installed, where that makes no difference."""
    formulas = None if producer is None else asker(None)

    @lru_cache(maxsize=1)
    def asked(
        model: tuple[str, str, str, int],
        job: Job,
        gpu: GPU | None,
        strategy: Strategy,
        ranks: range | None,
    ) -> tuple[Model, Estimate, float]:
        found, began = built(*model), time.process_time()
        cluster = None if gpu is None else nodes_of(gpu, strategy.ranks)
        if ranks is not None:
            each = [
                of_rank(found, job, cluster, replace(strategy, rank=rank), producer=producer)
                for rank in ranks
            ]
            return (
                found,
                max(each, key=lambda one: one.held),
                (time.process_time() - began) / len(ranks),
            )
        return (
            found,
            estimate(found, job, cluster, strategy, producer=producer),
            time.process_time() - began,
        )

    def ask(case: Case) -> tuple[Model, Estimate, float]:
        case = (
            case
            if formulas is None
            else replace(
                case, job=asked_here(case, lambda one: predicted(one.metric, formulas(one)[1]))
            )
        )
        ranks = None if case.rank is None else range(case.rank, case.rank + case.alike)
        model = case.model, case.stored, case.config, case.added_tokens
        return asked(model, case.job, case.gpu, case.strategy, ranks)

    return ask


NODE = 8  # GPUs; how many nodes there are changes no memory


def nodes_of(gpu: GPU, ranks: int) -> Cluster:
    return (
        Cluster(gpu=gpu, gpus_per_node=NODE, nodes=ranks // NODE)
        if ranks % NODE == 0
        else Cluster(gpu=gpu, nodes=ranks)
    )


def outcome(case: Case, ask: Ask, methods: Sequence[Baseline] = BASELINES) -> Outcome | Refused:
    try:
        model, found, seconds = ask(case)
    except InputError as bad:
        message = bad.problems[0].message
        return unanswered(
            case, OWN[0] if message.startswith("not supported yet") else OWN[1], message
        )
    # A defect in one formula is named like any reason; the other cases are still answered
    except Exception as defect:  # noqa: BLE001
        return unanswered(case, OWN[2], f"{type(defect).__name__}: {defect}")
    others: dict[str, int] = {}
    failed: dict[str, str] = {}
    spent = {OURS: seconds}
    for one in methods if case.metric in (*PEAKS, "oom") else ():
        began = time.process_time()
        size = say(model, case.job, (case.gpu, case.strategy), one)
        if isinstance(size, str):
            failed[one.name] = size
        elif size is not None:
            others[one.name], spent[one.name] = size, time.process_time() - began
    refuses = refusals(found, case.gpu, others)
    traced = kept(case) if found.source == "formula" else None
    if traced is not None:
        others[TRACE], spent[TRACE] = traced.predicted, traced.seconds
        refuses |= {TRACE: traced.refuses} if traced.refuses is not None else {}
    where = found.memory.at
    said = predicted(case.metric, found) if case.scope != MEAN else mean(case, found, ask)
    least, most = reach(case.metric, said, found)
    return Outcome(
        case=case,
        predicted=said,
        least=least,
        most=most,
        verdict=found.verdict,
        seconds=spent,
        parts=dict(found.parts),
        moment=""
        if where is None
        else f"{where.phase} {where.step}, {where.where or '-'}, {where.op}",
        others=others,
        failed=failed,
        refusals=refuses,
        traced=traced,
    )


def mean(case: Case, found: Estimate, ask: Ask) -> int:
    """What ranks that differ show in the mean; `found` is that of the worst."""
    each = [
        predicted(
            case.metric,
            found if one.rank == found.strategy.rank else ask(replace(case, rank=one.rank))[1],
        )
        * one.alike
        for one in found.ranks
    ]
    return (
        sum(each) // sum(one.alike for one in found.ranks)
        if each
        else predicted(case.metric, found)
    )


def of_kernel(kernel: Kernel) -> KernelOutcome | Refused:
    try:
        return KernelOutcome(kernel=kernel, predicted=peak(kernel))
    except Unfit as why:
        reason, detail = why.reason, why.detail
    return Refused(
        id=kernel.id,
        source=kernel.source,
        reason=reason,
        detail=detail,
        metric="peak_allocated",
        confidence=kernel.confidence,
        kind=KERNEL,
    )


def technique(case: Case) -> str:
    """What distinguishes a case for someone who looks for his own: what is trained or served, over
    what, with which savings."""
    job = case.job
    quant = (
        json.loads(case.stored)["quant_method"]
        if case.stored
        else ""
        if job.quant == "none"
        else job.quant
    )
    over = f" over {quant}" if quant else ""
    if not job.training:
        return f"inference{over or ' ' + job.precision}"
    savings = [
        name
        for name, on in (
            ("checkpointing", job.checkpointing != "none"),
            ("fused kernels", job.unsloth or job.liger),
        )
        if on
    ]
    return ", ".join([f"{job.method}{over}", *savings])


def unanswered(case: Case, reason: str, detail: str) -> Refused:
    return Refused(
        id=case.id,
        source=case.source,
        reason=reason,
        detail=detail[:160],
        metric=case.metric,
        confidence=case.confidence,
        task="train" if case.job.training else "inference",
        kind=case.kind,
    )


def predicted(metric: str, found: Estimate) -> int:
    """The number that stands beside the metric. A counter that is not named is compared with what
    is allocated."""
    memory = found.memory
    if metric == "peak_reserved":
        return held(found)
    if metric == "nvidia-smi":
        return seen(found) + found.outside
    if metric == "peak_allocated_plus_context":
        return memory.allocated + found.outside
    if metric in ("allocated_end_of_step", "allocated_end_of_generation"):
        return memory.end
    if metric == "weights":
        return sum(memory.parts.get(part, 0) for part in ("weights", "buffers"))
    return memory.allocated


def reach(metric: str, said: int, found: Estimate) -> tuple[int, int]:
    """From the least to the most that the counter may show before anybody was off: as the band's
    ends are made."""
    live, low, high = (
        found.memory.allocated,
        found.context.low + found.nccl.low,
        found.context.high + found.nccl.high,
    )
    if metric == "peak_reserved":
        return min(live, said), said
    if metric == "nvidia-smi":
        return min(live + low, said), said - found.outside + high
    if metric == "peak_allocated_plus_context":
        return live + low, live + high
    return said, said


def held(found: Estimate) -> int:
    """What the allocator holds at most on this GPU: where it has to give back what it caches, less
    than it would like to."""
    return found.held if found.squeezed is None else found.squeezed


SETTLED = 4  # steps after which the allocator has given back all that it will


def seen(found: Estimate) -> int:
    """What stays held long enough for somebody who looks once a second (nvidia-smi `--loop 1`): a
    peak at which the allocator gives back its cache in the first steps is over within that time,
    one that comes in every step is not."""
    if found.squeezed is None or found.usable is None or not found.job.training:
        return held(found)
    pieces = cut(found.memory.tape)
    run = replay_run(
        lambda tokens, first: pieces,
        Course(steps=((found.job.seq,) * found.job.accumulate,) * SETTLED),
        Settings.parse(found.job.alloc_conf, where="job.alloc_conf"),
        max(0, found.usable[1] - found.context.low - found.nccl.low),
    )
    return found.squeezed if run.oom else min(found.squeezed, run.steps[-1].reserved)


def refusals(found: Estimate, gpu: GPU | None, others: Mapping[str, int]) -> dict[str, bool]:
    if gpu is None or found.verdict is None:
        return {}
    margins = {one.name: one.margin for one in (*BASELINES, *PEERS)}
    return {OURS: found.verdict == "no"} | {
        name: size > margins[name] * usable(gpu) for name, size in others.items()
    }


__all__ = [
    "OURS",
    "OWN",
    "PEAKS",
    "TRACE",
    "Ask",
    "KernelOutcome",
    "Outcome",
    "asker",
    "of_kernel",
    "outcome",
    "question",
    "technique",
]
