"""Checkpoints that are not there: loading one leaves a model as it was made, which has the same
memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from memfit.trace.imports import Change, Patch
from memfit.trace.refuse import Watcher


class Checkpoint(dict[Any, Any]):
    """What a file might hold: whatever is looked up is another such thing, or 0 as a number."""

    def __missing__(self, _: Any) -> Checkpoint:
        return Checkpoint()

    def get(self, _: Any, default: Any = None) -> Any:
        return Checkpoint() if default is None else default

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Checkpoint()

    def __int__(self) -> int:
        return 0

    __index__ = __int__

    def __float__(self) -> float:
        return 0.0

    def __add__(self, other: Any) -> Any:
        return other

    __radd__ = __add__

    def __format__(self, _: str) -> str:
        return "0"


def absent(recorder: Watcher, name: Any) -> Checkpoint:
    shown = os.path.basename(os.fspath(name)) if isinstance(name, (str, os.PathLike)) else "a file"
    recorder.note(
        "checkpoint", f"`{shown}` is not there: models and optimizers stay as they were made"
    )
    return Checkpoint()


def patches(recorder: Watcher) -> list[Patch]:
    """`load_state_dict` of what is not there does nothing."""

    def skipping(true: Callable[..., Any], found: Callable[[], Any]) -> Callable[..., Any]:
        def load_state_dict(self: Any, state: Any, *args: Any, **given: Any) -> Any:
            if isinstance(state, Checkpoint):
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
    kinds += [torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.LambdaLR]
    found += [
        (kind, "load_state_dict", skipping(kind.load_state_dict, lambda: None)) for kind in kinds
    ]
    true_url = torch.hub.load_state_dict_from_url

    def from_url(url: str, *args: Any, **given: Any) -> Any:
        try:
            return true_url(url, *args, **given)
        except OSError:
            return absent(recorder, url)

    return [*found, (torch.hub, "load_state_dict_from_url", from_url)]


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


__all__ = ["absent", "changes", "patches"]
