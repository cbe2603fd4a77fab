"""How a job is run: each technique, in its own file, marks the Program and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules

from memfit.errors import Problem, raise_errors
from memfit.program import Program
from memfit.techniques.base import Engines, Overlay, Technique

ROOMS = ("techniques", "libraries", "parallel")


@cache
def techniques() -> tuple[Technique, ...]:
    """Every technique, in order: those of this folder, and the `check` of every library and
    layout."""
    found = [import_module(name) for name in modules()]
    known: list[Technique] = [one.TECHNIQUE for one in found if hasattr(one, "TECHNIQUE")]
    return tuple(sorted(known, key=lambda technique: technique.order))


def modules() -> Iterator[str]:
    for room in ROOMS:
        package = import_module(f"memfit.{room}")
        for one in iter_modules(package.__path__, f"memfit.{room}."):
            if room == "techniques":
                yield one.name
            elif one.ispkg and find_spec(f"{one.name}.check") is not None:
                yield f"{one.name}.check"


@cache
def overlays() -> tuple[Overlay, ...]:
    """The modules that replace code of the model's pieces, in order."""
    found = (overlay for technique in techniques() for overlay in technique.overlays)
    return tuple(sorted(found, key=lambda overlay: overlay.order))


@cache
def engines() -> tuple[tuple[str, Engines], ...]:
    """Layouts with an engine of their own, those that go before others first."""
    found = [(one.layout, one.engines) for one in techniques() if one.engines is not None]
    return tuple(sorted(found, key=lambda pair: pair[1].precedence))


def unserved(program: Program) -> Iterator[Problem]:
    """Layouts for which there is no technique, and what one rank leaves of them."""
    known = [technique.layout for technique in techniques() if technique.layout]
    for name, layout in program.strategy.uses():
        if layout.size > 1 and name not in known:
            yield Problem(
                message=f"not supported yet: the layout `{name}`",
                where="use",
                hint="one of " + ", ".join(known),
            )
    fsdp = program.strategy.fsdp
    if fsdp is not None and fsdp.size == 1 and fsdp.offload:
        message = "not supported yet: FSDP's offload on one GPU"
        yield Problem(
            message=message,
            where="use fsdp.offload",
            hint="use `--use zero,offload-optimizer=cpu` (DeepSpeed)",
        )


def apply(program: Program) -> Program:
    """Every technique that the job asks for, in order; what is wrong with any of them is raised
    together."""
    return marked(program)[0]


def marked(program: Program) -> tuple[Program, tuple[Problem, ...]]:
    """The same, and beside it what is doubtful or assumed (notes and warnings)."""
    problems: list[Problem] = []
    for technique in techniques():
        if technique.serves(program):
            program = technique.apply(program)
            problems += technique.check(program)
    problems += unserved(program)
    raise_errors(problems)
    return program, tuple(problems)
