"""Pipeline parallelism: the layers of one stage, or of several that take turns on one rank (interleaved); the embedding stands before the
first, norm and head behind the last. Both ends have a table of their own where the model ties them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memfit.errors import Problem
from memfit.job import Job
from memfit.model.modules import Layer
from memfit.program import Chunk, Entry, Program, Stage, placed
from memfit.strategy import PP
from memfit.techniques.base import Technique

MOST = 4096  # micro-batches in flight that are written down one by one


def micro_batches(pp: PP, job: Job) -> int:
    return pp.micro_batches or (job.accumulate if job.accumulate > 1 else pp.size)


def counts(pp: PP, layers: int) -> tuple[int, ...] | None:
    """Layers of each stage, of all ranks and turns; None where the setting is no list of numbers."""
    total = pp.size * pp.virtual
    if not pp.stages:
        return tuple(layers // total + (stage < layers % total) for stage in range(total))
    parts = pp.stages.split("/")
    return tuple(int(part) for part in parts) if all(part.isdecimal() and len(part) < 8 for part in parts) else None


def apply(program: Program) -> Program:
    pp, model = program.strategy.pp, program.model
    assert pp is not None
    if any(True for _ in problems(program)):
        return program
    number = program.strategy.rank * pp.size // program.strategy.ranks
    each = counts(pp, len(model.layers)) or ()
    compact, every = (
        any(entry.times > 1 for entry in program.entries),
        program.job.checkpoint_every if program.job.checkpointing == "every" else 1,
    )
    entries: list[Entry] = []
    chunks: list[Chunk] = []
    layers: list[Layer] = []
    for turn in range(pp.virtual):
        index = turn * pp.size + number
        begin = sum(each[:index])
        own = model.layers[begin : begin + each[index]]
        fresh = placed(own, compact, every, begin) if program.entries else ()
        chunks.append(Chunk(len(entries), len(entries) + len(fresh), index == 0, index == len(each) - 1))
        entries += fresh
        layers += own
    first, last = number == 0, number == pp.size - 1
    model = replace(
        model, layers=tuple(layers), embed=model.embed if first else (), towers=model.towers if first else (), final=model.final if last else (),
        headless=not last, tied=model.tied and first and last,
    )  # fmt: skip
    stage = Stage(number=number, count=pp.size, micro_batches=micro_batches(pp, program.job), chunks=tuple(chunks))
    return program.replace(model=model, entries=tuple(entries), stage=stage)


def check(program: Program) -> Iterator[Problem]:
    yield from problems(program) if program.stage is None else ()


def problems(program: Program) -> Iterator[Problem]:
    pp, job, layers = program.strategy.pp, program.job, len(program.model.layers)
    assert pp is not None
    each = counts(pp, layers)
    total = pp.size * pp.virtual
    if pp.schedule == "zero-bubble":
        yield Problem(
            message="no formula yet for the schedule `zero-bubble`", where="use pp.schedule", hint="`1f1b` holds as many micro-batches"
        )
    if not program.engine:
        yield Problem(message=f"no formula yet for a pipeline of {job.framework}", where="use pp", hint="`--framework megatron` has one")
    if pp.virtual > 1 and pp.schedule != "interleaved":
        yield Problem(message=f"{pp.virtual} stages on a rank take turns", where="use pp.virtual", hint="`schedule=interleaved`")
    if each is None:
        yield Problem(message=f"`{pp.stages[:40]}` is no list of layers", where="use pp.stages", hint="like `9/10/10/3`")
    elif len(each) != total or sum(each) != layers:
        message = f"{len(each)} stages of {sum(each)} layers, where there are {total} of {layers}"
        yield Problem(message=message, where="use pp.stages", hint="one number for each stage, in their order")
    elif min(each) < 1:
        message = f"{total} stages are more than {layers} layers" if not pp.stages else "a stage without layers"
        yield Problem(message=message, where="use pp", hint="every stage has a layer at least")
    count = micro_batches(pp, job)
    if pp.micro_batches and job.accumulate not in (1, pp.micro_batches):
        message = f"{pp.micro_batches} micro-batches, and {job.accumulate} to accumulate"
        yield Problem(message=message, where="use pp.micro_batches", hint="they are the same: leave one away")
    if pp.virtual > 1 and count % pp.size:
        yield Problem(
            message=f"{pp.size} stages do not divide {count} micro-batches", where="use pp.micro_batches", hint="interleaving wants that"
        )
    if pp.schedule == "gpipe" and count > MOST:
        yield Problem(
            message=f"{count} micro-batches in flight", where="use pp.micro_batches", hint="`1f1b` holds as many as there are stages"
        )
    if job.evaluate:
        yield Problem(message="no formula yet for an evaluation in a pipeline", where="job.evaluate")
    if program.model.stored or not job.training:
        yield Problem(message="no formula yet for a pipeline that generates or whose weights are blocks of a file", where="use pp")


TECHNIQUE = Technique(
    name="pipeline",
    cite="megatron-core 0.16.1 pipeline_parallel/schedules.py; torch 2.13 distributed/pipelining/schedules.py, stage.py",
    apply=apply, check=check, layout="pp",
)  # fmt: skip
