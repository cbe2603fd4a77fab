"""What a program saves, loads, uploads and starts: savers leave an empty file in the scratch
folder, nothing leaves the machine."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import subprocess
import sys
from concurrent.futures import Future
from types import ModuleType
from typing import Any

import torch
from memfit.trace import leftovers, lines, missing_weights, saved_values
from memfit.trace.imports import Patch
from memfit.trace.missing_packages import Nothing
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
COMMAND = "commands that the script starts are not run and are assumed to succeed"


def touch(target: Any, size: int = 0) -> None:
    """An empty file by that name, where a program may look for it, in place of `size` bytes."""
    if isinstance(target, (str, os.PathLike)):
        with open(target, "wb"):
            pass
        leftovers.saved(target, size)


def graphs(module: ModuleType) -> list[Patch]:
    """TensorBoard's picture of a model: it runs once, and nothing is drawn."""

    def add_graph(self: Any, model: Any, input_to_model: Any = None, *_: Any, **__: Any) -> None:
        whole = isinstance(input_to_model, (tuple, list))
        model(*(input_to_model if whole else () if input_to_model is None else (input_to_model,)))

    return [(module.SummaryWriter, "add_graph", add_graph)]


def size_of(value: Any, seen: set[int] | None = None) -> int:
    """Bytes of all tensors in it, each storage once."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        new = storage._cdata not in seen
        seen.add(storage._cdata)
        return storage.nbytes() if new else 0
    if isinstance(value, torch.nn.Module):
        return sum(size_of(one, seen) for one in value.state_dict(keep_vars=True).values())
    if isinstance(value, dict):
        return sum(size_of(one, seen) for one in value.values())
    if isinstance(value, (list, tuple, set)):
        return sum(size_of(one, seen) for one in value)
    return 0


def patches(recorder: Watcher) -> list[Patch]:
    true_load, true_popen, true_system = torch.load, subprocess.Popen.__init__, os.system
    true_save = torch.save

    def save(obj: Any, f: Any, *_: Any, **__: Any) -> None:
        touch(f, size_of(obj))
        saved_values.keep(f, obj, true_save)

    def load(f: Any, map_location: Any = None, *args: Any, **given: Any) -> Any:
        """Read to the CPU, without copying where torch can; what belongs on the GPU is put there
        then."""
        if isinstance(f, (str, os.PathLike)) and not os.path.exists(f):
            return missing_weights.absent(recorder, f)
        if isinstance(f, (str, os.PathLike)) and not os.path.getsize(f):
            loaded = again(f, map_location)
        elif isinstance(f, io.BytesIO):
            loaded = saved_values.restored(true_load(f, "cpu", *args, **given), map_location, {})
        else:
            loaded = true_load(f, "cpu", *args, **given)
        wanted = map_location if isinstance(map_location, (str, torch.device)) else None
        return (
            moved(loaded, torch.device(wanted))
            if wanted is not None and torch.device(wanted).type == "cuda"
            else loaded
        )

    def again(f: Any, map_location: Any) -> Any:
        try:
            return saved_values.loaded(f, map_location, true_load)
        except KeyError:
            raise CannotFollow(
                f"the script reads `{os.path.basename(f)}`, which the trace did not save",
                "a trace writes no files",
            ) from None

    def popen(self: Any, args: Any, *rest: Any, **given: Any) -> None:
        if starter_is_user():
            recorder.note("command", COMMAND)
            said = "print(24, 80)" if "stty size" in str(args) else ""  # progress bars ask for it
            args, given = (
                [sys.executable, "-c", said],
                {**given, "shell": False, "executable": None},
            )
        true_popen(self, args, *rest, **given)

    def system(command: Any) -> int:
        if not starter_is_user():
            return true_system(command)
        recorder.note("command", COMMAND)
        return 0

    return [
        (torch, "save", save),
        (torch.jit, "save", lambda module, f, *_, **__: touch(f, size_of(module))),
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
        touch(filename, size_of(tensors))

    return [
        (module, name, save_file) for name in ("save_file", "save_model") if hasattr(module, name)
    ]


def pretrained(owner: Any) -> list[Patch]:
    """`save_pretrained` of transformers' and PEFT's models: a folder with the config in it; of
    PEFT's, with what is trained."""

    def save_pretrained(self: Any, save_directory: Any, *_: Any, **__: Any) -> None:
        os.makedirs(save_directory, exist_ok=True)
        adapters = hasattr(self, "peft_config")
        name = "adapter_model.safetensors" if adapters else "model.safetensors"
        held = [one for one in self.parameters() if one.requires_grad] if adapters else self
        touch(os.path.join(os.fspath(save_directory), name), size_of(held))
        folder = os.fspath(save_directory)
        for part, config in (self.peft_config if adapters else {"": self.config}).items():
            with contextlib.suppress(OSError, TypeError, ValueError):
                config.save_pretrained(folder if part == "default" else os.path.join(folder, part))

    return [(owner, "save_pretrained", save_pretrained)]


def hub(module: ModuleType, recorder: Watcher) -> list[Patch]:
    """For `huggingface_hub.hf_api`: whatever would change something there does nothing."""

    def create_repo(self: Any, repo_id: str, *_: Any, **__: Any) -> Any:
        recorder.note("upload", "nothing is uploaded to the hub")
        whole = repo_id if "/" in repo_id else f"{NOBODY['name']}/{repo_id}"  # 2.x parses no less
        return module.RepoUrl(f"https://huggingface.co/{whole}")

    def nothing(*_: Any, run_as_future: bool = False, **__: Any) -> Any:
        recorder.note("upload", "nothing is uploaded to the hub")
        done: Future[None] = Future()
        done.set_result(None)
        return done if run_as_future else None

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
    return [*found, *whoami(module)]


def repositories(module: ModuleType, recorder: Watcher) -> list[Patch]:
    """For `huggingface_hub.repository`, up to 0.36: a clone that git and git-lfs would make."""

    class Repository(Nothing):
        def __init__(self, local_dir: Any, clone_from: Any = None, *_: Any, **__: Any) -> None:
            self.local_dir = os.fspath(local_dir)
            recorder.note("upload", "nothing is uploaded to the hub")
            os.makedirs(self.local_dir, exist_ok=True)
            if clone_from and not os.path.exists(os.path.join(self.local_dir, "config.json")):
                clone(str(clone_from), self.local_dir)

    return [(module, "Repository", Repository)]


def clone(name: str, folder: str) -> None:
    """The config of a model that is known; a new repository has none."""
    import transformers

    with contextlib.suppress(OSError, ValueError):
        transformers.AutoConfig.from_pretrained(name).save_pretrained(folder)


LOGINS = ("login", "notebook_login", "interpreter_login", "logout", "auth_switch")
NOBODY = {"type": "user", "name": "user", "fullname": "user", "orgs": [], "auth": {}}


def logins(module: ModuleType, recorder: Watcher) -> list[Patch]:
    """For `huggingface_hub._login`: a script that logs in goes on without a token."""

    def login(*_: Any, **__: Any) -> None:
        recorder.note("login", "the script logs in nowhere: it is assumed to succeed")

    return [(module, name, login) for name in LOGINS if hasattr(module, name)]


def whoami(module: ModuleType) -> list[Patch]:
    """`whoami` of the hub's client, which is never sent the user's token."""

    def answered(*_: Any, **__: Any) -> Any:
        return dict(NOBODY)

    return [(module.HfApi, "whoami", answered), (module, "whoami", answered)]


__all__ = ["hub", "logins", "patches", "pretrained", "repositories", "safetensors"]
