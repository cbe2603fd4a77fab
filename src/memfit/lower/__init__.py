"""(Model, Job, Strategy, Cluster) -> Tape, by formulas: no torch, milliseconds, any size."""

from __future__ import annotations

from memfit import kernels
from memfit.hardware import Cluster
from memfit.job import Job
from memfit.lower.expand import expanded
from memfit.lower.frameworks import programs_of
from memfit.lower.layouts import foldable
from memfit.lower.recorder import Recorder
from memfit.model.modules import Model
from memfit.program import Program, placed
from memfit.strategy import ONE, Strategy
from memfit.tape import Event, Mark, Repeat, Tape
from memfit.techniques import apply


def lower(model: Model, job: Job, strategy: Strategy | None = None, cluster: Cluster | None = None, *, compact: bool = False) -> Tape:
    """The tape of one rank. `compact`: identical layers stand once, with a count."""
    alike = not model.stored and foldable(strategy or ONE)  # a file's blocks differ from layer to layer
    events, spans, program = walked(model, job, cluster, strategy or ONE, compact=alike)
    if spans and not compact:
        flat = expanded(events, spans, program.entries, model.prefix)
        events = walked(model, job, cluster, strategy or ONE, compact=False)[0] if flat is None else flat
    return Tape(events=events, source="formula", rank=0 if strategy is None else strategy.rank, repeats=spans if compact else ())


def walked(
    model: Model, job: Job, cluster: Cluster | None, strategy: Strategy = ONE, *, compact: bool
) -> tuple[tuple[Event, ...], tuple[Repeat, ...], Program]:
    """What happens layer by layer, or with one layer for all that are like it."""
    every = job.checkpoint_every if job.checkpointing == "every" else 1
    gpu = cluster.gpu if cluster else None
    entries = placed(model.layers, compact, every)
    program = apply(Program(model=model, job=job, entries=entries, weights=model.dtype, gpu=gpu, strategy=strategy))
    r = Recorder()
    r.cublas = kernels.cublas_workspace(program.capability, job.version("torch"))
    held = run(r, program)
    events = tuple(r.events)
    del held  # the tape ends within the run: what is alive then stays so
    return events, repeats(r, program) if compact else (), program


def run(r: Recorder, program: Program) -> object:
    """What the program still holds when it ends."""
    if program.job.training:
        from memfit.lower.train import train

        return train(r, program)
    from memfit.lower.infer import infer

    return (programs_of(program).generates or infer)(r, program)


def repeats(r: Recorder, program: Program) -> tuple[Repeat, ...]:
    """The spans between marks that stand for several layers; layers that alternate repeat together, in one span."""
    standing = {f"{program.model.prefix}.{entry.number}": entry for entry in program.entries if entry.times > 1}
    spans: list[Repeat] = []
    gathered, begin = 0, 0
    for first, last in zip(r.marks, [*r.marks[1:], len(r.events)], strict=True):
        mark = r.events[first]
        assert isinstance(mark, Mark)
        entry = standing.get(mark.where)
        if entry is None:
            gathered = 0
            continue
        begin = first if gathered == 0 else begin
        gathered += 1
        if gathered == entry.period:
            spans.append(Repeat(begin, last, entry.times))
            gathered = 0
    return tuple(spans)
