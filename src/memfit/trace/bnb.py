"""A stand-in for the package bitsandbytes in traced programs, with the names that programs and
libraries use."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from memfit.trace import cuda, standins
from memfit.trace.lowbit import BlockwiseOptimizer, Optimizer2State

VERSION = "0.50.0"  # the one that the stand-ins were read from
STATES = {
    "Adam": 2,
    "AdamW": 2,
    "PagedAdam": 2,
    "PagedAdamW": 2,
    "Lion": 1,
    "PagedLion": 1,
    "RMSprop": 1,
    "SGD": 1,
    "Adagrad": 1,
    "LAMB": 2,
    "LARS": 1,
    "AdEMAMix": 2,
    "PagedAdEMAMix": 2,
}
WIDE: weakref.WeakSet[torch.nn.Module] = (
    weakref.WeakSet()
)  # modules whose states are to stay in 32 bits


class GlobalOptimManager:
    """Remembers the overrides that a program asks for."""

    def register_module_override(
        self, module: torch.nn.Module, name: str, settings: dict[str, Any]
    ) -> None:
        if settings.get("optim_bits") == 32:
            WIDE.add(module)

    def register_parameters(self, parameters: Any) -> None: ...

    @classmethod
    def get_instance(cls) -> GlobalOptimManager:
        return MANAGER


MANAGER = GlobalOptimManager()


def optimizer(name: str, states: int, bits: int | None, paged: bool) -> type:
    """One of `bitsandbytes.optim`'s classes; `bits` None: as its argument says."""
    doubled = "AdEMAMix" in name

    def build(
        self: Any,
        params: Any,
        lr: float = 1e-3,
        *_: Any,
        optim_bits: int = 32,
        is_paged: bool = False,
        **given: Any,
    ) -> None:
        BlockwiseOptimizer.__init__(
            self,
            params,
            states=states,
            bits=bits or optim_bits,
            paged=paged or is_paged,
            doubled=doubled,
        )
        for group in self.param_groups:
            group["lr"] = lr

    def fill(self: Any, one: torch.Tensor) -> None:
        self.wide = {
            id(parameter) for module in WIDE for parameter in module.parameters(recurse=False)
        }
        BlockwiseOptimizer.fill(self, one)

    return type(
        name,
        (BlockwiseOptimizer,),
        {"__init__": build, "fill": fill, "__module__": "bitsandbytes.optim"},
    )


def optimizers() -> dict[str, Any]:
    found: dict[str, Any] = {"GlobalOptimManager": GlobalOptimManager}
    for name, states in STATES.items():
        for suffix, bits in (("", None), ("8bit", 8), ("32bit", 32)):
            found[name + suffix] = optimizer(name + suffix, states, bits, name.startswith("Paged"))
    return found


def contents() -> dict[str, dict[str, Any]]:
    """The names of each module of the package."""
    layers = {
        one.__name__: one
        for one in (
            standins.Linear4bit,
            standins.Linear8bitLt,
            standins.Params4bit,
            standins.Int8Params,
        )
    }
    found = optimizers()
    return {
        "bitsandbytes": {
            "__version__": VERSION,
            "supported_torch_devices": {"cpu", "cuda"},
            "features": {"multi_backend"},
        },
        "bitsandbytes.nn": layers,
        "bitsandbytes.optim": found,
        "bitsandbytes.optim.optimizer": {
            "Optimizer2State": Optimizer2State,
            "GlobalOptimManager": GlobalOptimManager,
        },
        "bitsandbytes.functional": standins.FUNCTIONAL,
    }


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands before the finders of installed packages."""

    def __init__(self) -> None:
        self.contents = contents()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.contents:
            return None
        return importlib.machinery.ModuleSpec(
            name, self, is_package=name in ("bitsandbytes", "bitsandbytes.optim")
        )

    def create_module(self, spec: Any) -> Any:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(self.contents[module.__name__])
        if module.__name__ == "bitsandbytes":
            for name in self.contents:
                if name != "bitsandbytes":
                    setattr(module, name.rpartition(".")[2], importlib.import_module(name))


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Whether or not the real package is there: it has kernels for a GPU only."""
    true = importlib.metadata.version
    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        with cuda.patched(
            [
                (
                    importlib.metadata,
                    "version",
                    lambda name: VERSION if name == "bitsandbytes" else true(name),
                )
            ]
        ):
            yield
    finally:
        sys.meta_path.remove(finder)


__all__ = ["installed"]
