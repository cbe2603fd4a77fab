"""LLMem's Algorithm 1 (Kim et al., IJCAI 2024, arXiv 2404.10933) as a policy: of the ways to spread
a training job, the one that puts the most sequences through at once, whatever its links; it knows
no time. Whose memory a way's batch comes from is the caller's: LLMem's formulas
(`truth/baselines/llmem.py`) or memfit's own (`ways`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple

from memfit.constants import counted, setting
from memfit.errors import InputError
from memfit.estimate import Estimate, estimate
from memfit.hardware import Cluster, usable
from memfit.job import Job
from memfit.model.model import Model
from memfit.plan.ledger import Found
from memfit.plan.search import Search
from memfit.plan.space import turned
from memfit.simulate.replay import replay
from memfit.strategy import Strategy

METHODS = ("DP", "ZeRO-3", "TP", "DP+TP")  # the earlier of two that score alike is taken
OFFLOAD = "CPU offload"  # where none has room for one sequence
GATHERING: Annotated[
    float,
    counted(
        "communication of ZeRO-3, as a multiple of plain data parallelism's",
        "ZeRO, arXiv 1910.02054, section 7.2.2",
    ),
] = 1.5
MOST: Annotated[int, setting("sequences of one rank, at most")] = 1024


class Way(NamedTuple):
    """`batch`: the most sequences of one rank that fit, 0 where not even one does; `data`: ranks
    that see sequences of their own."""

    method: str
    batch: int
    data: int
    strategy: Strategy | None = None

    @property
    def score(self) -> float:
        """Sequences in a step, weighed by what plain data parallelism saves of communication."""
        return self.batch * self.data * (GATHERING if self.method == "DP" else 1.0)


def ranked(ways: Iterable[Way]) -> list[Way]:
    """The best first, without those that do not fit: none left means offload."""
    return sorted(
        (way for way in ways if way.batch), key=lambda way: (-way.score, METHODS.index(way.method))
    )


def chosen(ways: Iterable[Way]) -> str:
    """The method that the algorithm names."""
    return next((way.method for way in ranked(ways)), OFFLOAD)


def method_of(strategy: Strategy) -> str | None:
    """Which of its methods a strategy is; None: none of them. Weights are gathered by FSDP, by
    ZeRO-3 and by Gemini alike."""
    names = {name for name, layout in strategy.uses() if layout.size > 1}
    gathers = (
        (strategy.fsdp is not None and strategy.fsdp.reshard)
        or (strategy.zero is not None and strategy.zero.stage == 3)
        or strategy.gemini is not None
    )
    if names == {"tp"}:
        return "TP"
    if names == {"ddp"}:
        return "DP"
    if gathers and names <= {"fsdp", "zero", "gemini", "tp"}:
        return "DP+TP" if "tp" in names else "ZeRO-3"
    return None


def ways(model: Model, job: Job, cluster: Cluster, strategies: Sequence[Strategy]) -> list[Way]:
    """What memfit says of each strategy that is one of the algorithm's methods; those that a job
    cannot have put nothing through."""
    found: list[Way] = []
    for strategy in strategies:
        method = method_of(strategy)
        if method is not None:
            found.append(
                Way(method, largest(model, job, cluster, strategy), strategy.data, strategy)
            )
    return found


def largest(model: Model, job: Job, cluster: Cluster, strategy: Strategy) -> int:
    """The batch before the first that does not get through, doubled as long as it does and then
    counted up. Beyond it one may fit again, where blocks happen to suit each other."""
    batch = 0
    while batch < MOST and gets_through(model, job, cluster, strategy, max(1, 2 * batch)):
        batch = max(1, 2 * batch)
    while 0 < batch < MOST and gets_through(model, job, cluster, strategy, batch + 1):
        batch += 1
    return batch


def gets_through(model: Model, job: Job, cluster: Cluster, strategy: Strategy, batch: int) -> bool:
    """Whether a step with this many sequences runs; refused jobs do not."""
    try:
        return served(estimate(model, replace(job, batch=batch), cluster, strategy), cluster)
    except InputError:
        return False


def served(said: Estimate, cluster: Cluster) -> bool:
    """Whether the allocator serves every request in what the middle of context and NCCL leaves of
    the GPU: LLMem's answer has no band."""
    left = usable(cluster.gpu) - said.outside
    return said.held <= left or replay(said.memory.tape, capacity=max(0, left)).oom is None


def solve(search: Search) -> Sequence[Found]:
    """Of the space's layouts those that are its methods, each with its largest micro-batch, under
    checkpoints where there is a choice."""
    space, best = search.space, dict[Way, Found]()
    if not space.kernels:
        return []
    job = next((one for one in space.kernels if one.checkpointing == "full"), space.kernels[0])
    for place, strategy in enumerate(space.strategies):
        method = method_of(strategy)
        for size, times in (
            sorted(search.ledger.batches[place].items(), reverse=True) if method is not None else ()
        ):
            asked = space.work.job_of(job, space.optimizers[0], size, times)
            try:
                said = estimate(space.work.model, asked, space.cluster, turned(strategy, times))
            except InputError:
                continue
            search.counted.replayed += 1
            if served(said, space.cluster):
                best[Way(method or "", size, strategy.data, strategy)] = Found(
                    kind=search.ledger.kind(job, place), estimate=said
                )
                break
    kinds: dict[object, Found] = {}
    for way in ranked(best):
        kinds.setdefault(best[way].kind, best[way])
    search.taken += list(kinds.values())[: search.each * len(METHODS)]
    return search.taken


__all__ = [
    "GATHERING",
    "METHODS",
    "OFFLOAD",
    "Way",
    "chosen",
    "gets_through",
    "largest",
    "method_of",
    "ranked",
    "served",
    "solve",
    "ways",
]
