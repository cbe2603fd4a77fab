"""Cards without a GPU or without a model: the smallest GPU for each use of a model, and what a GPU
can do with some models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from memfit.errors import InputError
from memfit.estimate import Estimate, estimate, shortfall, uncollected
from memfit.hardware import GPU, Cluster, nvidia_cards, usable
from memfit.hardware.prices import price
from memfit.lower.walk_cache import remembering
from memfit.model.model import Model
from memfit.plan.card import Asking, Jobs, Serve, Use, context_of, layouts, of_use, uses_of
from memfit.presentation import Presented
from memfit.strategy import ONE


@dataclass(frozen=True, kw_only=True)
class Smallest:
    """The smallest GPU for a use, and the cheapest by public prices."""

    use: Use
    needs: int = 0
    gpu: GPU | None = None
    cheapest: GPU | None = None
    dollars: float | None = None
    refused: str = ""
    command: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class Smallests(Presented):
    model: Model
    rows: tuple[Smallest, ...]
    unknown: str = ""
    subject: str = ""  # the model as it was named


@dataclass(frozen=True, kw_only=True)
class Line:
    """One model on a GPU: the best use of each group that fits, with its bytes. Where no use fits,
    the bytes are those of the smallest one, or 0 where none is known."""

    name: str
    parameters: int
    answer: Use | None
    answer_bytes: int
    tune: Use | None
    tune_bytes: int


@dataclass(frozen=True, kw_only=True, repr=False)
class Shelf(Presented):
    """Which of some models a GPU can answer with and fine-tune."""

    cluster: Cluster
    lines: tuple[Line, ...]
    encodes: bool = False  # the models are encoders, with a decoder or without


def smallest(model: Model, asking: Asking) -> Smallests:
    uses = [use for use in uses_of(model) if not use.gguf]
    search = partial(smallest_row, model, asking.job_of)
    rows = asking.all(search, uses, lambda use: use.title)
    return Smallests(model=model, rows=tuple(rows))


def smallest_row(model: Model, job_of: Jobs, use: Use) -> Smallest:
    """The kernels of the first look are an A100's; every GPU named is looked at itself."""
    model = of_use(model, use, job_of, None)
    known = nvidia_cards()
    costs = {gpu.id: one.dollars for gpu in known if (one := price(gpu)) is not None}
    try:
        job = job_of(model, use, ONE, None)
        need = estimate(model, job, precise=False).reach
        by_size = sorted((one for one in known if usable(one) >= need), key=usable)
        found = first(model, use, by_size, job_of)
        rented = sorted((one for one in by_size if one.id in costs), key=lambda one: costs[one.id])
        cheapest = first(model, use, rented, job_of)
    except InputError as bad:
        return Smallest(use=use, refused=bad.problems[0].message)
    if found is None:
        return Smallest(use=use, needs=need)
    return Smallest(
        use=use,
        needs=found[1].device,
        gpu=found[0],
        cheapest=None if cheapest is None else cheapest[0],
        dollars=None if cheapest is None else costs[cheapest[0].id],
    )


def first(model: Model, use: Use, gpus: Sequence[GPU], job_of: Jobs) -> tuple[GPU, Estimate] | None:
    for gpu in gpus:
        found = estimate(model, job_of(model, use, ONE, gpu), Cluster(gpu=gpu))
        if found.verdict == "fits":
            return gpu, found
    return None


def shelf(models: Sequence[Model], cluster: Cluster, asking: Asking) -> Shelf:
    search = partial(line, cluster, asking.job_of, asking.serve)
    lines = asking.all(search, models, lambda model: model.name)
    encodes = all(model.encodes for model in models)
    return Shelf(cluster=cluster, lines=tuple(lines), encodes=encodes)


def line(cluster: Cluster, job_of: Jobs, serve: Serve, model: Model) -> Line:
    with uncollected(), remembering():
        answer = next(fitting_uses(model, cluster, job_of, serve, True), None)
        tune = next(fitting_uses(model, cluster, job_of, serve, False), None)
        return Line(
            name=model.name,
            parameters=model.parameters,
            answer=None if answer is None else answer[0],
            answer_bytes=answer[1] if answer else least(model, cluster, job_of, serve, True),
            tune=None if tune is None else tune[0],
            tune_bytes=tune[1] if tune else least(model, cluster, job_of, serve, False),
        )


def least(model: Model, cluster: Cluster, job_of: Jobs, serve: Serve, answers: bool) -> int:
    """What the smallest use of a group takes on each GPU; 0 where none is supported."""
    whole = model
    for use in reversed([one for one in uses_of(model) if one.answers is answers]):
        model = of_use(whole, use, job_of, cluster.gpu)
        if use.gguf:
            served = serve(model, use.gguf, cluster, context_of(model))
            if served is not None:
                return served.device
            continue
        for strategy in layouts(model, use, cluster):
            job = job_of(model, use, strategy, cluster.gpu)
            alone = job.replace(batch=1, accumulate=job.batch)
            try:
                return estimate(model, alone, cluster, strategy, precise=False).device
            except InputError:
                continue
    return 0


def fitting_uses(
    model: Model, cluster: Cluster, job_of: Jobs, serve: Serve, answers: bool
) -> Iterator[tuple[Use, int]]:
    """Those of one group that fit at their default, the best first; training with one sequence at a
    time where the default batch is too large."""
    for use in uses_of(model):
        if use.answers is not answers:
            continue
        if use.gguf:
            served = serve(model, use.gguf, cluster, context_of(model))
            if served is not None and served.fits:
                yield use, served.device
            continue
        needs = fitting_bytes(model, use, cluster, job_of)
        if needs is not None:
            yield use, needs


def fitting_bytes(model: Model, use: Use, cluster: Cluster, job_of: Jobs) -> int | None:
    """What a use takes on each GPU at its default, or with one sequence at a time; None where it
    does not fit."""
    model = of_use(model, use, job_of, cluster.gpu)
    for strategy in layouts(model, use, cluster):
        job = job_of(model, use, strategy, cluster.gpu)
        for one in dict.fromkeys((job, job.replace(batch=1, accumulate=job.batch))):
            try:
                if shortfall(model, one, cluster, strategy) > 0:
                    continue
                found = estimate(model, one, cluster, strategy)
            except InputError:
                continue
            if found.verdict == "fits":
                return found.device
    return None


__all__ = ["Line", "Shelf", "Smallest", "Smallests", "shelf", "smallest"]
