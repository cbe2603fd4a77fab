"""The trace of a program that makes its own model and job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import InputError, MissingExtra, Problem, raise_errors
from memfit.job import Job
from memfit.strategy import ONE, Strategy
from memfit.uses import strategy_from
from memfit.words.gpus import cluster_of
from memfit.words.models import OTHERWISE, script_model
from memfit.words.options import Ask, Run, options
from memfit.words.read import ask_from, gather

if TYPE_CHECKING:
    from memfit.estimate import Estimate
    from memfit.hardware import Cluster
    from memfit.trace.launch import Answer, Progress

SCRIPT_OPTIONS = ("gpu", "memory", "offline", "alloc_conf")


def script(
    path: str,
    arguments: tuple[str, ...],
    run: Run,
    given: dict[str, Any],
    problems: list[Problem],
    progress: Progress | None,
) -> Estimate:
    """The answer for a program that makes its own model and job."""
    from memfit.answers import File
    from memfit.estimate import Host, Parameters, Script
    from memfit.estimate import estimate as simulate

    ask, cluster = script_place(path, run, given, problems)
    conf = str(given.get("alloc_conf", ""))
    request = script_request(path, arguments, run, cluster, conf)
    told = launched(request, cluster, run, ask.offline, progress)
    facts = told.facts
    if run.rank and int(facts["world"]) == 1:
        message = f"rank {run.rank} does not exist: the script runs as one process"
        raise InputError.one(message, where="rank", hint="`--ranks N` runs it as one of N")
    job = Job(alloc_conf=conf or str(facts["alloc_conf"]))
    found = simulate(
        script_model(path),
        job,
        spread(cluster, int(facts["world"])),
        of_ranks(int(facts["rank"]), int(facts["world"])),
        producer=lambda *_: told.tape,
        problems=told.notes,
        total=int(facts["parameters"]),
    )
    return dataclasses.replace(
        found,
        strategy=dataclasses.replace(found.strategy, rank=int(facts["rank"])),
        script=Script(
            path=path,
            arguments=arguments,
            steps=int(facts["steps"]),
            files=tuple(File(**one) for one in facts["files"]),
            isolation=facts["isolation"],
            gaps=facts["gaps"],
        ),
        parameters=Parameters(
            total=int(facts["parameters"]),
            trainable=int(facts["trainable"]),
            active=int(facts["parameters"]),
        ),
        host=Host(size=int(facts["host"]), why="CPU tensors of the script"),
    )


def script_place(
    path: str, run: Run, given: Mapping[str, Any], problems: list[Problem]
) -> tuple[Ask, Cluster | None]:
    """Where a script runs; raises all that is wrong with its options."""
    from memfit.simulate.settings import Settings

    for name in given:
        if name not in SCRIPT_OPTIONS:
            known = name in options()
            message = (
                f"`{name}` is set by the script itself"
                if known
                else f"unknown option `{name[:60]}`"
            )
            hint = (
                f"options for a script: {', '.join((*SCRIPT_OPTIONS, *Run.__dataclass_fields__))}"
            )
            if name in ("use", "world"):
                hint = "`--ranks N` runs it as one of N processes"
            problems.append(Problem(message=message, where=name, hint=hint))
    ask = ask_from(
        {name: given[name] for name in ("gpu", "memory", "offline") if name in given}, problems
    )
    cluster = gather(problems, lambda: None, lambda: cluster_of(ask.gpu, ask.memory))
    conf = str(given.get("alloc_conf", ""))
    gather(problems, Settings, lambda: Settings.parse(conf, where="alloc_conf"))
    if not path.startswith(("-m ", "-- ")) and not Path(path).is_file():
        what = "is a folder" if Path(path).is_dir() else "is not a file"
        problems.append(Problem(message=f"`{path}` {what}", where="script"))
    if run.rank >= run.ranks > 1:
        message = f"rank {run.rank} does not exist: the layout has {run.ranks} ranks"
        problems.append(Problem(message=message, where="rank", hint="ranks start at 0"))
    raise_errors(problems)
    return ask, cluster


def script_request(
    path: str, arguments: tuple[str, ...], run: Run, cluster: Cluster | None, conf: str
) -> dict[str, Any]:
    """What the process that runs the script is sent."""
    module = path.removeprefix("-m ") if path.startswith("-m ") else ""
    return {
        "kind": "script",
        "script": path,
        "arguments": list(arguments),
        "steps": run.steps,
        "alloc_conf": conf,
        "module": module,
        "rank": run.rank,
        "world": run.ranks,
        "gpus": machine(cluster, run.ranks),
        "launcher": run.launcher,
        "tokens": run.tokens,
        "image": run.image_size,
        "truth": run.assume == "true",
        "isolation": run.isolation,
        "network": run.network,
        "keep_env": run.keep_env,
    }


def machine(cluster: Cluster | None, ranks: int) -> int:
    """GPUs of one machine: those that were named, or one for each rank, eight at most."""
    if cluster is not None and cluster.gpus > 1:
        return min(ranks, cluster.gpus_per_node) if ranks > 1 else cluster.gpus_per_node
    return 8 if ranks % 8 == 0 else ranks


def spread(cluster: Cluster | None, ranks: int) -> Cluster | None:
    """Where one GPU was named, each rank has one like it; where more were, those that the script
    uses."""
    if cluster is None or cluster.gpus == ranks:
        return cluster
    if cluster.gpus > ranks and (
        ranks < cluster.gpus_per_node or ranks % cluster.gpus_per_node == 0
    ):
        each = min(ranks, cluster.gpus_per_node)
        return dataclasses.replace(cluster, gpus_per_node=each, nodes=ranks // each)
    if cluster.gpus > 1:
        return cluster
    each = machine(None, ranks)
    return dataclasses.replace(cluster, gpus_per_node=each, nodes=ranks // each)


def of_ranks(rank: int, ranks: int) -> Strategy:
    """The group of all ranks, whose connections NCCL keeps memory for; how a script spreads its
    work over them is in its tape."""
    if ranks == 1:
        return ONE
    return dataclasses.replace(strategy_from((f"ddp={ranks}",), None), rank=rank)


def launched(
    request: dict[str, Any],
    cluster: Cluster | None,
    run: Run,
    offline: bool,
    progress: Progress | None,
) -> Answer:
    """Run the trace in a separate process. Without a named environment, this one must have
    torch."""
    from importlib.util import find_spec

    from memfit.trace.launch import launch

    if not run.python and not find_spec("torch"):
        raise MissingExtra("a trace", "trace", OTHERWISE)
    gpu = None if cluster is None else cluster.gpu
    request["gpu"] = (
        {}
        if gpu is None
        else {"name": gpu.name, "sm": gpu.sm, "sms": gpu.sms, "memory": gpu.memory}
    )
    return launch(
        request,
        python=run.python,
        seconds=run.time_limit,
        offline=offline,
        show=run.show_output,
        progress=progress,
    )


__all__ = ["launched", "script"]
