"""Ranked plans for a job on given GPUs: the cost and trade-offs of each, and why other
configurations are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field, replace
from typing import Annotated

from memfit.constants import setting
from memfit.estimate import Estimate, uncollected
from memfit.hardware import Cluster, usable
from memfit.lazy_dataclass import dataclass
from memfit.lower.walk_cache import remembering
from memfit.plan.bounds import Bounds
from memfit.plan.cost import MILLION, Cost, Paid, cost, paid
from memfit.plan.goals import Pace
from memfit.plan.ledger import Counted, Enough, Found, Kind
from memfit.plan.policies import POLICIES
from memfit.plan.search import Search
from memfit.plan.space import Space, Work
from memfit.plan.trade_offs import gives_up
from memfit.presentation import Presented

Progress = Callable[[Counted], None]
MOST_GPUS: Annotated[
    int, setting("GPUs on which a plan is sought where none fits on those given, at most")
] = 4096
EFFORT: Annotated[int, setting("estimates of such a search")] = 24
CLOSE: Annotated[
    float, setting("share of a step's time within which two rows are as fast as each other")
] = 0.02
SMALLER: Annotated[
    float, setting("share of the GPU from which a row that is as fast counts as smaller")
] = 0.05
LEAN = ("checkpointing", "liger")  # options whose last value holds least


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What another judge says of a row: the bytes that it holds of the GPU, the seconds of a step
    where it ran, or why it says nothing."""

    by: str
    device: int | None = None
    seconds: float | None = None
    fits: bool = True
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a plan: the best configuration of its kind."""

    kind: Kind
    estimate: Estimate
    cost: Cost | None
    gives_up: tuple[str, ...]
    checked: tuple[Checked, ...] = ()
    pace: Pace | None = None  # of answers, where they are what is planned
    groups: int = 1  # of GPUs that do the same, each as the estimate says


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A kind of strategy that is not among the rows, and why: no candidate takes less than
    `seconds` or less memory than `needs`, as far as each is known (`largest` holds most of that);
    or it is refused."""

    layout: str
    method: str = ""
    seconds: float | None = None
    needs: int | None = None
    refused: str = ""
    tokens_per_second: float | None = None  # of answers, at most
    largest: tuple[str, int] | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Presented):
    """`rows` are the best first; none where nothing fits: then `reason` says why, and `nearest` is
    a plan that does, on more GPUs."""

    work: Work
    cluster: Cluster
    paid: Paid
    tokens: float  # what costs are told of
    rows: tuple[Row, ...]
    dropped: tuple[Dropped, ...]
    counted: Counted
    interrupted: bool = False
    policy: str = "fastest"
    reason: str = ""
    nearest: Plan | None = None
    frontier: tuple[Row, ...] | None = None  # over all candidates, where that was asked for
    notes: tuple[str, ...] = field(default=())
    trade: tuple[
        Row, ...
    ] = ()  # of answers: all that none beats in seconds and in tokens a second, the quickest first

    @property
    def fits(self) -> bool:
        return bool(self.rows)

    @property
    def front(self) -> tuple[Row, ...]:
        """Of the rows, those that none of the same method beats in time and memory both; on one
        machine money is time. Of answers, in seconds and tokens a second."""
        if self.trade:
            best = [(row.estimate.job, row.kind) for row in self.trade]
            return tuple(row for row in self.rows if (row.estimate.job, row.kind) in best)
        return tuple(
            row
            for row in self.rows
            if not any(
                beats(other, row) for other in self.rows if other.kind.method == row.kind.method
            )
        )


def beats(one: Row, other: Row) -> bool:
    """No slower and no larger, and one of the two less. A time that is not known beats none."""
    mine, theirs = one.estimate, other.estimate
    if mine.time is None:
        return False
    slow = float("inf") if theirs.time is None else theirs.time.seconds
    return (
        mine.time.seconds <= slow
        and mine.device <= theirs.device
        and (mine.time.seconds, mine.device) != (slow, theirs.device)
    )


@dataclass(frozen=True, kw_only=True)
class Wish:
    """The goals of a plan. `tokens`: tokens of the dataset; 0 reports the cost of a million."""

    each: int = 3
    tokens: float = 0
    dollars: float | None = None  # of an hour of one GPU
    budget: float | None = None  # dollars for all of it
    hours: float | None = None  # that all of it may take
    policy: str = "fastest"
    progress: Progress | None = None


