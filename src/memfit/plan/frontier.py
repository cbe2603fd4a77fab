"""The front of time, memory and money over all candidates: the quickest way within each limit of
memory, and the quickest on fewer GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from memfit.constants import setting
from memfit.estimate import uncollected
from memfit.hardware import Cluster
from memfit.hardware.cluster import BOARD
from memfit.lower.walk_cache import remembering
from memfit.plan.bounds import Bounds
from memfit.plan.cost import paid
from memfit.plan.planning import Plan, Row, Wish, dollars, row_of
from memfit.plan.search import Search
from memfit.plan.space import Space, Work

STEP: Annotated[float, setting("share of memory by which the next way on the front is smaller")] = (
    0.2
)
MOST: Annotated[int, setting("ways on the same GPUs, at most")] = 24
HALVINGS = 3


def frontier(found: Plan, wish: Wish) -> Plan:
    """The plan with those ways that none beats in all three; interrupted, with those that were
    found until then."""
    rows: list[Row] = []
    interrupted = found.interrupted
    try:
        with uncollected(), remembering():  # as the plan's own search
            for cluster in () if interrupted else smaller(found.work, found.cluster):
                bounds = Bounds(found.work.model, cluster)
                rows += limits(found.work, bounds, wish, MOST if cluster == found.cluster else 1)
                bounds.forget()
    except KeyboardInterrupt:
        interrupted = True
    left = [row for row in rows if within(row, wish)]
    front = tuple(row for row in left if not any(beats(other, row) for other in left))
    return replace(
        found, frontier=tuple(sorted(front, key=lambda row: point(row)[0])), interrupted=interrupted
    )


def limits(work: Work, bounds: Bounds, wish: Wish, most: int) -> Iterator[Row]:
    """The quickest way, then the quickest that takes a step less of each GPU, until nothing fits.
    What does not state a time is not on any front."""
    cluster = bounds.cluster
    each = paid(cluster, wish.dollars)
    search = Search(
        space=Space(work, cluster), bounds=bounds, each=1, enough=1, progress=wish.progress
    )
    for _ in range(most):
        search.run()
        if not search.taken or search.taken[0].estimate.time is None:
            return
        one = search.taken[0]
        yield row_of(one, cluster, each, wish.tokens)
        search = search.again(int((1 - STEP) * one.estimate.band.high))


def smaller(work: Work, cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, half of it and so on, in whole nodes: fewer GPUs are slower but idle less. With
    a named layout, only all GPUs."""
    yield cluster
    count, node = cluster.gpus, min(cluster.gpus_per_node, BOARD)
    for _ in range(0 if work.strategies else HALVINGS):
        if count % 2:
            return
        count //= 2
        if count <= node or count % node == 0:
            yield cluster.resized(count, node)


def within(row: Row, wish: Wish) -> bool:
    late = wish.hours is not None and row.cost is not None and row.cost.hours > wish.hours
    return not late and (wish.budget is None or dollars(row) <= wish.budget)


def point(row: Row) -> tuple[float, int, float]:
    assert row.estimate.time is not None
    return row.estimate.time.seconds, row.estimate.band.high, dollars(row)


def beats(one: Row, other: Row) -> bool:
    mine, theirs = point(one), point(other)
    return mine != theirs and all(own <= its for own, its in zip(mine, theirs, strict=True))


__all__ = ["frontier"]
