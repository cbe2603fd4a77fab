"""Finished estimates of traces on disk: a trace takes seconds, and the same question has the same
answer.

An entry is a JSON file named after everything that the answer depends on. What cannot be read,
written or trusted is a miss, never an error. `MEMFIT_CACHE` names another folder, or `off`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memfit import __version__
from memfit.answers import Band, Failure, Parameters, Rank
from memfit.errors import Problem
from memfit.estimate import Estimate
from memfit.hardware import Cluster, Span
from memfit.job import Job
from memfit.lower.host import Host
from memfit.model.modules import Model
from memfit.simulate.memory import Group, Memory, Moment, Stretch
from memfit.strategy import Strategy
from memfit.tape import Tape

VARIABLE = "MEMFIT_CACHE"
OFF = ("off", "0", "no")
KEPT = 2000  # entries, of a few KiB each; the oldest go
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


def folder() -> Path | None:
    """Where entries are: `MEMFIT_CACHE`, else `memfit` in the user's cache folder; None for off."""
    named = os.environ.get(VARIABLE, "").strip()
    if named.lower() in OFF:
        return None
    with contextlib.suppress(RuntimeError):  # a user without a home folder
        base = os.environ.get("XDG_CACHE_HOME", "").strip()
        home = Path(base) if base else Path.home() / ".cache"
        return Path(named).expanduser() if named else home / "memfit"
    return None


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
        "memfit": [__version__, _code()],
        "libraries": {name: _version(name) for name in LIBRARIES},
    }
    text = json.dumps(asked, sort_keys=True, default=str)
    return sha256(text.encode())


def remembered(
    name: str, model: Model, job: Job, cluster: Cluster | None, make: Callable[[], Estimate]
) -> tuple[Estimate, bool]:
    """The estimate, and whether it was read from disk; else `make` makes it, and it is written."""
    found = _read(name, model, job, cluster)
    if found is not None:
        return found, True
    made = make()
    _write(name, made)
    return made, False


def sha256(data: bytes) -> str:
    import hashlib  # not on the way of answers by formulas, which start-up counts in

    return hashlib.sha256(data).hexdigest()


def _version(name: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


def _code() -> str:
    """A fingerprint of memfit's own files, so that a checkout that moves on asks again."""
    root = Path(__file__).parent
    lines = []
    for path in sorted(one for one in root.rglob("*") if one.suffix in (".py", ".toml")):
        status = path.stat()
        lines.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    return sha256("".join(lines).encode())


def _read(name: str, model: Model, job: Job, cluster: Cluster | None) -> Estimate | None:
    where = folder()
    if where is None:
        return None
    try:
        written = json.loads((where / f"{name}.json").read_text(encoding="utf-8"))
        if written["checksum"] != _checksum(written["estimate"]):
            return None
        return _decoded(written["estimate"], model, job, cluster)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _write(name: str, estimate: Estimate) -> None:
    """Under another name first, so that nobody reads half of it."""
    import tempfile

    where = folder()
    if where is None:
        return
    with contextlib.suppress(OSError, TypeError, ValueError):
        encoded = json.loads(json.dumps(_encoded(estimate)))
        text = json.dumps({"checksum": _checksum(encoded), "estimate": encoded})
        where.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=where, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(temporary).replace(where / f"{name}.json")
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
        _prune(where)


def _prune(where: Path) -> None:
    entries = list(where.glob("*.json"))
    if len(entries) > KEPT:
        for old in sorted(entries, key=lambda one: one.stat().st_mtime)[: len(entries) - KEPT]:
            old.unlink(missing_ok=True)


def _checksum(encoded: Any) -> str:
    return sha256(json.dumps(encoded, sort_keys=True).encode())


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


__all__ = ["VARIABLE", "folder", "key", "remembered"]