def plan(work: Work, cluster: Cluster, wish: Wish) -> Plan:
    found = sparing(work, cluster, wish)
    if found.fits or found.interrupted or found.nearest is not None:
        return found
    parked = once(replace(work, parked=True), cluster, wish) if wish.policy == "fastest" else found
    if parked.fits or parked.interrupted:
        return replace(parked, counted=together(found.counted, parked.counted))
    return replace(found, reason=why(found), nearest=nearest(work, cluster, wish))


def sparing(work: Work, cluster: Cluster, wish: Wish) -> Plan:
    """With the values that are tried first, then with all, then with CPU offload: each only for the
    methods that fit in no simpler way. A layout that is named is meant."""
    without = work.offload and bool(work.strategies)
    first = replace(work, offload=without, axes={**work.axes, **work.sparing})
    steps = {"usual settings": first, "all settings": replace(work, offload=without)}
    steps["CPU offload"] = work
    kept = list(steps.values())
    steps = {name: one for at, (name, one) in enumerate(steps.items()) if one not in kept[:at]}
    found: Plan | None = None
    for among, one in steps.items() if wish.policy == "fastest" else [("", work)]:
        shown = () if found is None else found.rows
        methods = one.axes.get("method", (work.job.method,))
        rest = tuple(name for name in methods if all(row.kind.method != name for row in shown))
        if found is not None and (found.interrupted or not rest):
            break
        axes = {**one.axes, "method": rest}
        shown_as = among if len(steps) > 1 else ""
        asked = replace(wish, progress=named(shown_as, wish.progress))
        asked = asked if one is first else replace(asked, each=1)
        later = once(replace(one, axes=axes), cluster, asked)
        found = later if found is None else merged(found, later)
    assert found is not None
    found = replace(found, work=work)
    return distinct(found) if wish.policy == "fastest" else found  # others order rows themselves


def merged(found: Plan, later: Plan) -> Plan:
    """One search, and a later one for methods that it found nothing for."""
    known = {(one.method, one.layout) for one in found.dropped}
    rows = (*found.rows, *later.rows)
    more = (one for one in later.dropped if (one.method, one.layout) not in known)
    return replace(
        later,
        rows=tuple(sorted(rows, key=seconds)),
        dropped=(*found.dropped, *more),
        counted=together(found.counted, later.counted),
        reason="" if rows else later.reason or found.reason,
        nearest=None if rows else found.nearest or later.nearest,
    )


def seconds(row: Row) -> float:
    return float("inf") if row.estimate.time is None else row.estimate.time.seconds


def distinct(found: Plan) -> Plan:
    """Rows grouped by method, the fastest first, each only where it is a choice: of those that are
    as fast as one another, the one that gives up least stays, and smaller ones."""
    rows: list[Row] = []
    dropped: list[Dropped] = []
    for method in dict.fromkeys(row.kind.method for row in found.rows):
        left = [row for row in found.rows if row.kind.method == method]
        while left:
            near = [row for row in left if seconds(row) <= seconds(left[0]) * (1 + CLOSE)]
            best = min(near or left[:1], key=lambda row: (len(row.gives_up), row.estimate.device))
            rows.append(best)
            limit = best.estimate.device - SMALLER * usable(found.cluster.gpu)
            same = [row for row in near if row is not best and row.estimate.device > limit]
            reason = f"no faster than {best.kind.layout}, and not much smaller"
            dropped += [
                Dropped(layout=row.kind.layout, method=method, refused=reason) for row in same
            ]
            left = [row for row in left if row is not best and row not in same]
    return replace(found, rows=tuple(rows), dropped=(*found.dropped, *dropped))


def together(one: Counted, other: Counted) -> Counted:
    """Of two searches."""
    sums = {
        name: getattr(one, name) + getattr(other, name)
        for name in ("size", "walked", "estimated", "replayed")
    }
    return Counted(**sums, best=other.best)


