"""Stand-ins for packages that only report, draw or upload, if they are not installed. They do
nothing, since none of them uses the GPU."""

from __future__ import annotations

import dis
import importlib.abc
import importlib.machinery
import importlib.util
import operator
import os
import sys
import types
from typing import Any

from memfit.trace import lines
from memfit.trace.imports import Patch
from memfit.trace.refuse import Watcher

REPORTERS = frozenset(
    (
        "wandb",
        "tensorboard",
        "tensorboardX",
        "tensorboard_logger",
        "mlflow",
        "comet_ml",
        "neptune",
        "clearml",
        "aim",
        "swanlab",
        "trackio",
        "dvclive",
        "visdom",
        "matplotlib",
        "seaborn",
        "plotly",
        "boto3",
        "botocore",
        "openai",
        "loguru",
        "gpustat",
        "GPUtil",
        "pynvml",
        "nvitop",
        "torchsummary",
        "torchinfo",
        "thop",
        "fvcore",
        "ptflops",
        "torchviz",
        "kagglehub",
        "gdown",
        "dotenv",
        "IPython",
        "ipywidgets",
        "matplotlib_inline",
        "prettytable",
        "tabulate",
        "termcolor",
    )
)
INSIDE = ("google.colab",)  # packages within one that may be installed


class Kind(type):
    """A type whose unknown attributes are such types."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Kind(name, (Nothing,), {})

    def __lt__(cls, _: Any) -> bool:
        """A constant of the package, most often a limit, which nothing exceeds."""
        return False

    __le__ = __lt__

    def __gt__(cls, _: Any) -> bool:
        return True

    __ge__ = __gt__

    def __index__(cls) -> int:
        """The step of a range is not 0."""
        return 1

    __int__ = __index__

    def __float__(cls) -> float:
        return 1.0

    def __iter__(cls) -> Any:
        return iter(())

    def __format__(cls, spec: str) -> str:
        return format(1, spec) if spec else ""

    def __fspath__(cls) -> str:
        return "."


def number(value: Any) -> Any:
    """What a stand-in is to arithmetic: 0, or 1 for a constant of the package."""
    return operator.index(value) if isinstance(value, (Nothing, Kind)) else value


def compared(name: str) -> Any:
    def compare(self: Any, other: Any) -> Any:
        return getattr(operator, name)(number(self), number(other))

    return compare


def reckoned(name: str, *, turned: bool = False) -> Any:
    def reckon(self: Any, other: Any) -> Any:
        if isinstance(other, (str, bytes, list, tuple)):
            return other  # a text or a list, to which the stand-in adds nothing
        try:
            pair = (number(self), number(other))
            return getattr(operator, name)(*(reversed(pair) if turned else pair))
        except ZeroDivisionError:
            return 0

    return reckon


def parts() -> int | None:
    """Into how many names the caller's caller unpacks a value, if it does."""
    frame = sys._getframe(2)
    at = next(
        (one for one in dis.get_instructions(frame.f_code) if one.offset == frame.f_lasti), None
    )
    return at.arg if at is not None and at.opname == "UNPACK_SEQUENCE" else None


class Nothing(metaclass=Kind):
    """Whatever is asked of it, it is that again; as a number it is 0."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *args: Any, **_: Any) -> Any:
        """A decorator leaves its function as it is."""
        alone = len(args) == 1 and isinstance(args[0], types.FunctionType)
        return args[0] if alone else Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __getitem__(self, _: Any) -> Any:
        return Nothing()

    def __setitem__(self, *_: Any) -> None: ...

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __iter__(self) -> Any:
        """As `figure, axes = plt.subplots()` unpacks it; else without elements."""
        return iter([Nothing() for _ in range(parts() or 0)])

    def __bool__(self) -> bool:
        return False

    def __int__(self) -> int:
        return 0

    __index__ = __len__ = __int__

    def __float__(self) -> float:
        return 0.0

    def __round__(self, _: Any = None) -> int:
        return 0

    def __neg__(self) -> int:
        return 0

    __abs__ = __pos__ = __neg__
    __hash__ = object.__hash__
    __eq__, __ne__ = compared("eq"), compared("ne")
    __lt__, __le__, __gt__, __ge__ = (compared(name) for name in ("lt", "le", "gt", "ge"))

    def __str__(self) -> str:
        return ""

    def __format__(self, spec: str) -> str:
        return format(0, spec) if spec else ""

    def __fspath__(self) -> str:
        return "."


for called in ("add", "sub", "mul", "mod", "pow", "truediv", "floordiv"):
    for one in (Kind, Nothing):
        setattr(one, f"__{called}__", reckoned(called))
        setattr(one, f"__r{called}__", reckoned(called, turned=True))


def needed() -> bool:
    """Whether the script itself imports it: libraries ask what is there, and go without."""
    frame: Any = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        if frame.f_code.co_filename.endswith(("util.py", "util>")):  # frozen
            return False
        frame = frame.f_back
    name = frame.f_code.co_filename if frame is not None else ""
    return lines.is_users(name)


def installed(package: str) -> bool:
    """Whether Python finds it, or what transformers takes in its place."""
    found = importlib.util.find_spec(package) is not None
    return found or (package == "tensorboard" and installed("tensorboardX"))


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last, when nobody else has found a module."""

    def __init__(self, recorder: Watcher) -> None:
        self.recorder = recorder

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        inside = any(one == name or name.startswith(f"{one}.") for one in INSIDE)
        inside |= any(one.startswith(f"{name}.") for one in INSIDE)  # around it
        if not (inside or name.partition(".")[0] in REPORTERS) or not needed():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        self.note(next((one for one in INSIDE if one.startswith(name)), name.partition(".")[0]))
        vars(module)["__getattr__"] = lambda name: self.attribute(name)

    def note(self, package: str) -> None:
        message = f"`{package}` is not installed: a stand-in that does nothing takes its place"
        self.recorder.note(f"package {package}", message)

    def variables(self) -> list[Patch]:
        """A stand-in as the value of an environment variable, most often a secret's, is empty."""
        true = os.environ.encodevalue

        def encoded(value: Any) -> Any:
            return true("" if isinstance(value, (Nothing, Kind)) else value)

        return [(os.environ, "encodevalue", encoded)]

    def attribute(self, name: str, package: str = "") -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        if package:
            self.note(package)
        return "99.0" if name == "__version__" else Kind(name, (Nothing,), {})

    def reporting(self, module: types.ModuleType) -> list[Patch]:
        """transformers' callbacks that report to a package which the arguments name."""
        true = module.get_reporting_integration_callbacks

        def callbacks(report_to: Any) -> Any:
            if not isinstance(report_to, (list, tuple)):
                return true(report_to)
            lost = [one for one in report_to if one in REPORTERS and not installed(one)]
            for one in lost:
                self.note(one)
            return true([one for one in report_to if one not in lost])

        return [(module, true.__name__, callbacks)]

    def writer(self) -> dict[str, types.ModuleType]:
        """torch's module that writes for TensorBoard imports it."""
        if importlib.util.find_spec("tensorboard") is not None:
            return {}
        names = ("torch.utils.tensorboard", "torch.utils.tensorboard.writer")
        modules = {name: types.ModuleType(name) for name in names}
        for module in modules.values():
            vars(module)["__getattr__"] = lambda name: self.attribute(name, "tensorboard")
        return modules


__all__ = ["Missing", "Nothing", "parts"]
