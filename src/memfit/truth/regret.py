"""What a choice by predicted speed costs: of several ways that were measured for one model on one
machine, how much slower than the best the one is that memfit calls quickest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from memfit.lazy_dataclass import dataclass
from memfit.truth.speed import Speed, Speeds

FEWEST = 3  # ways to choose from
ALLOWED = 0.05


@dataclass(frozen=True, kw_only=True)
class Regret:
    """Of one sweep of `ways` runs: memfit's `choice` and the `best`, by their rows, and `lost`, the
    share of the best speed that it gives away."""

    source: str
    model: str
    gpu: str
    ranks: int
    seq: int
    ways: int
    choice: str
    best: str
    lost: float


def regrets(known: Speeds) -> Iterator[Regret]:
    """A sweep: runs of one source, on one model, machine and length of sequences, that differ in
    speed."""
    sweeps: dict[tuple[str, str, str, int, int], list[Speed]] = defaultdict(list)
    for one in known.found:
        case = one.case
        if case.job.training and case.gpu is not None:
            sweeps[case.source, case.model, case.gpu.id, case.strategy.ranks, case.job.seq].append(
                one
            )
    for (source, model, gpu, ranks, seq), some in sorted(sweeps.items()):
        if len(some) < FEWEST or len({one.measured for one in some}) < 2:
            continue
        best = max(some, key=lambda one: one.measured)
        choice = max(some, key=lambda one: one.predicted)
        yield Regret(
            source=source,
            model=model,
            gpu=gpu,
            ranks=ranks,
            seq=seq,
            ways=len(some),
            choice=choice.case.id,
            best=best.case.id,
            lost=1 - choice.measured / best.measured,
        )


__all__ = ["ALLOWED", "Regret", "regrets"]
