"""How far memfit and every known method are off on measured cases: one outcome a case, statistics a group, nothing averaged over lines of
different sources."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from memfit import band
from memfit.errors import InputError
from memfit.estimate import Estimate, estimate, of_rank
from memfit.hardware import GPU, Cluster, usable
from memfit.job import Job
from memfit.model.modules import Model
from memfit.registry import nearest
from memfit.simulate.replay import replay
from memfit.simulate.settings import Settings
from memfit.strategy import Strategy
from memfit.tape import Producer
from memfit.truth.baselines import BASELINES, Baseline
from memfit.truth.baselines.peers import PEERS, asked, say
from memfit.truth.case import KERNEL, KINDS, Case, Refused, Unfit
from memfit.truth.models import built
from memfit.truth.published import read
from memfit.truth.single import Kernel, peak

OURS = "memfit"
OWN = ("no formula yet", "memfit refuses the job", "a defect of memfit")  # reasons that are memfit's
NOTICEABLE = 0.01  # an under-estimate of less than this is noise of the figures' last digits
PEAKS = ("peak_allocated", "peak_active", "peak_reserved", "nvidia-smi", "peak_allocated_plus_context", "peak_unspecified")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One case with what memfit and the baselines say of it. `parts` and `moment` are of memfit's estimate; `least` and `most` are what
    its band widens."""

    case: Case
    predicted: int
    least: int
    most: int
    verdict: str | None
    parts: Mapping[str, int]
    moment: str
    seconds: Mapping[str, float]  # method -> what one answer took
    others: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)  # method -> what its code broke on
    refusals: Mapping[str, bool] = field(default_factory=dict)  # method -> it says that the GPU is too small

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


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one group: errors are shares of the measured value. `under` is the share of cases under-estimated by more than 1 %."""

    cases: int
    median: float
    p95: float
    worst: float
    bias: float
    under: float
    deepest: float


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """`kernels` are apart: a single kernel is no run, and enters no average over runs."""

    outcomes: tuple[Outcome, ...]
    refused: tuple[Refused, ...]
    kernels: tuple[KernelOutcome, ...] = ()
    absent: tuple[str, ...] = ()  # tools that were wanted and are not installed

    @property
    def rows(self) -> int:
        return len(self.outcomes) + len(self.refused) + len(self.kernels)

    def groups(self) -> dict[tuple[str, str], list[Outcome]]:
        """Outcomes with a figure, by source and metric."""
        found: dict[tuple[str, str], list[Outcome]] = {}
        for one in self.outcomes:
            if one.case.metric != "oom":
                found.setdefault((one.case.source, one.case.metric), []).append(one)
        return dict(sorted(found.items()))

    def by(self, name: Callable[[Outcome], str]) -> dict[str, list[Outcome]]:
        """Outcomes with a figure for a peak, by whatever `name` says of them."""
        found: dict[str, list[Outcome]] = {}
        for one in self.outcomes:
            if one.case.metric in PEAKS:
                found.setdefault(name(one), []).append(one)
        return dict(sorted(found.items()))

    def reasons(self) -> dict[tuple[str, str], int]:
        """How many rows were refused, by kind of row and reason; first what one GPU could answer. Where memfit is the reason, in its words."""
        counts = Counter((one.kind, f"{one.reason}: {one.detail}" if one.reason in OWN else one.reason) for one in self.refused)
        return dict(sorted(counts.items(), key=lambda item: (KINDS.index(item[0][0]), -item[1], item[0][1])))

    def shares(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Rows answered and rows in all, by kind of row and by confidence."""
        found: dict[str, dict[str, tuple[int, int]]] = {}
        everyone = [
            *((one.case.kind, one.case.confidence, 1) for one in self.outcomes),
            *((KERNEL, one.kernel.confidence, 1) for one in self.kernels),
        ]
        for kind, confidence, answered in (*everyone, *((one.kind, one.confidence, 0) for one in self.refused)):
            for group in ("all", confidence):
                before = found.setdefault(kind, {}).get(group, (0, 0))
                found[kind][group] = before[0] + answered, before[1] + 1
        return {kind: found[kind] for kind in KINDS if kind in found}

    def failures(self) -> dict[str, tuple[int, str]]:
        """For each tool whose code broke, on how many cases and first on what."""
        found: dict[str, tuple[int, str]] = {}
        for one in self.outcomes:
            for method, words in one.failed.items():
                count, first = found.get(method, (0, words))
                found[method] = count + 1, first
        return found

    def seconds(self, method: str = OURS) -> float | None:
        """The middle of what an answer took."""
        spent = sorted(one.seconds[method] for one in self.outcomes if method in one.seconds)
        return middle(spent) if spent else None

    def worst(self, count: int) -> list[Outcome]:
        return sorted((one for one in self.outcomes if one.case.value), key=lambda one: -abs(one.error() or 0))[:count]

    def decisions(self, method: str = OURS) -> tuple[int, int]:
        """Of the runs that went out of memory, those where the method says so, and all it was asked about."""
        asked = [one.refusals[method] for one in self.outcomes if one.case.metric == "oom" and method in one.refusals]
        return sum(asked), len(asked)

    def fitted(self, method: str = OURS) -> tuple[int, int]:
        """Of the runs that went through on a named GPU, those where the method says no, and all it was asked about."""
        asked = [one.refusals[method] for one in self.outcomes if one.case.metric in PEAKS and method in one.refusals]
        return sum(asked), len(asked)