def none_at_all(
    work: Work, cluster: Cluster, wish: Wish, solve: Callable[[Work, Cluster, Wish], Plan] = plan
) -> Plan:
    """No GPUs were named: what one of them would do."""
    found = solve(work, cluster, wish)
    return replace(
        found,
        rows=(),
        dropped=(),
        reason="the number of GPUs must be at least 1",
        nearest=found if found.fits else found.nearest,
    )


def once(work: Work, cluster: Cluster, wish: Wish) -> Plan:
    """On these GPUs, whatever comes of it. Interrupted, it tells what was found until then."""
    with (
        uncollected(),
        remembering(),
    ):  # what is remembered goes before anything is looked through for cycles
        found = searched(work, cluster, wish)
    found = found if wish.hours is None else in_time(found, wish.hours)
    return found if wish.budget is None or not found.rows else afforded(found, wish.budget)


def searched(work: Work, cluster: Cluster, wish: Wish) -> Plan:
    space = Space(work, cluster)
    interrupted, search = False, None
    try:
        search = Search(
            space=space, bounds=Bounds(work.model, cluster), each=wish.each, progress=wish.progress
        )
        taken = list(POLICIES.find(wish.policy).solve(search))
    except (KeyboardInterrupt, Enough) as end:
        taken, interrupted = (
            list(search.taken) if search is not None else [],
            isinstance(end, KeyboardInterrupt),
        )
    each = paid(cluster, wish.dollars)
    rows = [row_of(one, cluster, each, wish.tokens) for one in taken]
    found = Plan(
        work=work,
        cluster=cluster,
        paid=each,
        tokens=wish.tokens or MILLION,
        rows=tuple(rows),
        interrupted=interrupted,
        dropped=() if search is None else tuple(dropped(space, search)),
        counted=Counted() if search is None else search.counted,
        policy=wish.policy,
        reason="interrupted before any plan that fits was found"
        if interrupted and not rows
        else "",
    )
    if search is not None:
        search.bounds.forget()
    return found


def judged(found: Plan, count: int, judge: Callable[[Row], Checked]) -> Plan:
    """With what a judge says of the first rows; what it says does not fit is not among them any
    more."""
    rows = [replace(row, checked=(*row.checked, judge(row))) for row in found.rows[:count]]
    out = [
        Dropped(
            layout=row.kind.layout,
            method=row.kind.method,
            refused=f"{told.by}: does not fit{f', {told.why}' if told.why else ''}",
        )
        for row in rows
        if not (told := row.checked[-1]).fits
    ]
    left = (*(row for row in rows if row.checked[-1].fits), *found.rows[count:])
    reason = (
        found.reason
        if left or not rows
        else f"none of the chosen plans fits when checked: {out[0].refused}"
    )
    return replace(found, rows=left, dropped=(*out, *found.dropped), reason=reason)


def in_time(found: Plan, hours: float) -> Plan:
    """The rows that finish in time; if none does, the quickest."""
    known = [row for row in found.rows if row.cost is not None]
    soon = tuple(row for row in known if row.cost is not None and row.cost.hours <= hours)
    if soon or not known:
        return replace(found, rows=soon)
    least = min(known, key=lambda row: row.cost.hours if row.cost is not None else 0.0)
    assert least.cost is not None
    reason = (
        f"the fastest plan that fits takes {least.cost.hours:.3g} hours; the budget is {hours:.3g}"
    )
    return replace(found, rows=(), reason=reason, nearest=replace(found, rows=(least,)))


def afforded(found: Plan, budget: float) -> Plan:
    """The rows that the budget pays for; where it pays for none, the cheapest is the nearest."""
    paid_for = tuple(row for row in found.rows if dollars(row) <= budget)
    if paid_for or not found.rows:
        return replace(found, rows=paid_for)
    least = min(found.rows, key=dollars)
    if dollars(least) == float("inf"):
        return replace(
            found,
            rows=(),
            reason="the price of this GPU is unknown; pass `--price`",
            nearest=found,
        )
    reason = (
        f"the cheapest plan that fits costs ${dollars(least):,.2f}; the budget is ${budget:,.2f}"
    )
    return replace(found, rows=(), reason=reason, nearest=replace(found, rows=(least,)))


def dollars(row: Row) -> float:
    return float("inf") if row.cost is None or row.cost.dollars is None else row.cost.dollars


