"""Frameworks: whose code runs the parts of a model, and how the training loop differs. This file
has transformers; every other framework is one file."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec

from memfit.lower import versions
from memfit.lower.attention import ATTENTION
from memfit.lower.attention.rotary import rotary
from memfit.lower.layers import ORDERS, choices
from memfit.lower.losses import LOSSES, selected
from memfit.lower.mlp import MLPS
from memfit.lower.moe import MOES
from memfit.lower.norms import NORMS
from memfit.lower.programs import Programs
from memfit.program import Program
from memfit.techniques import overlays

TRANSFORMERS = Programs(
    norms=NORMS,
    attention=ATTENTION,
    mlps=MLPS,
    moes=MOES,
    orders=ORDERS,
    losses=LOSSES,
    choices=choices,
)


@cache
def own_programs(name: str) -> Programs | None:
    """What a framework with modelling code of its own runs: `PROGRAMS` of its room, which is loaded
    when a job asks for it."""
    room = f"memfit.libraries.{name}"
    if find_spec(room) is None or find_spec(f"{room}.programs") is None:
        return None
    found: Programs = import_module(f"{room}.programs").PROGRAMS
    return found


def programs_of(program: Program) -> Programs:
    """Who runs this job's model."""
    own = own_programs(program.job.framework)
    programs = own or versions.changed(TRANSFORMERS, program)
    for one in overlays():
        if one.applies(program):
            programs = import_module(one.module).overlay(programs, program)
    if own is None and program.model.graphs is not None:
        from memfit.lower import captured

        programs = captured.programs(programs, program.model)
    if program.model.own_loss:
        programs = programs.replace(losses={"plain": selected})
    if program.model.labelled is not None:
        from memfit.lower import label_heads

        programs = label_heads.programs(programs, program.model)
    if own is None and versions.alone(program):
        programs = programs.replace(rotary=versions.with_own_tables(programs.rotary or rotary))
    return programs