Progress = Callable[[int, int, str], None]  # rows done, rows in all, what is next


def accuracy(
    path: str | Path | None = None, *, confidence: str = "", source: str = "", limit: int = 0, producer: Producer | None = None,
    progress: Progress | None = None, peers: bool = False,
) -> Accuracy:  # fmt: skip
    """Every row of a file in the form of the bundled collection (None: that itself), answered or refused with a reason.

    `confidence` and `source` narrow what is looked at: equal to the row's, and contained in it; `limit` ends after so many cases. `peers`:
    the real tools that are installed are asked too."""
    methods = (*BASELINES, *(asked() if peers else ()))
    chosen = selected(path, confidence, source, limit)
    outcomes: list[Outcome] = []
    kernels: list[KernelOutcome] = []
    refused: list[Refused] = []
    ask = asker(producer)
    for number, row in enumerate(chosen):
        if progress is not None:
            progress(number, len(chosen), row.id)
        found = row if isinstance(row, Refused) else outcome(row, ask, methods) if isinstance(row, Case) else of_kernel(row)
        if isinstance(found, Outcome):
            outcomes.append(found)
        elif isinstance(found, KernelOutcome):
            kernels.append(found)
        else:
            refused.append(found)
    absent = tuple(f"{one.name} (pip install {one.install})" for one in PEERS if peers and not one.installed)
    return Accuracy(outcomes=tuple(outcomes), refused=tuple(refused), kernels=tuple(kernels), absent=absent)


def selected(path: str | Path | None, confidence: str, source: str, limit: int) -> list[Case | Kernel | Refused]:
    """The rows that are asked for; one problem for each wish that no row meets."""
    everything = list(read(path))
    if not everything:
        raise InputError.one(
            "the file has no rows", where="path", hint="one JSON object a line, with `id`, `source`, `model`, `metric`, `value` …"
        )
    if all(isinstance(one, Refused) and one.reason in UNREADABLE for one in everything):
        message = f"no line of the file is a row: {len(everything)} lines are no JSON objects"
        raise InputError.one(message, where="path", hint="one JSON object a line, with `id`, `source`, `model`, `metric`, `value` …")
    meant = [one for one in everything if source.lower() in one.source.lower()]
    if not meant:
        known = sorted({one.source for one in everything})
        close = nearest(source, known) or tuple(known[:4])
        raise InputError.one(f"no row is from a source with `{source[:60]}` in its name", where="source", hint=f"there are {listed(close)}")
    found: list[Case | Kernel | Refused] = [one for one in meant if not confidence or one.confidence == confidence]
    if not found:
        raise InputError.one(f"none of these rows has confidence `{confidence}`", where="confidence")
    if limit:
        answerable: list[Case | Kernel | Refused] = [one for one in found if not isinstance(one, Refused)]
        return (answerable or found)[:limit]
    return found


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in list(names)[:4])


