"""Packages that a script imports and may never use, if they are not installed: the import goes
through, and the first use is the error that the import would have been."""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.machinery
import linecache
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from memfit.trace import lines
from memfit.trace.missing_packages import needed

# An import alone changes what other libraries do, or they look for it themselves.
CHANGES_OTHERS = frozenset(
    (
        "apex",
        "auto_gptq",
        "awq",
        "bitsandbytes",
        "causal_conv1d",
        "deepspeed",
        "fla",
        "flash_attn",
        "gptqmodel",
        "habana_frameworks",
        "intel_extension_for_pytorch",
        "kernels",
        "liger_kernel",
        "mamba_ssm",
        "megatron",
        "oneccl_bindings_for_pytorch",
        "optimum",
        "sageattention",
        "torch_npu",
        "torch_xla",
        "torchao",
        "transformer_engine",
        "triton",
        "unsloth",
        "unsloth_zoo",
        "vllm",
        "xformers",
    )
)


TAKEN: list[str] = []  # packages whose attributes a script has taken, in their order


def lost(package: str) -> NoReturn:
    raise ModuleNotFoundError(f"No module named {package!r}", name=package)


class Kind(type):
    """A class of such a package: any use of it is an error, as a type it has no instances."""

    package = ""

    def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> Any:
        for one in bases:
            if isinstance(one, Kind):  # a class of the script is made of it
                lost(one.package)
        return super().__new__(cls, name, bases, space)

    def __call__(cls, *_: Any, **__: Any) -> Any:
        lost(cls.package)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return named(name, cls.package)

    def __instancecheck__(cls, _: Any) -> bool:
        return False

    __bool__ = __iter__ = __int__ = __index__ = __float__ = __len__ = __getitem__ = __call__


def named(name: str, package: str) -> Any:
    return Kind(name, (), {"package": package})


@functools.cache
def guarded_lines(path: str) -> frozenset[int]:
    """Lines of a file that stand in a `try` whose failure the file expects."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return frozenset()
    return frozenset(
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and node.handlers
        for one in node.body
        for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)
    )


def expected() -> bool:
    """Whether the script goes on without the module: some of its lines that are running stand in
    a `try`."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if lines.is_users(path) and frame.f_lineno in guarded_lines(path):
            return True
        frame = frame.f_back
    return False


class Unused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last, when nobody else has found a module."""

    def __init__(self, note: Callable[[str, str], None]) -> None:
        self.note = note
        self.packages: set[str] = set()

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = name.partition(".")[0]
        if package not in self.packages:
            here = package == name and package not in CHANGES_OTHERS
            if not here or not needed() or expected():
                return None
        self.packages.add(package)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        package = module.__name__.partition(".")[0]
        message = f"`{package}` is not installed: importing it does nothing, using it is an error"
        self.note(f"package {package}", message)

        def attribute(name: str) -> Any:
            if name == "__version__":
                lost(package)
            if name.startswith("__"):
                raise AttributeError(name)
            TAKEN.append(package)
            return named(name, package)

        vars(module)["__getattr__"] = attribute


__all__ = ["TAKEN", "Kind", "Unused", "expected", "named"]
