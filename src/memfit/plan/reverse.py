"""The questions turned round: the largest batch, the longest sequence, the smallest GPU, the precision to go down to.

Memory grows with batch and length, so each is a bisection: first on the live peak, which is quick and rules out what cannot fit, then
on full estimates. A setting counts only if it `fits`; where that is uncertain, it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from memfit.errors import InputError
from memfit.estimate import Answer, Estimate, estimate
from memfit.hardware import Cluster, all_gpus, usable
from memfit.job import Job
from memfit.model.modules import Model
from memfit.tape import Producer

LARGEST_BATCH, LONGEST_SEQ = 2**24, 2**28  # what a Job accepts


def largest_batch(model: Model, job: Job, cluster: Cluster | None, producer: Producer | None = None) -> Answer:
    """How many sequences fit into one step, everything else being equal."""
    best, found = _largest(model, job, _named(cluster), producer, "batch", LARGEST_BATCH)
    return Answer(question="largest_batch", value=best, device=_device(found))


def longest_seq(model: Model, job: Job, cluster: Cluster | None, producer: Producer | None = None) -> Answer:
    """How many tokens a sequence may have, up to what the model has positions for."""
    top = LONGEST_SEQ if not model.positions else max(1, min(LONGEST_SEQ, model.positions - (0 if job.training else job.new_tokens)))
    best, found = _largest(model, job, _named(cluster), producer, "seq", top)
    limit = "the model has no more positions" if best == top and model.positions else ""
    return Answer(question="longest_seq", value=best, device=_device(found), limit=limit)


def smallest_gpu(model: Model, job: Job, cluster: Cluster | None = None, producer: Producer | None = None) -> Answer:
    """The NVIDIA GPU on record that offers the least and is enough; among equals the first of the table."""
    for gpu in sorted((gpu for gpu in all_gpus() if gpu.vendor == "nvidia"), key=usable):
        one = Cluster(gpu=gpu)
        if model.layers and not _may_fit(estimate(model, job, one, precise=False)):
            continue
        found = estimate(model, job, one, producer=producer)
        if found.verdict == "fits":
            return Answer(question="smallest_gpu", value=gpu.id, device=found.device, limit=gpu.name)
    return Answer(question="smallest_gpu", value=None, limit="no single NVIDIA GPU on record is enough")


def cheapest_precision(model: Model, job: Job, cluster: Cluster | None, producer: Producer | None = None) -> Answer:
    """The precision that gives up least and fits; all are tried, so that the prices can be compared."""
    one = _named(cluster)
    tried: list[tuple[str, str, int]] = []
    for name, changes in _precisions(job):
        try:
            found = estimate(model, job.replace(**changes), one, producer=producer)
        except InputError as bad:
            tried.append((name, bad.problems[0].message, 0))
        else:
            tried.append((name, found.verdict or "", found.device))
    best = next(((name, device) for name, verdict, device in tried if verdict == "fits"), (None, None))
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
        raise InputError.one("what fits depends on the GPU, and none is named", where="gpu", hint="name one like `--gpu rtx-4090`")
    return cluster


def _device(found: Estimate | None) -> int | None:
    return None if found is None else found.device


def _may_fit(quick: Estimate) -> bool:
    """No more than a necessary condition: the live peak alone."""
    return quick.usable is not None and quick.memory.allocated + quick.context.low <= quick.usable[1]


def _largest(
    model: Model, job: Job, cluster: Cluster, producer: Producer | None, field: str, top: int
) -> tuple[int | None, Estimate | None]:
    """The largest value of `field` up to `top` that fits, with its estimate."""
    fitting: dict[int, Estimate] = {}

    def fits(value: int) -> bool:
        found = estimate(model, job.replace(**{field: value}), cluster, producer=producer)
        if found.verdict == "fits":
            fitting[value] = found
        return found.verdict == "fits"

    def may(value: int) -> bool:
        return _may_fit(estimate(model, job.replace(**{field: value}), cluster, precise=False))

    bound = last(may, top) if model.layers else top  # a model that no family knows has no formulas
    best = last(fits, bound, start=bound if model.layers else 1) if bound else 0
    return (best, fitting[best]) if best else (None, None)


def last(holds: Callable[[int], bool], top: int, start: int = 1) -> int:
    """The last of 1 … `top` for which `holds`, which goes from true to false once; 0 if there is none. Looks outward from `start`."""
    good, bad = 0, top + 1
    step, at = max(1, start // 32), start
    while good + 1 < bad:
        if holds(at):
            good = at
            at = at * 2 if start == 1 else at + step
        else:
            bad = at
            at -= step
        step *= 2
        if not good < at < bad:
            at = (good + bad) // 2
    return good


QUESTIONS: Mapping[str, Callable[[Model, Job, Cluster | None, Producer | None], Answer]] = {
    "largest_batch": largest_batch, "longest_seq": longest_seq, "smallest_gpu": smallest_gpu, "cheapest_precision": cheapest_precision,
}  # fmt: skip

__all__ = ["QUESTIONS", "cheapest_precision", "largest_batch", "last", "longest_seq", "smallest_gpu"]