def row_of(found: Found, cluster: Cluster, each: Paid, tokens: float) -> Row:
    one = found.estimate
    told = None if one.time is None else cost(one.time, cluster, each, tokens)
    return Row(
        kind=found.kind, estimate=one, cost=told, gives_up=tuple(gives_up(one.job, one.strategy))
    )


def dropped(space: Space, search: Search) -> Iterator[Dropped]:
    """One for each kind that was looked at and not taken, then one for what no candidate may have.
    Where a method has all the rows that it may have, not all of its candidates were looked at, and
    others than those may need less."""
    shown = {one.kind for one in search.taken}
    for kind, lost in sorted(
        search.ledger.lost.items(),
        key=lambda one: (one[1].seconds or float("inf"), one[1].needs or 0, one[0]),
    ):
        if kind not in shown and (lost.seconds or lost.needs or lost.refused or lost.behind):
            needs = None if search.full(kind.method) else lost.needs
            yield Dropped(
                layout=kind.layout,
                method=kind.method,
                seconds=lost.seconds,
                needs=needs,
                refused="" if lost.behind else lost.refused,  # others of the kind are slower
            )
    legal = {search.ledger.labels[place] for place in range(len(search.ledger.labels))}
    for name, reason in space.refused.items():
        if (
            (name != "options" or not space.kernels)
            and name not in legal
            and not any(name in one for one in legal)
            and reason
            and len(name) < 30
        ):
            yield Dropped(layout=name, refused=reason)


def why(found: Plan) -> str:
    """Why there is no row, in one sentence."""
    if found.reason:
        return found.reason
    needs = [one.needs for one in found.dropped if one.needs]
    if needs:
        return "nothing fits"
    refused = [one.refused for one in found.dropped if one.refused]
    return refused[0] if refused else "there are no candidates"


def nearest(work: Work, cluster: Cluster, wish: Wish) -> Plan | None:
    """With other layouts, or on the fewest more GPUs of the same kind, whole nodes of eight from
    there on; fewer, where more have no place. Where that is, the leanest ways tell, which are soon
    looked through; the quickest way there is then sought, as far as so much effort goes."""
    progress = named("more GPUs", wish.progress)
    asked = replace(wish, each=1, budget=None, hours=None)
    for lean in (leaner(work), work):
        for other in others(work, cluster):
            sequences = other.gpus * -(-work.sequences // other.gpus)
            found = once(
                replace(lean, sequences=sequences, strategies=()),
                other,
                replace(asked, progress=until(first, progress)),
            )
            if found.fits:
                tired = replace(asked, progress=until(tiring, progress))
                better = once(replace(work, sequences=sequences, strategies=()), other, tired)
                return better if better.fits else found
            if found.interrupted:
                return None
    return None


def others(work: Work, cluster: Cluster) -> Iterator[Cluster]:
    counts = [2**power for power in range(MOST_GPUS.bit_length())]
    more = [cluster.gpus] if work.strategies else []
    for count in (
        *more,
        *(one for one in counts if one > cluster.gpus),
        *(one for one in reversed(counts) if one < cluster.gpus),
    ):
        yield cluster if count == cluster.gpus else cluster.resized(count)


def leaner(work: Work) -> Work:
    """The values that hold least of what is open, and layouts that are quickly looked at: a layer
    stands for many, and there are no stages."""
    lean = {name: values[-1:] if name in LEAN else values for name, values in work.axes.items()}
    return replace(work, axes=lean, strategies=(), without=("pp", "zero"))


def first(counted: Counted) -> bool:
    return counted.best is not None


def tiring(counted: Counted) -> bool:
    return counted.estimated > EFFORT or counted.walked > 10 * EFFORT


def named(among: str, progress: Progress | None) -> Progress | None:
    """`progress`, told what the search is among."""
    if progress is None or not among:
        return progress

    def told(counted: Counted) -> None:
        counted.among = among
        progress(counted)

    return told


def until(enough: Callable[[Counted], bool], progress: Progress | None) -> Progress:
    """Ends a search when it is."""

    def told(counted: Counted) -> None:
        if progress is not None:
            progress(counted)
        if enough(counted):
            raise Enough

    return told


__all__ = ["Checked", "Dropped", "Plan", "Row", "Wish", "judged", "none_at_all", "plan", "sparing"]
