"""What a plan needs to know of an engine: the names of the options that a plan chooses, and the
part of the model on one rank, for its speed."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from memfit.errors import InputError
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.serving.base import Question, ServingEngine
from memfit.serving.weights import Rank

# Engines that a plan can choose settings of, and the module whose `PLANNED` it is.
PLANNED: dict[str, str] = {
    "vllm": "memfit.serving.vllm.planned",
    "sglang": "memfit.serving.sglang.planned",
}


@dataclass(frozen=True, kw_only=True)
class OnRank:
    """The model on one rank: `cached` bytes of a cached number, `chunk` tokens of a prompt that
    one step takes, `requests` that run at once at most, `host` seconds of a step in which the GPU
    waits for the host."""

    model: Model
    rank: Rank
    cached: int
    chunk: int
    requests: int
    host: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PlannedEngine:
    """`length`, `users`, `tensor`, `cache` and `weights` are the engine's names for the tokens of a
    request, requests at once, GPUs that share each layer, numbers of the cache and quantization
    while loading. `eighths`: what 8-bit caches are called. `layouts`: options that
    put a copy on more GPUs, which plans do not know. `program` starts the command line."""

    engine: ServingEngine
    length: str
    users: str
    tensor: str
    cache: str
    weights: str
    eighths: str
    layouts: tuple[str, ...]
    program: str
    on_rank: Callable[[Question], OnRank]

    def command(self, model: str, options: Mapping[str, Any]) -> str:
        """The command that starts the engine with these options, in the order given."""
        return " ".join([self.program.format(model=shlex.quote(model)), *self.words(options)])

    def words(self, options: Mapping[str, Any]) -> list[str]:
        """The options as the engine's flags."""
        flags = {option.name: option.flags[0] for option in self.engine.options}
        return [
            flags[name] if value is True else f"{flags[name]} {shlex.quote(str(value))}"
            for name, value in options.items()
            if value not in (False, None)
        ]


def find_planned(name: str, engine: ServingEngine) -> PlannedEngine:
    """The engine as plans know it, or an error that names those that they do."""
    if engine.name in PLANNED:
        found: PlannedEngine = import_module(PLANNED[engine.name]).PLANNED
        return found
    raise InputError.one(
        f"a plan for `{name[:40]}` is not supported yet",
        where="engine",
        hint=f"use {' or '.join(PLANNED)}, or ask `memfit estimate --engine {engine.name}`",
    )


__all__ = ["PLANNED", "OnRank", "PlannedEngine", "find_planned"]
