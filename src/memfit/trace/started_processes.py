"""Processes that a script starts by itself: whether one is a rank, and the handle of one that has
ended."""

from __future__ import annotations

import itertools
import os
import types
from typing import Any

from memfit.trace import lines


class Ended:
    """What a process that has ended is to Python's `multiprocessing`."""

    pid = returncode = 0

    def __init__(self) -> None:
        self.sentinel, writer = os.pipe()
        os.close(writer)  # ready from the start

    def poll(self, *_: Any, **__: Any) -> int:
        return 0

    wait = poll

    def close(self) -> None: ...

    terminate = kill = close


GROUP_OR_GPU = {"init_process_group", "init_distributed", "cuda", "fully_shard", "world_size"}


def is_rank(target: Any) -> bool:
    """Whether a process is one of several ranks, and no loader of data: what it runs joins a group
    or uses a GPU, or one of its parameters is `world_size`."""
    code = target.__code__
    known = {**target.__globals__, **vars(type(getattr(target, "__self__", None)))}
    names = {*code.co_varnames[: code.co_argcount], *names_in(code, known, set())}
    return bool(names & GROUP_OR_GPU)


def names_in(code: types.CodeType, known: dict[str, Any], seen: set[types.CodeType]) -> set[str]:
    """Names that a function of the script uses, and those functions and classes of the script that
    it uses, from any of its files."""
    if code in seen:
        return set()
    seen.add(code)
    found = set(code.co_names)
    for one in code.co_consts:
        if isinstance(one, str) and one.startswith("cuda"):
            found.add("cuda")
        elif isinstance(one, types.CodeType):
            found |= names_in(one, known, seen)
    used = [known.get(name) for name in code.co_names]
    for module in [one for one in used if isinstance(one, types.ModuleType)]:
        if lines.is_users(getattr(module, "__file__", None) or "<"):
            used += [vars(module).get(name) for name in code.co_names]
    for inner in itertools.chain.from_iterable(map(functions, used)):
        found |= names_in(inner.__code__, inner.__globals__, seen)
    return found


def functions(value: Any) -> list[types.FunctionType]:
    """A function of the script, or those of a class of it."""
    kinds = value.__mro__ if isinstance(value, type) else ()
    some = [value, *(one for kind in kinds for one in vars(kind).values())]
    return [
        one
        for one in some
        if isinstance(one, types.FunctionType) and lines.is_users(one.__code__.co_filename)
    ]


__all__ = ["Ended", "is_rank"]
