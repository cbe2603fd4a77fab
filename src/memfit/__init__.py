"""memfit: what a model will need on a GPU, byte by byte, before any GPU is touched."""

from __future__ import annotations

import sys
from types import ModuleType

TYPE_CHECKING = False  # true for type checkers; the module `typing` costs a third of a start
if TYPE_CHECKING:
    from typing import Any

    from memfit.api.card import card
    from memfit.api.engine import serve
    from memfit.api.engine_plan import plan_engine
    from memfit.api.plan import plan
    from memfit.api.verbs import compare, estimate, gpus, measure, models, study, trace
    from memfit.errors import InputError, MemfitError, MissingExtra, Problem, SourceError
    from memfit.estimate import Estimate
    from memfit.job import Job
    from memfit.report import write

__version__ = "0.2.0"
__all__ = [
    "Estimate",
    "InputError",
    "Job",
    "MemfitError",
    "MissingExtra",
    "Problem",
    "SourceError",
    "card",
    "compare",
    "estimate",
    "gpus",
    "measure",
    "models",
    "plan",
    "plan_engine",
    "serve",
    "study",
    "trace",
    "write",
]

_VERBS = ("compare", "estimate", "gpus", "measure", "models", "study", "trace")
_HOMES = {
    "Estimate": "memfit.estimate",
    "Job": "memfit.job",
    "card": "memfit.api.card",
    "plan": "memfit.api.plan",
    "plan_engine": "memfit.api.engine_plan",
    "serve": "memfit.api.engine",
    "write": "memfit.report",
}


class _Package(ModuleType):
    """Loads a public name when it is first used. `memfit.estimate` is the verb, also once the
    module of that name was imported, which otherwise would put itself in its place."""

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module `memfit` has no attribute `{name}`")
        from importlib import import_module

        home = "memfit.api.verbs" if name in _VERBS else _HOMES.get(name, "memfit.errors")
        return getattr(import_module(home), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        own = (name for name in super().__dir__() if name.startswith("__"))
        return sorted({*own, *__all__})


sys.modules[__name__].__class__ = _Package
