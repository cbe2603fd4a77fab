"""Candidates looked at one by one: by the formulas, and by what the formulas said of others that
are like them."""

from __future__ import annotations

from dataclasses import field
from itertools import product
from typing import Annotated

from memfit.constants import setting
from memfit.errors import InputError
from memfit.estimate import Estimate, estimate, surplus
from memfit.hardware import usable
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.optimizers import OPTIMIZERS
from memfit.plan.bounds import under_way
from memfit.plan.ledger import Kind, Ledger, Lost, Node
from memfit.plan.memory_lower_bounds import hosted
from memfit.plan.reuse_estimates import Beyond, Passed, passed, sending
from memfit.plan.space import turned

TIED: Annotated[
    float, setting("share of a step's time within which bounds do not tell two optimizers apart")
] = 0.002
NEAR: Annotated[float, setting("share of the GPU from which a bound is near to full")] = 0.9
PAIR: Annotated[int, setting("layouts: one, and the other that it bounds")] = 2
ALIKE: Annotated[
    float,
    setting("share of a layout's kernel time that another of the same kernels reaches at least"),
] = 0.9


@dataclass(kw_only=True)
class Asking:
    """`quick`: asked for another's sake. `gaps`: of each kind, the largest share of its live bytes
    that any needed once the allocator was replayed."""

    ledger: Ledger
    refused: dict[tuple[Job, int], str] = field(default_factory=dict)
    passed: dict[tuple[object, ...], Passed] = field(default_factory=dict)
    beyond: dict[tuple[object, ...], list[Beyond]] = field(default_factory=dict)
    quick: dict[tuple[object, ...], Estimate] = field(default_factory=dict)
    precise: dict[tuple[object, ...], Estimate | None] = field(default_factory=dict)
    failed: set[tuple[object, ...]] = field(default_factory=set)
    gaps: dict[Kind, float] = field(default_factory=dict)

    def crowded(self, node: Node) -> bool:
        """Whether the first or the last stage of a pipeline holds too much for certain, with what
        the micro-batches under way leave there."""
        strategy = self.ledger.space.strategies[node.strategy]
        pp, micro = strategy.pp, (node.batch, node.times)
        walked = (
            None
            if node.like is None or pp is None or pp.size == 1
            else self.ledger.bounds.walked(node.like, node.batch)
        )
        if node.like is None or walked is None or pp is None:
            return False
        staying = self.ledger.bounds.staying(node.like, strategy, micro, walked)
        again = node.times * pp.virtual > under_way(pp, node.times)
        least = self.ledger.bounds.holds.ends(
            self.ledger.job(node), strategy, micro, staying, again=again
        )
        return self.ledger.lacking(least, node.kernels, node.strategy) > 0

    def sooner(self, node: Node) -> float | None:
        """The least time that what is known of the same passes leaves it, under another optimizer
        or in a layout that holds less; None where it does not fit."""
        place, near = node.strategy, self.ledger.closest[node.strategy]
        stepping, kept = self.ledger.static(node.kernels, place, node.optimizer)
        if (
            self.passes_of(node) not in self.passed
            and (first := self.plainer(node)) is not None
            and not self.crowded(first)
        ):
            found = self.asked(first)
            if found is not None:
                self.quick[first.name] = found
        known = self.passed.get(self.passes_of(node))
        if known is not None:
            lacking = self.ledger.lacking(known.held + kept.states, node.kernels, place) > 0
            return (
                None
                if lacking
                else (known.seconds + known.sent + known.rest + stepping) * (1 + 1e-9)
            )  # behind its like, if no quicker
        if near == place:
            return node.seconds
        like = node._replace(strategy=near)
        if (
            self.passes_of(like) not in self.passed
            and self.tells(like)
            and (found := self.asked(like)) is not None
        ):
            self.quick[like.name] = found
        known, strategy = self.passed.get(self.passes_of(like)), self.ledger.space.strategies[place]
        if known is None:
            return node.seconds
        if (
            not strategy.offloads
            and self.ledger.lacking(known.held + kept.states, node.kernels, place) > 0
        ):
            return None
        if strategy.zero is not None:  # that sends the same, and copies beside it
            return max(node.seconds, known.seconds + stepping)
        calling = self.ledger.calling(node.kernels, place, node.times)
        return max(
            node.seconds, max(known.kernels + self.ledger.taken_share * calling, calling) + stepping
        )

    def tells(self, node: Node) -> bool:
        """Whether an answer for this layout pays where another one is looked at: several layouts
        are bounded by it, or it may fit and be looked at itself."""
        kept = self.ledger.static(node.kernels, node.strategy, node.optimizer)[1]
        return self.ledger.closest.count(node.strategy) > PAIR or (
            kept.always + kept.gradients <= self.ledger.most_live
        )

    def steps_alike(self, node: Node) -> bool:
        """Whether all that the GPU does is known from another optimizer, because the host steps."""
        return (
            hosted(self.ledger.space.strategies[node.strategy])
            and node.name not in self.quick
            and self.passes_of(node) in self.passed
        )

    def plainer(self, node: Node) -> Node | None:
        """The same with an earlier optimizer that may be as quick: in a tie it is taken, so it is
        asked first."""
        statics = self.ledger.statics(node.kernels, node.strategy)
        own, when = (
            self.ledger.space.optimizers.index(node.optimizer),
            OPTIMIZERS[node.optimizer].when,
        )
        for at, (stepping, kept) in enumerate(statics[:own]):
            near = (
                stepping - statics[own][0] < TIED * node.seconds
                and kept.always <= self.ledger.most_live
            )
            if near and OPTIMIZERS[self.ledger.space.optimizers[at]].when == when:
                return node._replace(optimizer=self.ledger.space.optimizers[at])
        return None

    def later(self, node: Node) -> float:
        """The least time with what the layout was seen to add to other kernels or micro-batches; of
        a pipeline, with its last stage's own work."""
        strategy, walked = self.ledger.space.strategies[node.strategy], None
        if node.like is not None:
            walked = self.ledger.bounds.walked(node.like, node.batch)
        if node.like is None or walked is None:
            return 0.0
        stepping, _ = self.ledger.static(node.kernels, node.strategy, node.optimizer)
        if strategy.size("pp") > 1:
            micro = node.batch, node.times
            share = self.ledger.bounds.staged(node.like, strategy, micro, walked)
            passes = (
                node.times
                * share
                * (
                    walked.seconds
                    + node.batch * self.ledger.bounds.splitting(node.like, node.batch)
                )
            )
            passes += self.ledger.taken_share * self.ledger.calling(
                node.kernels, node.strategy, node.times
            )
            passes = max(passes, self.ledger.bounds.pipelined(node.like, strategy, micro, walked))
            if node.like.job != node.kernels and passes + stepping <= node.seconds * (1 + 1e-9):
                passes = max(
                    passes, self.ledger.bounds.sharded_stage(node.kernels, strategy, micro)
                )
            return passes + stepping
        passes, kernels = 0.0, node.times * walked.seconds
        like = (
            (node.strategy, self.ledger.closest[node.strategy])
            if strategy.zero is not None
            else (node.strategy,)
        )
        for place, checkpointing in product(
            dict.fromkeys(like), {"none", node.kernels.checkpointing}
        ):
            for one in self.beyond.get(self.adding(node, place, checkpointing), ()):
                sending = one.calls * min(1.0, node.times / one.times)
                more = ALIKE * one.kernels if node.times >= one.times else 0.0
                passes = max(passes, sending, kernels + more + self.ledger.taken_share * sending)
        return passes + stepping if passes else 0.0

    @staticmethod
    def adding(node: Node, place: int, checkpointing: str) -> tuple[object, ...]:
        """What tells what a layout adds: nothing is added without checkpoints that is not with
        them. Where numbers are cast, it may be the loss's."""
        job = node.kernels
        casts = (job.liger, job.loss) if job.autocast or job.quantization != "none" else ()
        return job.framework, job.method, job.precision, job.quant, *casts, checkpointing, place

    def asked(self, node: Node) -> Estimate | None:
        """By the formulas; what they say of the passes is kept."""
        found = self.quick.pop(node.name, None) or self.ask(node, precise=False)
        if found is None:
            return None
        known = self.passed[self.passes_of(node)] = passed(found, node.seconds)
        walked = None if node.like is None else self.ledger.bounds.walked(node.like, node.batch)
        if found.time is not None and walked is not None and found.strategy.size("pp") == 1:
            one = Beyond(
                node.times, sending(found), max(0.0, known.kernels - node.times * walked.seconds)
            )
            self.beyond.setdefault(
                self.adding(node, node.strategy, node.kernels.checkpointing), []
            ).append(one)
        return found

    @staticmethod
    def passes_of(node: Node) -> tuple[object, ...]:
        """What tells the passes: of the optimizer only when it steps."""
        return node.kernels, node.batch, node.strategy, OPTIMIZERS[node.optimizer].when

    def ask(self, node: Node, *, precise: bool) -> Estimate | None:
        work = self.ledger.space.work
        try:
            strategy = turned(self.ledger.space.strategies[node.strategy], node.times)
            found = estimate(
                work.model,
                self.ledger.job(node),
                self.ledger.space.cluster,
                strategy,
                precise=precise,
            )
        except InputError as bad:
            self.refused[node.kernels, node.strategy] = bad.problems[0].message
            self.ledger.lost_of(node.kernels, node.strategy).refused = bad.problems[0].message
            return None
        if precise:
            self.ledger.counted.replayed += 1
        else:
            self.ledger.counted.estimated += 1
        return found

    def needs(self, node: Node) -> int | None:
        """Bytes that it needs with the allocator replayed, where its live peak leaves little room:
        most of those do not fit, which one replay tells, and an answer takes several. None where
        there is room."""
        ledger, live = self.ledger, self.live(node)
        gap = self.gaps.get(ledger.kind(node.kernels, node.strategy), 1.0)
        if live is None or gap * live < NEAR * ledger.usable:
            return None
        strategy, cluster = (
            turned(ledger.space.strategies[node.strategy], node.times),
            ledger.space.cluster,
        )
        try:
            found = usable(cluster.gpu) + surplus(
                ledger.space.work.model, ledger.job(node), cluster, strategy=strategy
            )
        except InputError:  # which an answer will tell
            return None
        ledger.counted.replayed += found > ledger.usable
        return found

    def live(self, node: Node) -> float | None:
        """Bytes that its live peak makes of the GPU at the upper end of the band, as far as they
        are known."""
        ledger, known = self.ledger, self.passed.get(self.passes_of(node))
        if known is None:
            return None
        kept = ledger.static(node.kernels, node.strategy, node.optimizer)[1]
        return ledger.high * (known.held + kept.states) + ledger.outside

    def learn(self, node: Node, needs: int) -> None:
        """Record how far replayed bytes exceed the live peak, for candidates of the same kind."""
        kind, live = self.ledger.kind(node.kernels, node.strategy), self.live(node)
        if live:
            self.gaps[kind] = max(self.gaps.get(kind, 1.0), needs / live)

    def short(self, found: Estimate, lost: Lost) -> int:
        """By how much the band of the live peak alone is too large."""
        over = found.reach - self.ledger.usable
        if over > 0:
            lost.needs = min(found.reach, lost.needs or found.reach)
        return over


__all__ = ["Asking"]
