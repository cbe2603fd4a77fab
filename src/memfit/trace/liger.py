"""Liger-Kernel's own autograd functions and patches, with Triton's kernels left out: they compute
into tensors that Python has made.

What `liger_kernel` allocates, keeps and overwrites is in its Python code (liger-kernel 0.8.5
ops/*.py); a kernel itself allocates nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeAlias

import torch
from memfit.errors import InputError
from memfit.job import Job
from memfit.libraries.liger.check import PATCHES
from memfit.trace import cuda, imports

Triton: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]
MODULES = (
    "triton",
    "triton.language",
    "triton.language.math",
    "triton.language.extra",
    "triton.language.extra.libdevice",
    "triton.language.extra.cuda",
    "triton.language.extra.cuda.libdevice",
    "triton.tools",
    "triton.tools.tensor_descriptor",
    "triton.runtime",
)


class Kernel:
    """`kernel[grid](…)` does nothing."""

    def __init__(self, function: Any = None, **_: Any) -> None:
        self.function = function

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None

    def __call__(self, *_: Any, **__: Any) -> None:
        return None


class Anything:
    """A dtype or a constant of Triton's language."""

    def __init__(self, value: Any = None, *_: Any, **__: Any) -> None:
        self.value = value


class Module(ModuleType):
    """A module of Triton, as far as code that only defines kernels looks at it."""

    __path__: list[str] = []
    __version__ = "3.7.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = KNOWN.get(name)
        return Anything if known is None else known


def jit(function: Any = None, **_: Any) -> Any:
    return Kernel(function) if function is not None else Kernel


def decorating(*_: Any, **__: Any) -> Any:
    return lambda kernel: kernel


KNOWN: dict[str, Any] = {
    "jit": jit,
    "autotune": decorating,
    "heuristics": decorating,
    "cdiv": lambda whole, part: -(-whole // part),
    "next_power_of_2": lambda number: 1 << (int(number) - 1).bit_length(),
}


def wanted(job: Job) -> bool:
    return job.training and (job.liger or job.loss.startswith("liger"))


@contextlib.contextmanager
def without_triton() -> Iterator[None]:
    """Inside, `import triton` gives the stand-in; afterwards what was there before."""
    made = {name: Module(name) for name in MODULES}
    for name, module in made.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
    with imports.replaced(made):
        yield


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Liger warns of backends that need a GPU's packages when an op is first used. A handler that
    keeps its records would keep that error's traceback, and with the frames the op's tensors."""
    logger = logging.getLogger("liger_kernel")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def applied(model: Any, job: Job, triton: Triton = without_triton) -> Iterator[None]:
    """Inside, the model runs with Liger's kernels as `apply_liger_kernel_to_…` puts them in;
    `triton`: where they are looked for."""
    if not wanted(job):
        yield
        return
    patch = patch_of(model.config.model_type, triton)
    known = inspect.signature(patch).parameters
    asked = {
        name: job.liger and bool(one.default) for name, one in known.items() if name != "model"
    }  # the kernels that are the default
    losses = {
        "cross_entropy": job.loss == "liger-ce",
        "fused_linear_cross_entropy": job.loss == "liger",
    }
    missing = [name for name, needed in losses.items() if needed and name not in known]
    if missing:
        raise InputError.one(
            f"Liger has no `{missing[0]}` for `{model.config.model_type}`",
            where="job.loss",
            hint="use `plain`",
        )
    table = PATCHES.get(model.config.model_type)
    if job.liger and triton is without_triton and table is not None and table.experts:
        message = "a trace cannot run Liger's fused experts, which sort by computed values"
        raise InputError.one(
            message, where="job.liger", hint="use `--loss liger` without `--liger`"
        )
    asked |= losses
    with triton(), restored(type(model)), unlogged():
        patch(model=model, **{name: value for name, value in asked.items() if name in known})
        yield


def patch_of(kind: str, triton: Triton) -> Any:
    if importlib.util.find_spec("liger_kernel") is None:
        message = "a trace with Liger kernels needs `liger-kernel`, which is not installed"
        raise InputError.one(
            message, where="job.liger", hint="run `pip install liger-kernel`, or use `--by formula`"
        )
    with triton():
        table = importlib.import_module(
            "liger_kernel.transformers.monkey_patch"
        ).MODEL_TYPE_TO_APPLY_LIGER_FN
    if kind not in table:
        raise InputError.one(
            f"Liger has no kernels for `{kind}`", where="job.liger", hint="remove `liger`"
        )
    return table[kind]


@contextlib.contextmanager
def restored(kind: Any) -> Iterator[None]:
    """Whatever is replaced in the modelling file, in its classes and in torch is put back."""
    module = sys.modules[kind.__module__]
    names = dict(vars(module))
    classes = [
        one for one in names.values() if isinstance(one, type) and one.__module__ == module.__name__
    ]
    forwards = [(one, vars(one)["forward"]) for one in classes if "forward" in vars(one)]
    losses = [(torch.nn.functional, "cross_entropy"), (torch.nn, "CrossEntropyLoss")]
    with cuda.patched([(owner, name, getattr(owner, name)) for owner, name in losses]):
        try:
            yield
        finally:
            vars(module).update(names)
            for one, forward in forwards:
                setattr(one, "forward", forward)  # noqa: B010 - a class of any kind


__all__ = ["applied"]
