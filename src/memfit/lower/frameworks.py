"""Frameworks: whose code runs a model's pieces, and how its loop differs. transformers' stand here,
every other's in a file of its own."""

from __future__ import annotations

from importlib import import_module

from memfit.lower import versions
from memfit.lower.attention import ATTENTION
from memfit.lower.attention.rotary import rotary
from memfit.lower.layers import ORDERS, choices
from memfit.lower.losses import LOSSES
from memfit.lower.mlp import MLPS
from memfit.lower.moe import MOES
from memfit.lower.norms import NORMS
from memfit.lower.programs import Programs
from memfit.program import Program
from memfit.techniques import OVERLAYS

TRANSFORMERS = Programs(
    norms=NORMS,
    attention=ATTENTION,
    mlps=MLPS,
    moes=MOES,
    orders=ORDERS,
    losses=LOSSES,
    choices=choices,
)
# Each has a file, loaded when it is asked for, which says in `PROGRAMS` what it runs.
OWN = ("torchtune", "torchtitan", "litgpt", "megatron")


def programs_of(program: Program) -> Programs:
    """Who runs this job's model."""
    name = program.job.framework
    programs: Programs = (
        import_module(f"memfit.lower.{name}").PROGRAMS
        if name in OWN
        else versions.changed(TRANSFORMERS, program)
    )
    for one in OVERLAYS:
        if one.applies(program):
            programs = import_module(one.module).overlay(programs, program)
    if name not in OWN and versions.alone(program):
        programs = programs.replace(rotary=versions.with_own_tables(programs.rotary or rotary))
    return programs
