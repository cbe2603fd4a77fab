"""Data-parallel engines: what each does around the model's code. `engine` is the interface; every
engine is one file."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module

from memfit.errors import InputError
from memfit.lower.engine import Engine
from memfit.lower.recorder import Recorder
from memfit.program import Program
from memfit.strategy import DEFERRED, Strategy
from memfit.techniques import engines
from memfit.techniques.base import TRACE


def engine_of(r: Recorder, program: Program) -> Engine:
    """The engine that spreads this program's data; each module calls its own `ENGINE`."""
    return engine_class(
        program.engine or engine_name(program.strategy) + ("_joint" if program.joint else "")
    )(r, program)


def engine_name(strategy: Strategy) -> str:
    """The name of the engine that the first layout with one chooses."""
    for layout, one in engines():
        if layout and strategy.engages(layout):
            return one.choose(strategy)
    return "base"


@cache
def modules() -> dict[str, str]:
    known = {name: module for _, one in engines() for name, module in one.modules.items()}
    return {"base": "memfit.lower.engine", **known}


def engine_class(name: str) -> type[Engine]:
    if name not in modules():
        raise InputError.one(f"not supported yet: {name}", where="use", hint=TRACE)
    engine: type[Engine] = import_module(modules()[name]).ENGINE
    return engine


def foldable(strategy: Strategy) -> bool:
    """May one layer stand for all that are like it? Not where the gradients of weights come later
    than those of activations: then a layer's graph goes with that of the layers behind it."""
    if strategy.pp is not None and strategy.pp.schedule in DEFERRED:
        return False
    return engine_class(engine_name(strategy)).foldable(strategy)


def distinct_ranks(
    strategy: Strategy, program: Callable[[], Program], *, every: bool, lightest: bool
) -> tuple[tuple[int, int], ...] | None:
    """Ranks that hold different amounts, of an engine that says so (`Engine.distinct_ranks`)."""
    engine = engine_class(engine_name(strategy))
    return (
        None
        if engine.distinct_ranks is Engine.distinct_ranks
        else engine.distinct_ranks(program(), every=every, lightest=lightest)
    )


def steady(strategy: Strategy) -> bool:
    """May that layer be written out for all of them, for the allocator too?"""
    return engine_class(engine_name(strategy)).steady


def scripted(strategy: Strategy) -> bool:
    """May the passes be walked with that layer, and the engine act on what they tell, layer by
    layer?"""
    return engine_class(engine_name(strategy)).scripted


def passing(strategy: Strategy) -> Strategy:
    """The layout as far as the passes of a model depend on it, of engines that have them played."""
    return engine_class(engine_name(strategy)).passing(strategy)
