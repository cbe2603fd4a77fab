"""What follows from a job put on its model: parameters, and what the answer assumes."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.answers import Parameters
from memfit.errors import Problem
from memfit.formats import FORMATS
from memfit.hardware import GPU, vendor_remarks
from memfit.job import Job
from memfit.job_checks import remarks
from memfit.lower.host import paged
from memfit.model.model import Model
from memfit.optimizers import OPTIMIZERS
from memfit.program import Program
from memfit.strategy import ONE, Strategy
from memfit.tape import Alloc, Mark, Tape
from memfit.techniques import marked, precision


def marked_program(
    model: Model, job: Job, gpu: GPU | None, strategy: Strategy = ONE
) -> tuple[Program, tuple[Problem, ...]]:
    """The job put on the model, and what its techniques assume; of a model that no family knows,
    only in which numbers it is kept."""
    program = Program(
        model=model, job=job, entries=(), weights=model.dtype, gpu=gpu, strategy=strategy
    )
    return marked(program) if model.layers else (precision.apply(program), ())


def parameters_of(program: Program, tape: Tape, total: int | None) -> Parameters:
    """The producer's own count, where it took one."""
    model, job = program.model, program.job
    if model.layers:
        trained = tape.parameters[1] if any(tape.parameters) else program.trainable
        return Parameters(
            total=model.parameters, trainable=trained if job.training else 0, active=model.active
        )
    if any(tape.parameters):
        return Parameters(
            total=tape.parameters[0], trainable=tape.parameters[1], active=tape.parameters[0]
        )
    if total is None:
        loaded = sum(event.size for event in loaded_blocks(tape) if event.part == "weights")
        total = loaded // FORMATS[program.weights].block_bytes
    return Parameters(
        total=total, trainable=total if job.training and job.method == "full" else 0, active=total
    )


def loaded_blocks(tape: Tape) -> Iterator[Alloc]:
    """The blocks of the phase `load`."""
    loading = False
    for event in tape:
        if type(event) is Mark:
            loading = event.phase == "load"
        elif type(event) is Alloc and loading:
            yield event


def trainable(model: Model, job: Job) -> int:
    """Values that get gradients."""
    return marked_program(model, job, None)[0].moving if job.training else 0


def assumptions_of(program: Program) -> list[Problem]:
    """What the answer assumes."""
    model, job, gpu = program.model, program.job, program.gpu
    found = list(remarks(job))
    if paged(program):
        message = (
            "paged optimizer states count as CPU memory; the GPU also keeps them while it has room"
        )
        found.append(Problem(message=message, where="job.optimizer", level="note"))
    if job.training and (told := OPTIMIZERS[job.optimizer].assumes):
        found.append(
            Problem(
                message=told,
                where="job.optimizer",
                level="note",
                hint="without them, the step needs less memory",
            )
        )
    if gpu is None:
        message = "no GPU given: kernels are those of an A100, and there is no verdict"
        found.append(
            Problem(
                message=message,
                where="gpu",
                hint="add `--gpu rtx-4090`, or `--memory 24GiB`",
                level="note",
            )
        )
    elif "memory" in gpu.unchecked:
        message = f"the memory size of {gpu.name} is not verified"
        found.append(
            Problem(
                message=message,
                where="gpu",
                hint="pass what the driver reports with `--memory`",
                level="warning",
            )
        )
    if gpu is not None:
        found += vendor_remarks(gpu)
    tokens = job.reach if job.training else job.seq + job.new_tokens
    heard = model.encodes and model.graphs.row.hears
    if model.positions and tokens > model.positions and not heard:
        message = f"{tokens} tokens exceed the model's {model.positions} positions"
        found.append(Problem(message=message, where="job.seq", level="warning"))
    return found


__all__ = ["assumptions_of", "marked_program", "parameters_of", "trainable"]
