"""Data-parallel engines: what each does around the model's own code. `base` is the seam; every engine has a file of its own."""

from __future__ import annotations

from importlib import import_module

from memfit.lower.layouts.base import Engine
from memfit.lower.recorder import Recorder
from memfit.program import Program


def engine_of(r: Recorder, program: Program) -> Engine:
    """The engine that spreads this program's data; each module calls its own `ENGINE`. FSDP with replicas beside it is one engine."""
    name = program.engine or next((name for name in ("zero", "fsdp", "ddp") if program.strategy.size(name) > 1), "base")
    if name == "fsdp" and program.strategy.fsdp is not None:
        name = f"fsdp{program.strategy.fsdp.version}"
    engine: Engine = import_module(f"memfit.lower.layouts.{name}").ENGINE(r, program)
    return engine
