"""A step's time on a cluster: which rates a rank's kernels reach, and how long its calls to others
take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache, partial

from memfit.formats import FORMATS
from memfit.hardware import Cluster, rates
from memfit.hardware.collectives import Group, seconds
from memfit.job import Job
from memfit.optimizers import OPTIMIZERS
from memfit.parallel.pipeline.check import micro_batches
from memfit.simulate.generating import Generation, generation
from memfit.simulate.host_step import away
from memfit.simulate.memory import Memory
from memfit.simulate.time import UNMEASURED, Calls, Duration, Spread, duration
from memfit.simulate.working import Alike, step_kernels, token_kernels
from memfit.strategy import DEFERRED, Strategy
from memfit.tape import Comm, Compute, Tape
from memfit.techniques.framework import facts_of


def step_time(
    tapes: Sequence[tuple[int, Tape]],
    memory: Memory,
    cluster: Cluster,
    job: Job,
    strategy: Strategy,
    parameters: tuple[int, int],
    dtype: str,
) -> Duration | None:
    """`tapes`: of each stage, or of one that takes as long, which its number says. `parameters`:
    those of the model, and those trained."""
    total, trainable = parameters
    known, pp = rates(cluster.gpu, facts_of(job.framework).products), strategy.pp
    if (
        known is None
        or on_disk(strategy)
        or strategy.split is not None
        or (pp is not None and pp.schedule in DEFERRED)
    ):
        return None
    shares = strategy.ranks // (strategy.size("tp") * strategy.size("cp") * strategy.size("pp"))
    many = micros(strategy, job)
    timed = partial(
        duration,
        rates=known,
        job=dataclasses.replace(job, accumulate=many) if many else job,
        trained=stepped(memory, job, strategy, trainable, dtype),
        calls=calls(cluster, strategy),
        spread=Spread(shares=shares, ranks=strategy.ranks, trained=trainable / max(1, total)),
        host=away(cluster, strategy, trainable, FORMATS[dtype].block_bytes),
    )
    if pp is None or not many:
        return timed(tapes[0][1])
    from memfit.simulate.bubbles import pipelined, standing

    found = {
        stage: timed(tape, turns=standing(pp, stage, many, whole=job.hugging))
        for stage, tape in dict(tapes).items()
    }
    stages = [one for stage, _ in tapes if (one := found[stage]) is not None]
    return pipelined(stages, pp, many) if len(stages) == pp.size else None


def micros(strategy: Strategy, job: Job) -> int:
    """Micro-batches of a pipeline's step; 0 without one."""
    pp = strategy.pp
    return 0 if pp is None or pp.size == 1 else micro_batches(pp, job)


def kernels(tape: Tape, cluster: Cluster, job: Job, strategy: Strategy) -> tuple[Alike, ...]:
    """The working of the time that this rank's tape takes."""
    known, pp, many = (
        rates(cluster.gpu, facts_of(job.framework).products),
        strategy.pp,
        micros(strategy, job),
    )
    if known is None:
        return ()
    if not job.training:
        return token_kernels(tape, known, job, calls(cluster, strategy))
    turns = 0.0
    if pp is not None and many:
        from memfit.simulate.bubbles import standing

        stage = strategy.rank * pp.size // strategy.ranks
        turns = standing(pp, stage, many, whole=job.hugging)
    return step_kernels(tape, known, job, calls(cluster, strategy), turns=turns)


def generation_time(
    tape: Tape, cluster: Cluster, job: Job, strategy: Strategy
) -> Generation | None:
    known = rates(cluster.gpu)
    if known is None or strategy.split is not None:
        return None
    return generation(tape, known, job, calls=calls(cluster, strategy))


def on_disk(strategy: Strategy) -> bool:
    zero = strategy.zero
    return zero is not None and "nvme" in (zero.offload_optimizer, zero.offload_param)


def untold(tape: Tape, cluster: Cluster, strategy: Strategy) -> str:
    """Why a tape on these GPUs has no time."""
    known, pp, call = rates(cluster.gpu), strategy.pp, calls(cluster, strategy)
    if known is None and cluster.gpu.id == "custom":
        return "only the memory of the GPU is given; add `--gpu NAME`"
    if known is None:
        return f"no kernels of {cluster.gpu.name} or of a similar GPU were measured"
    if pp is not None and pp.schedule in DEFERRED:
        return f"the bubble of schedule `{pp.schedule}` is not supported yet"
    if strategy.split is not None:
        return "the speed of a split model is not supported yet"
    if on_disk(strategy):
        return "the speed of the NVMe disk is unknown"
    if any(type(event) is Compute and event.math in UNMEASURED for event in tape):
        return "fp8 and fp4 matmul kernels were not measured"
    if any(type(event) is Comm and call(event) is None for event in tape):
        return "the link between the GPUs is unknown: give the network of the nodes"
    if known.host is None:
        return "copies between this GPU and CPU memory were not measured"
    return "the job has no computation"


def stepped(memory: Memory, job: Job, strategy: Strategy, trainable: int, dtype: str) -> int:
    """Bytes of the parameters that the optimizer steps on this rank. States that are like them
    tell, shards and all."""
    like = [state for state in OPTIMIZERS[job.optimizer].states if state == "like"]
    kept = memory.parts.get("optimizer", 0)
    if like and kept and memory.at is not None and (memory.at.step or memory.at.phase == "step"):
        return kept // len(like)
    wide = job.precision == "fp32" or job.precision.startswith("autocast") or job.method != "full"
    return (
        trainable
        * FORMATS["float32" if wide else dtype].block_bytes
        // (strategy.ranks // strategy.size("ddp"))
    )


def calls(cluster: Cluster, strategy: Strategy) -> Calls:
    """Megatron's data-parallel group holds context-parallel ranks too, that of experts the ranks
    beyond those of one copy of them."""
    strides = {name: stride for name, _, stride in strategy.groups}
    strides |= {"dp": strategy.size("tp"), "edp": strategy.size("ep") * strategy.expert_tensor}

    @cache
    def known(op: str, size: int, ranks: int, group: str) -> float | None:
        where = Group(
            size=ranks,
            stride=strides.get(group, strategy.size("tp")),
            per_node=cluster.gpus_per_node,
        )
        return seconds(op, size, where, cluster)

    def call(event: Comm) -> float | None:
        return known(event.op, event.size, event.ranks, event.group)

    return call


__all__ = ["calls", "kernels", "generation_time", "step_time", "untold"]
