"""For a process that only traces: torch's compiler, which nothing here uses, is not imported until
somebody looks into it.

`torch._disable_dynamo` imports it at the first call of whatever it decorates, to say that this is
not to be compiled (torch/_compile.py, torch 2.4 to 2.13); that is most of a second.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


class Later(ModuleType):
    """Stands for the compiler; becomes it when asked for anything but `disable`."""

    def disable(self, function: Callable[..., Any] | None = None, *given: Any, **named: Any) -> Any:
        return function if function is not None else lambda one: one

    def __getattr__(self, name: str) -> Any:
        if name in ("__file__", "__wrapped__"):
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
            try:
                importlib.import_module(NAME)
            except BaseException:
                sys.modules[NAME] = self  # it is asked for again
                raise
        return getattr(sys.modules[NAME], name)


def lighten() -> None:
    import torch

    if NAME not in sys.modules:
        stand_in = Later(NAME)
        sys.modules[NAME] = stand_in
        torch._dynamo = stand_in


__all__ = ["lighten"]
