"""Checkpoints that are not there: loading one leaves a model as it was made, which has the same
memory."""

from __future__ import annotations

import ast
import errno
import linecache
import os
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import torch
from memfit.trace import lines
from memfit.trace.imports import Change, Patch
from memfit.trace.missing_packages import Nothing, parts
from memfit.trace.refuse import CannotFollow, Watcher

UNSIZED = (
    "the model takes its sizes from a checkpoint that was not found",
    "put the file there, or give the sizes in the script",
)


class Checkpoint(dict[Any, Any], Nothing):  # type: ignore[misc]  # no hash, as a dict
    """What a file might hold: a dict in which everything is there, and nothing in it."""

    __eq__, __ne__ = Nothing.__eq__, Nothing.__ne__
    __lt__, __le__, __gt__, __ge__ = (
        Nothing.__lt__,
        Nothing.__le__,
        Nothing.__gt__,
        Nothing.__ge__,
    )
    __str__, __repr__, __bool__ = Nothing.__str__, Nothing.__str__, Nothing.__bool__

    def __index__(self) -> int:
        """A model that takes it for a size would come out too small."""
        if making_a_module():
            raise CannotFollow(*UNSIZED)
        return 0

    def __missing__(self, _: Any) -> Nothing:
        return Checkpoint()

    def __getitem__(self, key: Any) -> Any:
        return self.__missing__(key)

    def __iter__(self) -> Any:
        return iter([Checkpoint() for _ in range(parts() or 0)])

    def get(self, _: Any, default: Any = None) -> Any:
        return Checkpoint() if default is None else default

    pop = get


def making_a_module() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and isinstance(
            frame.f_locals.get(code.co_varnames[0]), torch.nn.Module
        ):
            return True
        frame = frame.f_back
    return False


FILE, NAMED = "checkpoint", 5  # a loader of data may load one for each of its rows
FALLBACK = {"FileNotFoundError", "OSError", "IOError", "EnvironmentError"}


def expected() -> bool:
    """Whether the script has another way for a file that is not there: one of its lines that are
    running now stands in a `try` that goes on after such an error."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if lines.is_users(name) and goes_on("".join(linecache.getlines(name)), frame.f_lineno):
            return True
        frame = frame.f_back
    return False


def goes_on(text: str, number: int) -> bool:
    try:
        nodes = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Try)]
    except (SyntaxError, ValueError):
        return False
    return any(
        FALLBACK & {one.id for one in ast.walk(handler.type) if isinstance(one, ast.Name)}
        and not any(isinstance(one, ast.Raise) for one in ast.walk(handler))
        and "exit(" not in ast.unparse(handler)
        for node in nodes
        if node.body[0].lineno <= number <= (node.body[-1].end_lineno or 0)
        for handler in node.handlers
        if handler.type is not None
    )


def absent(recorder: Watcher, name: Any) -> Checkpoint:
    if isinstance(name, (str, os.PathLike)) and expected():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(name))
    shown = os.path.basename(os.fspath(name)) if isinstance(name, (str, os.PathLike)) else "a file"
    message = "was not found: models and optimizers stay as they were made"
    if len(files(recorder)) < NAMED:
        recorder.note(f"{FILE} {shown}", f"`{shown}` {message}")
    else:
        recorder.note(f"{FILE}s", f"`{shown}`, like other files after it, {message}")
    return Checkpoint()


def files(recorder: Watcher) -> list[str]:
    """The notes of what was to be loaded and is not there."""
    return [one for one in recorder.notes if one.startswith(FILE)]


def patches(recorder: Watcher) -> list[Patch]:
    """`load_state_dict` of what is not there does nothing."""

    def skipping(true: Callable[..., Any], found: Callable[[], Any]) -> Callable[..., Any]:
        def load_state_dict(self: Any, state: Any, *args: Any, **given: Any) -> Any:
            # Copied key by key, it is an empty dict
            if isinstance(state, Nothing) or (state == {} and files(recorder)):
                return found()
            return true(self, state, *args, **given)

        return load_state_dict

    keys = torch.nn.modules.module._IncompatibleKeys
    found: list[Patch] = [
        (
            torch.nn.Module,
            "load_state_dict",
            skipping(torch.nn.Module.load_state_dict, lambda: keys([], [])),
        )
    ]
    kinds: list[Any] = [torch.optim.Optimizer, torch.amp.GradScaler]
    kinds += [
        one
        for one in vars(torch.optim.lr_scheduler).values()
        if isinstance(one, type)
        and issubclass(one, torch.optim.lr_scheduler.LRScheduler)
        and "load_state_dict" in vars(one)
    ]
    found += [
        (kind, "load_state_dict", skipping(kind.load_state_dict, lambda: None)) for kind in kinds
    ]
    true_url = torch.hub.load_state_dict_from_url

    def from_url(url: str, *args: Any, **given: Any) -> Any:
        try:
            return true_url(url, *args, **given)
        except OSError:
            return absent(recorder, url)

    true_list = torch.hub.list

    def names(repository: str, *args: Any, **given: Any) -> Any:
        """Scripts offer them as choices."""
        try:
            return true_list(repository, *args, **given)
        except OSError:
            recorder.note(f"hub {repository}", f"the models of `{repository}` are not known")
            return []

    return [
        *found,
        (torch.hub, "load_state_dict_from_url", from_url),
        (torch.hub, "list", names),
    ]


def changes(recorder: Watcher) -> dict[str, Change]:
    """Zoos of models whose weights are downloaded, once they are imported."""

    def state_dict(self: Any, *_: Any, **__: Any) -> Any:
        return absent(recorder, self.url)

    def torchvision(module: ModuleType) -> list[Patch]:
        return [(module.WeightsEnum, "get_state_dict", state_dict)]

    def timm(module: ModuleType) -> list[Patch]:
        return [
            (module, "load_pretrained", lambda *_, **__: absent(recorder, "pretrained") and None)
        ]

    def safetensors(module: ModuleType) -> list[Patch]:
        true = module.load_file

        def load_file(filename: Any, *args: Any, **given: Any) -> Any:
            there = os.path.exists(filename) and os.path.getsize(filename)
            return true(filename, *args, **given) if there else absent(recorder, filename)

        return [(module, "load_file", load_file)]

    return {
        "torchvision.models._api": torchvision,
        "timm.models._builder": timm,
        "safetensors.torch": safetensors,
    }


__all__ = ["UNSIZED", "absent", "changes", "patches"]
