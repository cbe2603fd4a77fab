"""What a program saves, loads, uploads and starts: savers leave an empty file in the scratch
folder, nothing leaves the machine."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import torch
from memfit.trace import lines
from memfit.trace.imports import Patch
from memfit.trace.refuse import CannotFollow, Watcher

UPLOADS = (
    "create_commit",
    "upload_file",
    "upload_folder",
    "upload_large_folder",
    "delete_file",
    "delete_folder",
    "delete_repo",
    "create_branch",
    "create_tag",
    "move_repo",
    "update_repo_settings",
    "create_pull_request",
)
COMMAND = "commands that the script starts are not run, and taken to succeed without a word"


def touch(target: Any) -> None:
    """An empty file by that name, where a program may look for it."""
    if isinstance(target, (str, os.PathLike)):
        with open(target, "wb"):
            pass


def patches(recorder: Watcher) -> list[Patch]:
    true_load, true_popen, true_system = torch.load, subprocess.Popen.__init__, os.system

    def save(obj: Any, f: Any, *_: Any, **__: Any) -> None:
        touch(f)

    def load(f: Any, map_location: Any = None, *args: Any, **given: Any) -> Any:
        """Read to the CPU, without copying where torch can; what belongs on the GPU is put there
        then."""
        if isinstance(f, (str, os.PathLike)) and not os.path.getsize(f):
            raise CannotFollow(
                f"the script reads back `{os.path.basename(f)}`, which it only seemed to save",
                "a trace writes no files",
            )
        loaded = true_load(f, "cpu", *args, **given)
        wanted = map_location if isinstance(map_location, (str, torch.device)) else None
        return (
            moved(loaded, torch.device(wanted))
            if wanted is not None and torch.device(wanted).type == "cuda"
            else loaded
        )

    def popen(self: Any, args: Any, *rest: Any, **given: Any) -> None:
        if starter_is_user():
            recorder.note("command", COMMAND)
            args, given = [sys.executable, "-c", ""], {**given, "shell": False, "executable": None}
        true_popen(self, args, *rest, **given)

    def system(command: Any) -> int:
        if not starter_is_user():
            return true_system(command)
        recorder.note("command", COMMAND)
        return 0

    return [
        (torch, "save", save),
        (torch, "load", load),
        (subprocess.Popen, "__init__", popen),
        (os, "system", system),
    ]


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return type(value)((key, moved(one, device)) for key, one in value.items())
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(moved(one, device) for one in value)
    return value


def starter_is_user() -> bool:
    """Whether the command is started by the user's own code, through nothing but Python's own
    library."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if lines.is_users(name):
            return True
        if "site-packages" in name or "dist-packages" in name:
            return False
        frame = frame.f_back
    return False


def safetensors(module: ModuleType) -> list[Patch]:
    """For `safetensors.torch`."""

    def save_file(tensors: Any, filename: Any, *_: Any, **__: Any) -> None:
        touch(filename)

    return [
        (module, name, save_file) for name in ("save_file", "save_model") if hasattr(module, name)
    ]


def pretrained(owner: Any) -> list[Patch]:
    """`save_pretrained` of transformers' and PEFT's models: a folder with the config in it."""

    def save_pretrained(self: Any, save_directory: Any, *_: Any, **__: Any) -> None:
        os.makedirs(save_directory, exist_ok=True)
        touch(os.path.join(os.fspath(save_directory), "model.safetensors"))

    return [(owner, "save_pretrained", save_pretrained)]


def hub(module: ModuleType, recorder: Watcher) -> list[Patch]:
    """For `huggingface_hub.hf_api`: whatever would change something there does nothing."""

    def create_repo(self: Any, repo_id: str, *_: Any, **__: Any) -> Any:
        recorder.note("upload", "nothing is created on the hub or uploaded to it")
        return module.RepoUrl(f"https://huggingface.co/{repo_id}")

    def nothing(*_: Any, **__: Any) -> None:
        recorder.note("upload", "nothing is created on the hub or uploaded to it")

    kind = module.HfApi
    found: list[Patch] = [
        (kind, "create_repo", create_repo),
        *((kind, name, nothing) for name in UPLOADS if hasattr(kind, name)),
    ]
    for _, name, function in list(
        found
    ):  # the module's own functions are methods bound when it was loaded
        if hasattr(module, name):
            found.append((module, name, functools.partial(function, None)))
    return found


__all__ = ["hub", "patches", "pretrained", "safetensors"]
