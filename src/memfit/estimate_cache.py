"""Finished estimates of traces on disk: a trace takes seconds, and the same question has the same
answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from memfit import __version__, disk_cache
from memfit.answers import Band, Failure, Parameters, Rank
from memfit.errors import Problem
from memfit.estimate import Estimate
from memfit.hardware import Cluster, Span
from memfit.job import Job
from memfit.lower.host import Host
from memfit.model.model import Model
from memfit.simulate.memory import Group, Memory, Moment, Stretch
from memfit.strategy import Strategy
from memfit.tape import Tape

# Distributions whose code a trace of a model may run.
LIBRARIES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "trl",
    "bitsandbytes",
    "liger-kernel",
    "deepspeed",
    "kernels",
    "mamba-ssm",
    "causal-conv1d",
    "flash-linear-attention",
    "timm",
)


def key(
    model: Model,
    job: Job,
    cluster: Cluster | None,
    strategy: Strategy,
    total: int | None,
    problems: tuple[Problem, ...],
) -> str:
    """A name for the question: the config, every option, every fact about the GPUs, and the
    versions of all code that answers."""
    asked = {
        "model": [model.name, model.origin, dict(model.config)],
        "job": dataclasses.asdict(job),
        "cluster": None if cluster is None else dataclasses.asdict(cluster),
        "strategy": dataclasses.asdict(strategy),
        "total": total,
        "problems": [dataclasses.asdict(one) for one in problems],
        "memfit": [__version__, disk_cache.code_fingerprint()],
        "libraries": {name: _version(name) for name in LIBRARIES},
    }
    return disk_cache.name_of(asked)


def remembered(
    name: str, model: Model, job: Job, cluster: Cluster | None, make: Callable[[], Estimate]
) -> tuple[Estimate, bool]:
    """The estimate, and whether it was read from disk; else `make` makes it, and it is written."""
    found = _read(name, model, job, cluster)
    if found is not None:
        return found, True
    made = make()
    disk_cache.write(name, _encoded(made))
    return made, False


def _version(name: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


def _read(name: str, model: Model, job: Job, cluster: Cluster | None) -> Estimate | None:
    written = disk_cache.read(name)
    if written is None:
        return None
    try:
        return _decoded(written, model, job, cluster)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def _encoded(one: Estimate) -> dict[str, Any]:
    """All of the answer but the question, and of the tape only what a report reads."""
    memory = one.memory
    return {
        "rank": one.strategy.rank,
        "strategy": dataclasses.asdict(one.strategy),
        "memory": {
            "allocated": memory.allocated,
            "reserved": memory.reserved,
            "at": _maybe(memory.at),
            "reserved_at": _maybe(memory.reserved_at),
            "parts": list(memory.parts.items()),
            "timeline": [list(stretch) for stretch in memory.timeline],
            "end": memory.end,
            "groups": [list(group) for group in memory.groups],
        },
        "context": list(one.context),
        "nccl": list(one.nccl),
        "usable": one.usable,
        "host": _maybe(one.host),
        "band": _maybe(one.band),
        "verdict": one.verdict,
        "failure": _maybe(one.failure),
        "retries": one.retries,
        "squeezed": one.squeezed,
        "parameters": _maybe(one.parameters),
        "source": one.source,
        "problems": [dataclasses.asdict(problem) for problem in one.problems],
        "versions": dict(one.versions),
        "ranks": [dataclasses.asdict(rank) for rank in one.ranks],
    }


def _maybe(one: Any) -> Any:
    return None if one is None else dataclasses.asdict(one)


def _decoded(
    values: Mapping[str, Any], model: Model, job: Job, cluster: Cluster | None
) -> Estimate:
    from memfit.strategy import from_data

    failure = values["failure"]
    return Estimate(
        model=model,
        job=job,
        cluster=cluster,
        strategy=from_data(values["strategy"]),
        memory=_memory(values),
        context=Span(*values["context"]),
        nccl=Span(*values["nccl"]),
        usable=None if values["usable"] is None else tuple(values["usable"]),
        host=Host(**values["host"]),
        band=Band(**values["band"]),
        verdict=values["verdict"],
        failure=None
        if failure is None
        else Failure(at=Moment(**failure["at"]), asked=failure["asked"], left=failure["left"]),
        retries=values["retries"],
        squeezed=values["squeezed"],
        parameters=Parameters(**values["parameters"]),
        source=values["source"],
        problems=tuple(Problem(**one) for one in values["problems"]),
        versions=values["versions"],
        ranks=tuple(Rank(**one) for one in values["ranks"]),
    )


def _memory(values: Mapping[str, Any]) -> Memory:
    """With a tape of no events: what reports read of it stands in `groups`."""
    written = values["memory"]
    memory = Memory(
        allocated=written["allocated"],
        reserved=written["reserved"],
        at=None if written["at"] is None else Moment(**written["at"]),
        reserved_at=None if written["reserved_at"] is None else Moment(**written["reserved_at"]),
        parts=dict(written["parts"]),
        timeline=tuple(Stretch(*stretch) for stretch in written["timeline"]),
        end=written["end"],
        tape=Tape(events=(), source=values["source"], versions=values["versions"]),
    )
    memory.__dict__["groups"] = tuple(map(_group, written["groups"]))
    return memory


def _group(written: Any) -> Group:
    part, where, op, formula, size, times = written
    worked = tuple(formula) if isinstance(formula, list) else formula
    return Group(part, where, op, worked, size, times)


__all__ = ["key", "remembered"]
