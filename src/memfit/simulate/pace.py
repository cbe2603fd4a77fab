"""A step's time on a cluster: which rates a rank's kernels reach, and how long its calls to others take."""

from __future__ import annotations

from functools import cache

from memfit.formats import FORMATS
from memfit.hardware import Cluster, rates
from memfit.hardware.collectives import Group, seconds
from memfit.job import Job
from memfit.optimizers import OPTIMIZERS
from memfit.simulate.memory import Memory
from memfit.simulate.time import Calls, Duration, duration
from memfit.strategy import Strategy
from memfit.tape import Comm, Tape


def step_time(tape: Tape, memory: Memory, cluster: Cluster, job: Job, strategy: Strategy, trainable: int, dtype: str) -> Duration | None:
    """Pipelines wait for each other, which no rank's tape tells; nor does it tell of copies to the host and of what that computes."""
    known = rates(cluster.gpu)
    if known is None or strategy.size("pp") > 1 or strategy.offloads:
        return None
    shares = strategy.ranks // (strategy.size("tp") * strategy.size("cp"))
    bytes = stepped(memory, job, strategy, trainable, dtype)
    return duration(tape, known, job, bytes, calls=calls(cluster, strategy), shares=shares, ranks=strategy.ranks)


def stepped(memory: Memory, job: Job, strategy: Strategy, trainable: int, dtype: str) -> int:
    """Bytes of the parameters that the optimizer steps on this rank. States that are like them tell, shards and all."""
    like = [state for state in OPTIMIZERS[job.optimizer].states if state == "like"]
    kept = memory.parts.get("optimizer", 0)
    if like and kept and memory.at is not None and memory.at.phase == "step":
        return kept // len(like)
    wide = job.precision == "fp32" or job.precision.startswith("autocast") or job.method != "full"
    return trainable * FORMATS["float32" if wide else dtype].block_bytes // (strategy.ranks // strategy.size("ddp"))


def calls(cluster: Cluster, strategy: Strategy) -> Calls:
    """Megatron's data-parallel group holds context-parallel ranks too, that of experts the ranks beyond those of one copy of them."""
    strides = {name: stride for name, _, stride in strategy.groups}
    strides |= {"dp": strategy.size("tp"), "edp": strategy.size("ep") * strategy.expert_tensor}

    @cache
    def known(op: str, size: int, ranks: int, group: str) -> float | None:
        where = Group(size=ranks, stride=strides.get(group, strategy.size("tp")), per_node=cluster.gpus_per_node)
        return seconds(op, size, where, cluster)

    def call(event: Comm) -> float | None:
        return known(event.op, event.size, event.ranks, event.group)

    return call


__all__ = ["step_time"]
