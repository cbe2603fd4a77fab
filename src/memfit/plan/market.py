"""The cheapest machine on which some work can be done: those with a public price, in the order of what an hour of them costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memfit.hardware import Cluster, all_gpus
from memfit.hardware.cluster import BOARD
from memfit.hardware.link import Link
from memfit.hardware.prices import price
from memfit.plan.planning import Dropped, Plan, Wish, first, leaner, once, tiring, until
from memfit.plan.search import Counted
from memfit.plan.space import Work

WORD = "cheapest"
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)  # GPUs of a machine, whole nodes of eight from there on


def machines(network: Link | None = None) -> Iterator[tuple[float, Cluster]]:
    """With dollars of an hour, the cheapest first; of those that cost the same, the one with fewer GPUs."""
    priced = [(known.dollars, gpu) for gpu in all_gpus() if (known := price(gpu)) is not None]
    offered = [(count * dollars, count, gpu) for dollars, gpu in priced for count in COUNTS]
    for dollars, count, gpu in sorted(offered, key=lambda one: (one[0], one[1], one[2].id)):
        yield dollars, Cluster(gpu=gpu, gpus_per_node=min(count, BOARD), nodes=max(1, count // BOARD), network=network)


def cheapest(work: Work, network: Link | None, wish: Wish) -> Plan:
    """The plan on the first of these machines that does the work, within the budgets if there are any; of cheaper ones it is told that none was found.
    Whether a machine does it the leanest ways tell, first those that are soon looked through; pipelines, which hold no less than shards, are not
    tried for that."""
    passed: list[Dropped] = []
    found: Plan | None = None
    lean, told = leaner(work), replace(wish, each=1, budget=None, hours=None, progress=until(over, wish.progress))
    for dollars, cluster in machines(network):
        if work.sequences % cluster.gpus:
            continue
        for ways in (lean, replace(lean, without=("pp",))):
            found = once(ways, cluster, told)
            if found.fits:
                break
            if found.interrupted and not tiring(found.counted):
                return replace(found, dropped=tuple(passed), reason="interrupted before any machine was found on which it fits")
        if found is not None and found.fits:
            found = once(work, cluster, wish)
            if found.fits or found.interrupted:
                return replace(found, dropped=(*passed, *found.dropped))
        reason = "no way was found that fits" if found is None else found.reason or "no way was found that fits"
        passed.append(Dropped(layout=named(cluster), refused=f"${dollars:,.2f} an hour: {reason}"))
    assert found is not None
    reason = "none of the machines with a public price does it"
    return replace(found, rows=(), dropped=tuple(passed), reason=reason, nearest=found.nearest)


def over(counted: Counted) -> bool:
    return first(counted) or tiring(counted)


def named(cluster: Cluster) -> str:
    nodes = f"{cluster.nodes} x " if cluster.nodes > 1 else ""
    return f"{nodes}{cluster.gpus_per_node} x {cluster.gpu.name}"


__all__ = ["WORD", "cheapest", "machines"]
