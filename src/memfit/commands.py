"""A question written as the command that asks it: only the options that differ from the defaults
that memfit resolves by itself."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any

from memfit.defaults import assumed
from memfit.hardware import Cluster
from memfit.job import Job
from memfit.strategy import Strategy
from memfit.units import GIB, MIB
from memfit.uses import uses


def command(
    subject: str,
    job: Job,
    gpu: str,
    strategy: Strategy,
    config: Mapping[str, Any],
    half: str = "bf16",
    *,
    asked: Job | None = None,
) -> str:
    """`memfit estimate MODEL --method lora --gpu rtx-4090 …`. `gpu` are its flags. The length of
    a sequence is also written where the job that was `asked` has another."""
    values = options_of(job, strategy, config, half, asked=asked)
    first = [flag(name, values.pop(name)) for name in ("task", "method") if name in values]
    rest = [flag(name, value) for name, value in values.items()]
    layouts = [f"--use {shlex.quote(one)}" for one in uses(strategy)]
    return " ".join(["memfit estimate", shlex.quote(subject), *first, gpu, *layouts, *rest]).strip()


def options_of(
    job: Job,
    strategy: Strategy,
    config: Mapping[str, Any],
    half: str,
    *,
    asked: Job | None = None,
) -> dict[str, Any]:
    """The options that a question has to name to mean this job, and the length of a sequence where
    the job that was `asked` has another: readers would miss it."""
    layouts = frozenset(name for name, _ in strategy.uses())
    fields = [one.name for one in dataclasses.fields(Job)]
    given: dict[str, Any] = {}
    if job.task != Job.task:
        given["task"] = job.task
    elif job.training:
        given["method"] = job.method
    if job.versions:
        given["versions"] = job.versions
    if job.head != Job.head:
        given["head"] = job.head
    usual = assumed(given, config, layouts, half)
    if usual.get("framework", Job.framework) != job.framework:
        given["framework"] = job.framework
        usual = assumed(given, config, layouts, half)
    if asked is not None and asked.seq != job.seq:
        usual = {**usual, "seq": asked.seq}  # so that it is named
    for name in fields:
        value = getattr(job, name)
        if name == "quant" and name in usual:  # which QLoRA implies
            value = job.quantization
        if name not in given and value != usual.get(name, getattr(Job, name)):
            given[name] = value
    return given


def flag(name: str, value: Any) -> str:
    """`--seq 1024`, `--no-packing`."""
    spelled = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{spelled}" if value else f"--no-{spelled}"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"--{spelled} {shlex.quote(text)}"


def gpu_words(cluster: Cluster) -> str:
    """`--gpu rtx-4090`, `--gpus 2x8xh100-sxm`."""
    if cluster.gpu.id == "custom":
        return f"--memory {memory_words(cluster.gpu.memory)}"
    if cluster.gpus == 1:
        return f"--gpu {cluster.gpu.id}"
    nodes = f"{cluster.nodes}x" if cluster.nodes > 1 else ""
    return f"--gpus {nodes}{cluster.gpus_per_node}x{cluster.gpu.id}"


def memory_words(size: int) -> str:
    """`24GiB`; bytes where no unit gives a whole number."""
    units = {"GiB": GIB, "MiB": MIB, "GB": 10**9}
    whole = (f"{size // unit}{name}" for name, unit in units.items() if not size % unit)
    return next(whole, str(size))


__all__ = ["command", "flag", "gpu_words", "options_of"]
