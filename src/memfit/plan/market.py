"""The cheapest machine on which some work can be done: those with a public price, in the order of
what an hour of them costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated

from memfit.constants import setting
from memfit.hardware import Cluster, all_gpus
from memfit.hardware.link import Link
from memfit.hardware.prices import price
from memfit.plan.ledger import Counted
from memfit.plan.planning import Dropped, Plan, Wish, first, leaner, once, sparing, tiring, until
from memfit.plan.space import Work

WORD = "cheapest"
Once = Callable[[Work, Cluster, Wish], Plan]
COUNTS: Annotated[
    tuple[int, ...], setting("GPUs that are tried: of one machine, then whole nodes of eight")
] = (1, 2, 4, 8, 16, 32, 64, 128)


def machines(network: Link | None = None) -> Iterator[tuple[float, Cluster]]:
    """With dollars of an hour, the cheapest first; of those that cost the same, the one with fewer
    GPUs."""
    priced = [(known.dollars, gpu) for gpu in all_gpus() if (known := price(gpu)) is not None]
    offered = [(count * dollars, count, gpu) for dollars, gpu in priced for count in COUNTS]
    for dollars, count, gpu in sorted(offered, key=lambda one: (one[0], one[1], one[2].id)):
        yield dollars, Cluster(gpu=gpu, network=network).resized(count)


def cheapest(
    work: Work, network: Link | None, wish: Wish, once: Once = once, solve: Once = sparing
) -> Plan:
    """The plan on the first of these machines that does the work, within the budgets if there are
    any; of cheaper ones it is told that none was found. Whether a machine does it the leanest ways
    tell, first those that are soon looked through; pipelines, which hold no less than shards, are
    not tried for that."""
    answers = work.serving is not None  # whose ways are soon looked through, and share no sequences
    passed: list[Dropped] = []
    found: Plan | None = None
    lean, told = (
        leaner(work),
        replace(wish, each=1, budget=None, hours=None, progress=until(over, wish.progress)),
    )
    for dollars, cluster in machines(network):
        if not answers and work.sequences % cluster.gpus:
            continue
        found = once(work, cluster, wish) if answers else once(lean, cluster, told)
        if not (answers or found.fits or found.interrupted):
            found = once(replace(lean, without=("pp",)), cluster, told)
        if found.fits:
            found = found if answers else solve(work, cluster, wish)
            if found.fits or found.interrupted:
                return replace(found, dropped=(*passed, *found.dropped))
        elif found.interrupted:
            return replace(
                found,
                dropped=tuple(passed),
                reason="interrupted before any fitting machine was found",
            )
        passed.append(
            Dropped(
                layout=cluster.name,
                refused=f"${dollars:,.2f} per hour: {found.reason or 'no way was found that fits'}",
            )
        )
    assert found is not None  # there is a machine of one GPU
    return replace(
        found,
        rows=(),
        dropped=tuple(passed),
        reason="no machine with a public price is enough",
    )


def over(counted: Counted) -> bool:
    return first(counted) or tiring(counted)


__all__ = ["WORD", "cheapest", "machines"]
