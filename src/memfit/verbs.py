"""What memfit can be asked, a row each: the command line, HTTP and Python read this table.

An option stands in `Job`, or, if it is not about the work itself, in `Ask`; flags, keys of a job file and arguments derive from both.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import InputError, Problem
from memfit.job import Job, unknown
from memfit.words import Ask, ask_from, cluster_of, compared, gather, job_file, job_of, matches, model_of, offer, options, producer_of

if TYPE_CHECKING:  # each verb imports what it needs, and no more
    from memfit.estimate import Estimate
    from memfit.hardware import GPU, Cluster
    from memfit.model.catalog import Entry
    from memfit.model.modules import Model
    from memfit.model.source import Source
    from memfit.truth.accuracy import Accuracy

TRACED_TOKENS = 2**26  # half a GiB of token ids, a few times over


@dataclass(frozen=True, kw_only=True)
class Verb:
    name: str
    help: str
    function: Callable[..., Any]


def estimate(model: str | os.PathLike[str] | Mapping[str, Any] | Model = "", /, **given: Any) -> Estimate:
    """The answer for a model: named, as a parsed config, or built. A job file (`*.yaml`) may stand in its place; what is given here
    overrides what stands there. Options are the fields of `Ask` and `Job`; everything that is wrong is raised at once."""
    problems: list[Problem] = []
    values = {name: value for name, value in given.items() if value is not None}
    subject: Any = model
    if isinstance(model, (str, os.PathLike)) and os.fspath(model).lower().endswith((".yaml", ".yml")):
        values = {**job_file(Path(model), problems), **values}
        subject = values.get("model")
    known = options()
    problems += [unknown("option", str(name), str(name)[:60], tuple(known)) for name in values if name not in known]
    asked = {name: value for name, value in values.items() if name in Ask.__dataclass_fields__ and name != "model"}
    ask = ask_from(asked, problems)
    job = job_of({name: value for name, value in values.items() if name in Job.__dataclass_fields__}, problems)
    cluster = gather(problems, lambda: None, lambda: cluster_of(ask.gpu, ask.memory))
    source, built = (None, None) if subject is None else gather(problems, lambda: (None, None), lambda: model_of(subject, ask))
    if built is not None:
        gather(problems, lambda: None, lambda: applied(built, job))
    problems += conflicts(ask, job, values)
    if problems or built is None:
        raise InputError(*problems)
    return answer(built, job, cluster, ask, source)


def applied(model: Model, job: Job) -> None:
    """Let every technique that the job asks for say what is wrong with it on this model."""
    from memfit.program import Program
    from memfit.techniques import apply

    apply(Program(model=model, job=job, entries=(), weights=model.dtype))


def conflicts(ask: Ask, job: Job, values: Mapping[str, Any]) -> Iterator[Problem]:
    """What only shows where options meet, or is read later; told with everything else."""
    from memfit.simulate.settings import Settings

    found: list[Problem] = []
    text = values.get("alloc_conf", "")
    if isinstance(text, str):
        gather(found, Settings, lambda: Settings.parse(text, where="job.alloc_conf"))
    yield from found
    if ask.by == "trace" and job.batch * job.beams * job.seq > TRACED_TOKENS:
        message = f"{job.batch * job.beams * job.seq} tokens are too many to trace: their numbers would be real"
        yield Problem(message=message, where="by", hint=f"at most {TRACED_TOKENS}; the formulas have no limit")
    if not values.get("gpu") and not values.get("memory"):
        for name in ("largest_batch", "longest_seq", "cheapest_precision"):
            if getattr(ask, name):
                message = f"`{name}` depends on the GPU, and none is named"
                yield Problem(message=message, where=name, hint="name one like `--gpu rtx-4090`, or its memory like `--memory 24GiB`")


def answer(model: Model, job: Job, cluster: Cluster | None, ask: Ask, source: Source | None) -> Estimate:
    """The estimate, and with it the answers to the reverse questions."""
    from memfit.estimate import estimate as simulate

    producer = producer_of(ask.by)
    problems, total = ((), None) if source is None else ((*source.problems, *compared(source, model)), source.parameters)
    found = simulate(model, job, cluster, producer=producer, problems=problems, total=total)
    if any(getattr(ask, name) for name in ("largest_batch", "longest_seq", "smallest_gpu", "cheapest_precision")):
        from memfit.plan.reverse import QUESTIONS

        answers = tuple(solve(model, job, cluster, producer) for name, solve in QUESTIONS.items() if getattr(ask, name))
        found = dataclasses.replace(found, answers=answers)
    return found


def models(pattern: str = "") -> tuple[Entry, ...]:
    """The bundled models whose name or type has every word of `pattern` in it; `*` stands for anything."""
    from memfit.model import catalog

    entries = tuple(entry for entry in catalog.entries() if matches(pattern, f"{entry.name} {entry.model_type}"))
    if not entries:
        close = catalog.nearest(pattern)
        raise InputError.one(f"no model of the catalog matches `{pattern[:80]}`", where="pattern", hint=offer(close))
    return entries


def gpus(pattern: str = "") -> tuple[GPU, ...]:
    """The GPUs on record whose name has every word of `pattern` in it; `*` stands for anything."""
    from memfit.hardware import all_gpus
    from memfit.registry import nearest

    known = all_gpus()
    found = tuple(gpu for gpu in known if matches(pattern, " ".join((gpu.id, gpu.name, gpu.vendor, gpu.arch or "", *gpu.aliases))))
    if not found:
        raise InputError.one(f"no GPU matches `{pattern[:80]}`", where="pattern", hint=offer(nearest(pattern, (gpu.id for gpu in known))))
    return found


def accuracy(path: str | os.PathLike[str] = "", *, confidence: str = "", source: str = "", by: str = "formula") -> Accuracy:
    """How far memfit and other methods are off on published, measured cases: the bundled ones, or those of a file in their form."""
    from memfit.truth.accuracy import accuracy as compare

    return compare(path or None, confidence=confidence, source=source, producer=producer_of(by))


VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb(name="estimate", help="what a job on a model needs of a GPU, and whether it fits", function=estimate),
        Verb(name="models", help="the models known without a network", function=models),
        Verb(name="gpus", help="the GPUs on record", function=gpus),
        Verb(name="accuracy", help="how far memfit and other methods are off on measured cases", function=accuracy),
    )
}


__all__ = ["VERBS", "Ask", "Verb", "accuracy", "estimate", "gpus", "models", "options"]