UNREADABLE = ("no JSON", "no JSON object")
Ask = Callable[[Case], tuple[Model, Estimate, float]]


def asker(producer: Producer | None) -> Ask:
    """One estimate for rows that differ only in the metric."""

    @lru_cache(maxsize=64)
    def asked(
        model: tuple[str, str, str], job: Job, gpu: GPU | None, strategy: Strategy, rank: int | None
    ) -> tuple[Model, Estimate, float]:
        found, began = built(*model), time.perf_counter()
        cluster = None if gpu is None else nodes_of(gpu, strategy.ranks)
        if rank is not None:
            return found, of_rank(found, job, cluster, replace(strategy, rank=rank), producer=producer), time.perf_counter() - began
        return found, estimate(found, job, cluster, strategy, producer=producer), time.perf_counter() - began

    def ask(case: Case) -> tuple[Model, Estimate, float]:
        return asked((case.model, case.stored, case.config), case.job, case.gpu, case.strategy, case.rank)

    return ask


NODE = 8  # GPUs; how many nodes there are changes no memory


def nodes_of(gpu: GPU, ranks: int) -> Cluster:
    return Cluster(gpu=gpu, gpus_per_node=NODE, nodes=ranks // NODE) if ranks % NODE == 0 else Cluster(gpu=gpu, nodes=ranks)


def outcome(case: Case, ask: Ask, methods: Sequence[Baseline] = BASELINES) -> Outcome | Refused:
    try:
        model, found, seconds = ask(case)
    except InputError as bad:
        message = bad.problems[0].message
        return unanswered(case, OWN[0] if message.startswith("no formula") else OWN[1], message)
    except Exception as defect:  # noqa: BLE001 - a defect in one formula is named like any reason; the other cases are still answered
        return unanswered(case, OWN[2], f"{type(defect).__name__}: {defect}")
    others: dict[str, int] = {}
    failed: dict[str, str] = {}
    spent = {OURS: seconds}
    for one in methods if case.metric in (*PEAKS, "oom") and not case.strategy else ():  # they know one GPU
        began = time.perf_counter()
        size = say(model, case.job, case.gpu, one)
        if isinstance(size, str):
            failed[one.name] = size
        elif size is not None:
            others[one.name], spent[one.name] = size, time.perf_counter() - began
    where = found.memory.at
    said = predicted(case.metric, found)
    least, most = reach(case.metric, said, found)
    return Outcome(
        case=case, predicted=said, least=least, most=most, verdict=found.verdict, seconds=spent, parts=dict(found.parts),
        moment="" if where is None else f"{where.phase} {where.step}, {where.where or '-'}, {where.op}",
        others=others, failed=failed, refusals=refusals(found, case.gpu, others),
    )  # fmt: skip


def of_kernel(kernel: Kernel) -> KernelOutcome | Refused:
    try:
        return KernelOutcome(kernel=kernel, predicted=peak(kernel))
    except Unfit as why:
        reason, detail = why.reason, why.detail
    return Refused(
        id=kernel.id, source=kernel.source, reason=reason, detail=detail, metric="peak_allocated", confidence=kernel.confidence, kind=KERNEL
    )


def technique(case: Case) -> str:
    """As the band sorts it, with what saves memory."""
    job = case.job
    quant = json.loads(case.stored)["quant_method"] if case.stored else "" if job.quant == "none" else job.quant
    savings = [
        name for name, on in (("checkpointing", job.checkpointing != "none"), ("fused kernels", bool(job.unsloth or job.liger))) if on
    ]
    return band.technique(job.training, job.method, quant, job.precision, savings)


def unanswered(case: Case, reason: str, detail: str) -> Refused:
    return Refused(
        id=case.id, source=case.source, reason=reason, detail=detail[:160], metric=case.metric, confidence=case.confidence,
        task="train" if case.job.training else "inference", kind=case.kind,
    )  # fmt: skip


def predicted(metric: str, found: Estimate) -> int:
    """The number that stands beside the metric. A counter that is not named is compared with what is allocated."""
    memory = found.memory
    if metric == "peak_reserved":
        return held(found)
    if metric == "nvidia-smi":
        return held(found) + found.outside
    if metric == "peak_allocated_plus_context":
        return memory.allocated + found.outside
    if metric in ("allocated_end_of_step", "allocated_end_of_generation"):
        return memory.end
    if metric == "weights":
        return sum(memory.parts.get(part, 0) for part in ("weights", "buffers"))
    return memory.allocated


def reach(metric: str, said: int, found: Estimate) -> tuple[int, int]:
    """From the least to the most that the counter may show before anybody was off: as the band's ends are made."""
    live, low, high = found.memory.allocated, found.context.low + found.nccl.low, found.context.high + found.nccl.high
    if metric == "peak_reserved":
        return min(live, said), said
    if metric == "nvidia-smi":
        return min(live + low, said), said - found.outside + high
    if metric == "peak_allocated_plus_context":
        return live + low, live + high
    return said, said


def held(found: Estimate) -> int:
    """What the allocator holds at most on this GPU: where it has to give back what it caches, less than it would like to."""
    if not found.retries or found.usable is None:
        return found.held
    settings = Settings.parse(found.job.alloc_conf)
    return replay(found.memory.tape, settings, max(0, found.usable[1] - found.context.low)).peak_reserved


def refusals(found: Estimate, gpu: GPU | None, others: Mapping[str, int]) -> dict[str, bool]:
    if gpu is None or found.verdict is None:
        return {}
    margins = {one.name: one.margin for one in (*BASELINES, *PEERS)}
    return {OURS: found.verdict == "no"} | {name: size > margins[name] * usable(gpu) for name, size in others.items()}


def figures(errors: Iterable[float]) -> Figures | None:
    """Statistics of signed errors; the p95 is the nearest rank."""
    found = sorted(errors)
    if not found:
        return None
    sizes = sorted(abs(one) for one in found)
    under = [one for one in found if one < -NOTICEABLE]
    return Figures(
        cases=len(found), median=middle(sizes), p95=sizes[-(-95 * len(sizes) // 100) - 1], worst=max(found, key=abs), bias=middle(found),
        under=len(under) / len(found), deepest=min(found[0], 0.0),
    )  # fmt: skip


def middle(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def over_sources(found: Mapping[tuple[str, str], Iterable[Outcome]], method: str = OURS) -> Figures | None:
    """The mean over sources of the mean over a source's metrics, so that no long table drowns the others; worst and deepest are of all."""
    sources: dict[str, list[Figures]] = {}
    for (source, _), group in found.items():
        one = figures(error for case in group if (error := case.error(method)) is not None)
        if one is not None:
            sources.setdefault(source, []).append(one)
    every = [one for group in sources.values() for one in group]
    if not every:
        return None

    def mean(name: str) -> float:
        each = [sum(float(getattr(one, name)) for one in group) / len(group) for group in sources.values()]
        return sum(each) / len(each)

    return Figures(
        cases=sum(one.cases for one in every), median=mean("median"), p95=mean("p95"), worst=max((one.worst for one in every), key=abs),
        bias=mean("bias"), under=mean("under"), deepest=min(one.deepest for one in every),
    )  # fmt: skip


METHODS: tuple[str, ...] = (OURS, *(one.name for one in (*BASELINES, *PEERS)))
__all__ = [
    "BASELINES", "METHODS", "OURS", "PEAKS", "Accuracy", "Baseline", "Figures", "KernelOutcome", "Outcome", "accuracy", "figures",
    "over_sources", "technique",
]  # fmt: skip
