"""Ranked ways to answer on some GPUs: the best of each form of weights, how seconds trade against
tokens a second, and the nearest where nothing does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memfit.estimate import Estimate
from memfit.hardware import Cluster
from memfit.hardware.cluster import BOARD
from memfit.plan.cost import MILLION, Paid, paid, served
from memfit.plan.goals import Asked, Limits
from memfit.plan.inference import SERVED, Serving, Timed
from memfit.plan.ledger import Enough
from memfit.plan.planning import Dropped, Plan, Row, Wish
from memfit.plan.space import Work
from memfit.plan.trade_offs import gives_up
from memfit.plan.weights import WEIGHTS, packed

ANY = Limits()


def serve(work: Work, cluster: Cluster, wish: Wish) -> Plan:
    found = once(work, cluster, wish)
    if found.fits or found.interrupted:
        return found
    asked = budgeted(asked_of(work), cluster, found.paid, wish)
    close = nearest(work, cluster, wish, asked.limits)
    return replace(found, reason=why(found, close, asked.limits), nearest=close)


def once(work: Work, cluster: Cluster, wish: Wish) -> Plan:
    """On these GPUs, whatever comes of it. Interrupted, it tells what was found until then."""
    each = paid(cluster, wish.dollars)
    asked = budgeted(asked_of(work), cluster, each, wish)
    search = Serving(work=replace(work, serving=asked), cluster=cluster, progress=wish.progress)
    interrupted = False
    try:
        search.run(wish.each)
    except (KeyboardInterrupt, Enough) as end:
        interrupted = isinstance(end, KeyboardInterrupt)
    tokens = wish.tokens or MILLION
    rows = [row_of(*one, cluster, each, tokens) for one in search.best_of(wish.each)]
    trade = [row_of(*one, cluster, each, tokens) for one in search.front()] if rows else []
    return Plan(
        work=work,
        cluster=cluster,
        paid=each,
        tokens=tokens,
        rows=tuple(rows),
        trade=tuple(trade),
        interrupted=interrupted,
        dropped=tuple(dropped(search, rows)),
        counted=search.counted,
        policy=asked.goal,
        reason="interrupted before any plan that fits was found"
        if interrupted and not rows
        else "",
    )


def asked_of(work: Work) -> Asked:
    assert work.serving is not None
    return work.serving


def budgeted(asked: Asked, cluster: Cluster, each: Paid, wish: Wish) -> Asked:
    """The lowest speed that keeps within the budgets of hours and money, on a machine whose GPUs
    are all paid for. Without a price, no speed is enough."""
    tokens, least = wish.tokens or MILLION, asked.limits.tokens_per_second
    if wish.hours:
        least = max(least, tokens / (3600 * wish.hours))
    if wish.budget:
        dollars = float("inf") if each.dollars is None else each.dollars * cluster.gpus
        least = max(least, tokens * dollars / (3600 * wish.budget))
    return replace(asked, limits=replace(asked.limits, tokens_per_second=least))


def row_of(one: Timed, found: Estimate, cluster: Cluster, each: Paid, tokens: float) -> Row:
    way = one.way
    lost = [way.weights.gives_up] if way.weights.gives_up else []
    return Row(
        kind=way.kind,
        estimate=found,
        cost=served(one.pace.tokens_per_second, cluster, each, tokens),
        gives_up=(*lost, *gives_up(found.job, found.strategy)),
        pace=one.pace,
        groups=way.groups,
    )


def dropped(search: Serving, rows: list[Row]) -> Iterator[Dropped]:
    """One for each kind that was looked at and not taken, then what is refused; layouts of one form
    of weights that have the same reason together."""
    shown, reasons = {row.kind for row in rows}, dict[tuple[str, str], list[str]]()
    for kind, lost in search.lost.items():
        if kind in shown:
            continue
        if lost.refused and lost.seconds is None:
            reasons.setdefault((kind.method, lost.refused), []).append(kind.place)
            continue
        yield Dropped(
            layout=kind.place,
            method=kind.method,
            seconds=lost.seconds,
            tokens_per_second=lost.tokens_per_second,
            needs=lost.needs,
            largest=lost.largest,
        )
    looked = {(kind.method, kind.layout) for kind in search.lost}
    for (method, layout), reason in search.ways.refused.items():
        if (method, layout) not in looked:
            reasons.setdefault((method, reason), []).append(layout)
    for (method, reason), layouts in reasons.items():
        yield Dropped(layout=", ".join(filter(None, layouts)), method=method, refused=reason)


def why(found: Plan, close: Plan | None, limits: Limits) -> str:
    """Why there is no row, in one sentence."""
    pace = (
        None
        if close is None or close.cluster != found.cluster or not close.rows
        else close.rows[0].pace
    )
    for what, much, allowed in limits.broken(pace) if pace is not None else ():
        if what == "tokens per second":
            return f"the best plan that fits reaches {much:,.4g} {what}; the goal is {allowed:,.4g}"
        return (
            f"the fastest plan that fits takes {much:.3g} s for {what}; the limit is "
            f"{allowed:.3g} s"
        )
    if any(one.needs is not None for one in found.dropped):
        return "nothing fits"
    refused = [one.refused for one in found.dropped if one.refused]
    return refused[0] if refused else "there are no candidates"


def nearest(work: Work, cluster: Cluster, wish: Wish, limits: Limits) -> Plan | None:
    """What fits without the limits; else in any form of weights and cache; else on more GPUs of one
    node; else with fewer requests at once."""
    asked, one = asked_of(work), replace(wish, each=1, budget=None, hours=None)
    timed = bool(limits.answer or limits.first or limits.token)
    free = replace(
        asked,
        limits=ANY,
        goal="latency" if timed else "throughput" if limits != ANY else asked.goal,
    )
    found = once(replace(work, serving=free), cluster, one)
    if found.fits or found.interrupted:
        return found if found.fits else None
    whole = WEIGHTS if not packed(work.model) else asked.weights
    open_ = replace(work, axes=SERVED, strategies=(), serving=replace(free, weights=tuple(whole)))
    for other in (cluster, *more(cluster)):
        found = once(open_, other, one)
        if found.fits:
            return found
    requests = asked.requests // 2
    while requests:
        found = once(
            replace(open_, serving=replace(asked_of(open_), requests=requests)), cluster, one
        )
        if found.fits:
            return found
        requests //= 2
    return None


def more(cluster: Cluster) -> Iterator[Cluster]:
    for count in (2, 4, BOARD):
        if count > cluster.gpus_per_node:
            yield replace(cluster, gpus_per_node=count)


__all__ = ["once", "serve"]
