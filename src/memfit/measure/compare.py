"""What memfit says of a measured case: formulas and the allocator's replay for a GPU, the trace acting as a CPU for a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from memfit.errors import InputError
from memfit.hardware import Cluster, find_gpu
from memfit.job import job_from
from memfit.lower import lower
from memfit.measure.record import Record
from memfit.model.families import build
from memfit.simulate.memory import memory
from memfit.simulate.replay import replay
from memfit.strategy import ONE, strategy_from
from memfit.tape import Alloc, Free, Tape


class Predicted(NamedTuple):
    by: str
    allocated: int
    reserved: int | None


def predicted(record: Record) -> Predicted | None:
    """None where memfit has nothing to say: a run that failed, a model or GPU that it does not know."""
    if record.result != "ok":
        return None
    job = job_from(record.job)
    strategy = replace(strategy_from(record.use, None), rank=record.rank) if record.use else ONE
    try:
        if record.by == "profiler":
            from memfit.trace import trace_config

            return Predicted(
                "trace", live(trace_config(record.config, job, device="cpu", decode_all=True, strategy=strategy, sends=False)), None
            )
        tape = lower(build(record.config, name=record.model), job, strategy, Cluster(gpu=find_gpu(record.gpu), nodes=strategy.ranks))
    except (InputError, NotImplementedError):
        return None
    found = memory(tape, replay(tape))
    return Predicted("formulas", found.allocated, found.reserved)


def live(tape: Tape) -> int:
    """The peak of the bytes that were asked for: a CPU's allocator rounds nothing."""
    sizes: dict[int, int] = {}
    held = peak = 0
    for event in tape:
        if type(event) is Alloc:
            sizes[event.id] = event.size
            held += event.size
            peak = max(peak, held)
        elif type(event) is Free:
            held -= sizes[event.id]
    return peak
