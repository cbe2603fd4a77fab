"""Triton kernels in a traced program: a launch asks nothing of torch's allocator, its buffers are
its caller's, so it is left out.

Where Triton is not installed (builds of torch for the CPU) a package of stand-ins takes its place,
because libraries run other code without it. Read from triton 3.9 runtime/jit.py,
runtime/autotuner.py and backends/nvidia/driver.py.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from memfit.trace import cuda
from memfit.trace.imports import Change, Patch
from memfit.trace.refuse import Watcher

VERSION = "3.9.0"
CACHE = (
    1 << 28
    # bytes that a benchmark writes between two runs (backends/nvidia/driver.py
    # get_empty_cache_for_benchmark)
)
NOTE = "Triton kernels are not run: they allocate nothing beyond the script's own tensors"


class Launches:
    """What a launch comes to; benchmarks of an autotuner are seen once for each of its keys."""

    def __init__(self, recorder: Watcher) -> None:
        self.recorder = recorder
        self.tuned: set[tuple[Any, ...]] = set()

    def launch(self, tensors: Iterable[Any]) -> None:
        """Whole numbers that a kernel was to fill are 0: what is in a fresh tensor would be another
        number each time."""
        self.recorder.note("triton", NOTE)
        for one in tensors:
            block = (
                self.recorder.owned(one)
                if isinstance(one, torch.Tensor) and not one.is_meta
                else None
            )
            if block is not None and "empty" in block.op:
                with torch._C._DisableTorchDispatch():
                    one.zero_()

    def tune(self, tuner: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """The first call with a key measures every configuration, beside a buffer as large as any
        cache and copies of what it restores."""
        named = {
            name: one
            for name, one in {**dict(zip(tuner.arg_names, args, strict=False)), **given}.items()
            if name in tuner.arg_names
        }
        kinds = [str(one.dtype) for one in named.values() if hasattr(one, "dtype")]
        key = (
            id(tuner),
            *(str(named[name]) for name in arguments(tuner, "keys", "key_idx") if name in named),
            *kinds,
        )
        if len(tuner.configs) < 2 or key in self.tuned:
            return
        self.tuned.add(key)
        cache = torch.empty(CACHE // 4, dtype=torch.int32, device="cuda")
        restored = arguments(tuner, "restore_value", "restore_idx")
        copies = [
            named[name].clone() for name in restored if isinstance(named.get(name), torch.Tensor)
        ]
        del cache, copies

    def changes(self) -> dict[str, Change]:
        """For Triton itself, once it is imported."""

        def run(_: Any, *args: Any, **given: Any) -> None:
            self.launch((*args, *given.values()))

        def tuned(tuner: Any, *args: Any, **given: Any) -> None:
            self.tune(tuner, args, given)
            self.launch((*args, *given.values()))

        return {
            "triton.runtime.jit": lambda module: [(module.JITFunction, "run", run)],
            "triton.runtime.autotuner": lambda module: [(module.Autotuner, "run", tuned)],
        }


def arguments(tuner: Any, names: str, places: str) -> list[str]:
    """Triton 3.0, beside torch 2.4, keeps arguments by their places and not by their names."""
    found = getattr(tuner, names, None)
    return (
        [tuner.arg_names[place] for place in getattr(tuner, places)]
        if found is None
        else list(found)
    )


class Word:
    """Anything of Triton's that is only named when a module is imported: a type, a decorator's
    argument, a base class."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **_: Any) -> Any:
        return types.SimpleNamespace(value=args[0]) if self.name == "constexpr" and args else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Word(name)

    def __getitem__(self, _: Any) -> Any:
        return self

    def __or__(self, _: Any) -> Any:
        return self

    def __instancecheck__(self, _: Any) -> bool:
        """Where it stands for a type: nothing is one."""
        return False

    __subclasscheck__ = __instancecheck__

    __ror__ = __or__

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (object,)


class Config:
    """One choice of an autotuner; torch's compiler has a class below it."""

    def __init__(self, kwargs: Any = None, **given: Any) -> None:
        self.kwargs = kwargs
        vars(self).update(given)


