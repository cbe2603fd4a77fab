"""How a job is run: each technique, in its own file, marks the Program and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.errors import Problem, raise_errors
from memfit.program import Program
from memfit.techniques import (
    attention,
    brought,
    cp,
    ddp,
    dequantize,
    ep,
    experts,
    framework,
    freeze,
    fsdp,
    gemini,
    inputs,
    liger,
    lora,
    offload,
    own,
    pp,
    precision,
    quantize,
    recompute,
    split,
    stored,
    tp,
    trl,
    unsloth,
    versions,
    zero,
)
from memfit.techniques.base import Overlay, Technique

TECHNIQUES: tuple[Technique, ...] = (
    inputs.TECHNIQUE,
    own.TECHNIQUE,
    precision.TECHNIQUE,
    stored.TECHNIQUE,
    dequantize.TECHNIQUE,
    freeze.TECHNIQUE,
    quantize.TECHNIQUE,
    lora.TECHNIQUE,
    framework.TECHNIQUE,
    gemini.TECHNIQUE,
    tp.TECHNIQUE,
    ep.TECHNIQUE,
    pp.TECHNIQUE,
    split.TECHNIQUE,
    cp.TECHNIQUE,
    attention.TECHNIQUE,
    liger.TECHNIQUE,
    trl.TECHNIQUE,
    unsloth.TECHNIQUE,
    recompute.TECHNIQUE,
    offload.TECHNIQUE,
    experts.TECHNIQUE,
    versions.TECHNIQUE,
    brought.TECHNIQUE,
    ddp.TECHNIQUE,
    fsdp.TECHNIQUE,
    zero.TECHNIQUE,
)

OVERLAYS: tuple[Overlay, ...] = tuple(
    sorted(
        (overlay for technique in TECHNIQUES for overlay in technique.overlays),
        key=lambda overlay: overlay.order,
    )
)


def unserved(program: Program) -> Iterator[Problem]:
    """Layouts for which there is no technique, and what one rank leaves of them."""
    known = [technique.layout for technique in TECHNIQUES if technique.layout]
    for name, layout in program.strategy.uses():
        if layout.size > 1 and name not in known:
            yield Problem(
                message=f"no formula yet for the layout `{name}`",
                where="use",
                hint="one of " + ", ".join(known),
            )
    fsdp = program.strategy.fsdp
    if fsdp is not None and fsdp.size == 1 and fsdp.offload:
        message = "no formula yet for FSDP's offload on one GPU, where nothing is sharded"
        yield Problem(
            message=message,
            where="use fsdp.offload",
            hint="`--use zero,offload-optimizer=cpu` is DeepSpeed's",
        )


def apply(program: Program) -> Program:
    """Every technique that the job asks for, in order; what is wrong with any of them is raised
    together."""
    return marked(program)[0]


def marked(program: Program) -> tuple[Program, tuple[Problem, ...]]:
    """The same, and beside it what is doubtful or assumed (notes and warnings)."""
    problems: list[Problem] = []
    for technique in TECHNIQUES:
        if technique.serves(program):
            program = technique.apply(program)
            problems += technique.check(program)
    problems += unserved(program)
    raise_errors(problems)
    return program, tuple(problems)
