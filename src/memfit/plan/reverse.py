"""The questions turned round: the largest batch, the longest sequence, the smallest and the
cheapest GPU, the precision to go down to.

Memory grows with batch and length, nearly in proportion, so the end is sought along a line: first
of the live peak, which is quick and rules out what cannot fit, then with the allocator replayed. A
setting counts only if it `fits`; where that is uncertain, it does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from memfit.constants import setting
from memfit.errors import InputError
from memfit.estimate import Answer, Estimate, estimate, surplus
from memfit.hardware import GPU, Cluster, all_gpus, nvidia_cards, usable
from memfit.hardware.prices import price
from memfit.job import Job
from memfit.model.model import Model
from memfit.strategy import ONE, Strategy
from memfit.tape import Producer

LARGEST_BATCH: Annotated[int, setting("the largest batch that a job accepts")] = 2**24
LONGEST_SEQ: Annotated[int, setting("the longest sequence that a job accepts")] = 2**28
TRACED_TOKENS: Annotated[
    int, setting("tokens of a step at most by trace, which holds ids and masks in host memory")
] = 2**20


def largest_batch(
    model: Model,
    job: Job,
    cluster: Cluster | None,
    producer: Producer | None = None,
    strategy: Strategy = ONE,
) -> Answer:
    """How many sequences fit into one step, everything else being equal."""
    best, found, said = _largest(
        _Search(model, job, _named(cluster), strategy, producer, "batch"), LARGEST_BATCH
    )
    return Answer(
        question="largest_batch",
        value=best,
        device=None if found is None else found.device,
        limit=said,
    )


def longest_seq(
    model: Model,
    job: Job,
    cluster: Cluster | None,
    producer: Producer | None = None,
    strategy: Strategy = ONE,
) -> Answer:
    """How many tokens a sequence may have, up to what the model has positions for; of long ones a
    multiple of `STEP`."""
    top = (
        LONGEST_SEQ
        if not model.positions
        else max(1, min(LONGEST_SEQ, model.positions - (0 if job.training else job.new_tokens)))
    )
    best, found, said = _largest(
        _Search(model, job, _named(cluster), strategy, producer, "seq"), top
    )
    limit = "the model's maximum length" if best == top and model.positions else said
    return Answer(
        question="longest_seq",
        value=best,
        device=None if found is None else found.device,
        limit=limit,
    )


def smallest_gpu(
    model: Model,
    job: Job,
    cluster: Cluster | None = None,
    producer: Producer | None = None,
    strategy: Strategy = ONE,
) -> Answer:
    """The NVIDIA GPU on record that offers the least and is enough; among equals the first of the
    table. Those without the kernels that the job asks for do not count."""
    some = sorted(nvidia_cards(), key=usable)
    gpu, found = _enough(model, job, (cluster, strategy), producer, some)
    if gpu is not None and found is not None:
        return Answer(question="smallest_gpu", value=gpu.id, device=found.device, limit=gpu.name)
    return Answer(
        question="smallest_gpu",
        value=None,
        limit=f"no known {'single ' if strategy.ranks == 1 else ''}NVIDIA GPU is enough",
    )


def cheapest_gpu(
    model: Model,
    job: Job,
    cluster: Cluster | None = None,
    producer: Producer | None = None,
    strategy: Strategy = ONE,
) -> Answer:
    """The same by what an hour costs, of those with a public price."""
    known = {gpu.id: one for gpu in all_gpus() if (one := price(gpu)) is not None}
    some = sorted(
        (gpu for gpu in all_gpus() if gpu.id in known),
        key=lambda gpu: (known[gpu.id].dollars, usable(gpu)),
    )
    gpu, found = _enough(model, job, (cluster, strategy), producer, some)
    if gpu is not None and found is not None:
        one = known[gpu.id]
        limit = (
            f"{gpu.name}, ${one.dollars:.2f} per hour{' each' if strategy.ranks > 1 else ''} "
            f"on {one.date}"
        )
        return Answer(question="cheapest_gpu", value=gpu.id, device=found.device, limit=limit)
    return Answer(
        question="cheapest_gpu",
        value=None,
        limit=f"none of the {len(known)} GPUs with a public price is enough",
    )


def _enough(
    model: Model,
    job: Job,
    place: tuple[Cluster | None, Strategy],
    producer: Producer | None,
    gpus: Sequence[GPU],
) -> tuple[GPU | None, Estimate | None]:
    """The first of these on which it fits."""
    cluster, strategy = place
    for gpu in gpus:
        one = Cluster(gpu=gpu) if cluster is None else dataclasses.replace(cluster, gpu=gpu)
        try:
            if model.layers and surplus(model, job, one, strategy=strategy, precise=False) > 0:
                continue
            fits = surplus(model, job, one, producer, strategy=strategy) <= 0
        except InputError:
            continue
        if fits:
            return gpu, estimate(model, job, one, strategy, producer=producer)
    return None, None


def cheapest_precision(
    model: Model,
    job: Job,
    cluster: Cluster | None,
    producer: Producer | None = None,
    strategy: Strategy = ONE,
) -> Answer:
    """The most exact precision that fits. All are tried, so that their costs can be compared."""
    one = _named(cluster)
    tried: list[tuple[str, str, int]] = []
    for name, changes in _precisions(job):
        try:
            found = estimate(model, job.replace(**changes), one, strategy, producer=producer)
        except InputError as bad:
            tried.append((name, bad.problems[0].message, 0))
        else:
            tried.append((name, found.verdict or "", found.device))
    best = next(
        ((name, device) for name, verdict, device in tried if verdict == "fits"), (None, None)
    )
    return Answer(question="cheapest_precision", value=best[0], device=best[1], tried=tuple(tried))


def _precisions(job: Job) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """From the most precise to the cheapest."""
    half = "fp16" if "fp16" in job.precision else "bf16"
    plain: dict[str, Any] = {"quant": "none"}
    if job.adapters:
        plain["method"] = "lora"
    yield "fp32", {**plain, "precision": "fp32"}
    if job.training:
        yield f"autocast-{half}", {**plain, "precision": f"autocast-{half}"}
        if half == "bf16" and not job.adapters:
            yield "bf16-master", {**plain, "precision": "bf16-master"}
    yield half, {**plain, "precision": half}
    if job.adapters or not job.training:
        method = {"method": "qlora"} if job.adapters else {}
        for quant in ("int8", "nf4"):
            yield f"{quant} weights, {half}", {**method, "precision": half, "quant": quant}


def _named(cluster: Cluster | None) -> Cluster:
    if cluster is None:
        raise InputError.one(
            "this question needs a GPU",
            where="gpu",
            hint="add `--gpu rtx-4090`",
        )
    return cluster


class _Search:
    """How far one setting may go, everything else being equal; every value is looked at once."""

    def __init__(
        self,
        model: Model,
        job: Job,
        cluster: Cluster,
        strategy: Strategy,
        producer: Producer | None,
        field: str,
    ) -> None:
        self.model, self.job, self.cluster, self.strategy, self.producer, self.field = (
            model,
            job,
            cluster,
            strategy,
            producer,
            field,
        )
        self.seen: dict[tuple[int, bool], int] = {}

    def over(self, value: int, precise: bool = True) -> int:
        known = self.seen.get((value, precise))
        if known is None:
            job, producer = (
                self.job.replace(**{self.field: value}),
                self.producer if precise else None,
            )
            known = self.seen[value, precise] = surplus(
                self.model, job, self.cluster, producer, strategy=self.strategy, precise=precise
            )
        return known

    def live(self, top: int) -> tuple[int, int]:
        """The last value whose live peak has room, and by how much one more raises that."""
        bound = last(
            lambda value: self.over(value, False), top, min(top, getattr(self.job, self.field))
        )
        half = bound // 2
        return bound, (self.over(bound, False) - self.over(half, False)) // (
            bound - half
        ) if half else 0

    def largest(self, top: int) -> int:
        """0 if none fits. Gaps of the allocator are no smooth matter: what was found is looked
        beyond once more."""
        if not self.model.layers:  # each value is a trace: as few as will do, and none that is huge
            return last(self.over, top, min(top, getattr(self.job, self.field)))
        bound, rise = self.live(top)
        if not bound or self.over(bound) <= 0:
            return bound
        step = STEP if self.field == "seq" and bound > 16 * STEP else 1
        end, good = -(-bound // step) - 1, 0  # the last multiple below
        start = (bound - self.over(bound) // rise) // step if rise > 0 else end // 2
        while True:
            at, known = max(good + 1, min(end, start)), ((bound // step, self.over(bound)),)
            good = last(lambda value: self.over(value * step), end, at, good, known)
            further = (
                start
                for start in dict.fromkeys(good * part // 4 for part in (5, 6, 8))
                if good + 1 < start <= end
            )
            start = next((start for start in further if self.over(start * step) <= 0), 0)
            if not start:
                return good * step
            good = start

    def answer(self, value: int) -> Estimate:
        return estimate(
            self.model,
            self.job.replace(**{self.field: value}),
            self.cluster,
            self.strategy,
            producer=self.producer,
        )

    def uneven(self, best: int) -> bool:
        """Was there less that does not fit?"""
        return any(
            over > 0 and value < best for (value, precise), over in self.seen.items() if precise
        )


def _largest(search: _Search, top: int) -> tuple[int | None, Estimate | None, str]:
    """The largest value of the search's field up to `top` that fits, with its estimate and what
    there is to say about it."""
    job, limit = search.job, top
    if not search.model.layers:
        tokens = job.batch * job.beams * job.reach
        limit = min(top, max(1, TRACED_TOKENS * getattr(job, search.field) // tokens))
    best = search.largest(limit)
    if not best:
        return None, None, ""
    said = (
        "fragmentation varies: some smaller ones do not fit"
        if search.uneven(best)
        else f"a trace stops at {TRACED_TOKENS} tokens"
        if best == limit < top
        else ""
    )
    return best, search.answer(best), said


Points = Sequence[tuple[int, int]]


def last(
    over: Callable[[int], int],
    top: int,
    start: int = 1,
    good: int = 0,
    known: Points = (),
    *,
    share: int = 0,
) -> int:
    """The last of `good` … `top` at which `over` is not positive, as it is from there on; `good` is
    known to be one. `over` is taken for a line through the last two points: the next is where that
    crosses zero, and a little beyond, so that the end is caught between two. `share`: it is enough
    to know the end to one part in so many, for which a line between two points stands."""
    bad, known = top + 1, list(known)
    at, slow = start, 0
    while good + 1 < bad and (good == 0 or bad > top or (bad - good) * share > good or not share):
        known.append((at, over(at)))
        before = bad - good
        good, bad = (at, bad) if known[-1][1] <= 0 else (good, at)
        slow = slow + 1 if 4 * (bad - good) > before else 0
        at = (good + bad) // 2 if slow > 2 else _crossing(known)
        slow = 0 if slow > 2 else slow
        margin = max(1, (bad - good) // 8) if known[-1][1] > 0 or bad <= top else 1
        at = good + margin if at <= good else bad - margin if at >= bad else at
    if good + 1 < bad:
        value = dict(known)
        good += (bad - good) * -value[good] // (value[bad] - value[good])
    return good


STEP: Annotated[int, setting("tokens of which a longest sequence is a multiple")] = 64
STRIDE: Annotated[int, setting("times as far as before that the search goes, at most")] = 64


def _crossing(known: Points) -> int:
    """Where the line through the last two points, or through the last one alone, is zero, and a
    sixteenth of the way on."""
    (at, value) = known[-1]
    other, before = known[-2] if len(known) > 1 else (at, value)
    if value == before:
        return at * 2 if value <= 0 else at - max(1, at // 16)
    way = value * (other - at) // (value - before)
    way = max(-at, min(way, STRIDE * at))
    return at + way + (way // 16 or (1 if value <= 0 else -1))


QUESTIONS: Mapping[
    str, Callable[[Model, Job, Cluster | None, Producer | None, Strategy], Answer]
] = {
    "largest_batch": largest_batch,
    "longest_seq": longest_seq,
    "smallest_gpu": smallest_gpu,
    "cheapest_gpu": cheapest_gpu,
    "cheapest_precision": cheapest_precision,
}

__all__ = [
    "QUESTIONS",
    "cheapest_gpu",
    "cheapest_precision",
    "largest_batch",
    "last",
    "longest_seq",
    "smallest_gpu",
]