class Kernel:
    """A function that Triton would compile. `tune` is run before each launch."""

    def __init__(self, launches: Launches, function: Any) -> None:
        self.launches, self.fn = launches, function
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self.arg_names: list[str] = (
            function.arg_names
            if isinstance(function, Kernel)
            else [*inspect.signature(function).parameters]
        )

    def tune(self, args: tuple[Any, ...], given: dict[str, Any]) -> None: ...

    def run(self, *args: Any, grid: Any = None, warmup: bool = False, **given: Any) -> None:
        self.tune(args, given)
        self.launches.launch((*args, *given.values()))

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self.run, grid=grid)


class Tuned(Kernel):
    def __init__(
        self,
        launches: Launches,
        function: Any,
        configs: Any,
        key: Any,
        restore_value: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(launches, function)
        self.configs, self.keys, self.restore_value = configs, key, restore_value or ()

    def tune(self, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        self.launches.tune(self, args, given)


def contents(launches: Launches) -> dict[str, Any]:
    """What of the package is more than a word."""

    def jit(function: Any = None, **_: Any) -> Any:
        return (
            Kernel(launches, function)
            if function is not None
            else functools.partial(Kernel, launches)
        )

    def autotune(configs: Any, key: Any, **given: Any) -> Any:
        return lambda function: Tuned(launches, function, configs, key, given.get("restore_value"))

    return {
        "__version__": VERSION,
        "jit": jit,
        "autotune": autotune,
        "heuristics": lambda values: lambda function: function,
        "cdiv": lambda one, two: -(-one // two),
        "next_power_of_2": lambda one: 1 << max(0, int(one) - 1).bit_length(),
        "Config": Config,
    }


# Types that libraries ask for by `isinstance`.
TYPES: dict[str, dict[str, Any]] = {
    "triton": {"JITFunction": Kernel},
    "triton.runtime": {"JITFunction": Kernel, "Autotuner": Tuned, "Config": Config},
    "triton.runtime.jit": {"JITFunction": Kernel, "KernelInterface": Kernel},
    "triton.runtime.autotuner": {"Autotuner": Tuned, "Config": Config},
}


COMPILER = "torch._inductor.runtime.triton_compat"


class Without(importlib.abc.Loader):
    """Loads what asks whether there is Triton, for torch's compiler, as if there was none."""

    def __init__(self, true: Any, finder: Finder) -> None:
        self.true, self.finder = true, finder

    def create_module(self, spec: Any) -> Any:
        return self.true.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        there = {name: one for name, one in sys.modules.items() if name.startswith("triton")}
        for name in there:
            del sys.modules[name]
        self.finder.hidden = True
        try:
            self.true.exec_module(module)
        finally:
            self.finder.hidden = False
            sys.modules.update(there)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `triton` and every module below it."""

    def __init__(self, launches: Launches) -> None:
        self.launches, self.hidden = launches, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == COMPILER and not self.hidden:
            self.hidden = True
            spec = importlib.util.find_spec(name)
            self.hidden = False
            if spec is not None and spec.loader is not None:
                spec.loader = Without(spec.loader, self)
            return spec
        if self.hidden or name.partition(".")[0] != "triton":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Word(name)

        vars(module)["__getattr__"] = missing
        if module.__name__ == "triton":
            vars(module).update(contents(self.launches))
        vars(module).update(TYPES.get(module.__name__, {}))


@contextlib.contextmanager
def installed(launches: Launches) -> Iterator[None]:
    """Inside, `import triton` works. torch itself is not told: its compiler would want the real
    one."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    from torch.utils import _triton

    true, finder = importlib.metadata.version, Finder(launches)
    patches: list[Patch] = [
        (importlib.metadata, "version", lambda name: VERSION if name == "triton" else true(name))
    ]
    patches += [
        (_triton, name, lambda *_, **__: False)
        for name in ("has_triton_package", "has_triton")
        if hasattr(_triton, name)
    ]
    sys.meta_path.insert(0, finder)
    try:
        with cuda.patched(patches):
            yield
    finally:
        sys.meta_path.remove(finder)


__all__ = ["Launches", "installed"]
