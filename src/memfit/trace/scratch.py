"""A program's files go into a scratch folder: what it writes, makes, renames or removes there is
seen again by itself, and by nobody else.

This covers what is written through Python, and the savers of torch and safetensors. What a
package's own native code writes (pyarrow's writers, for one) it does not.
"""

from __future__ import annotations

import _io
import builtins
import contextlib
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

FREE = ("/dev/", "/proc/")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGING = (
    "remove",
    "unlink",
    "rmdir",
    "chmod",
    "utime",
    "truncate",
    "chown",
    "setxattr",
    "removexattr",
)
OTHERS = ("open", "mkdir", "rename", "replace", "link", "symlink", "listdir", "scandir")
READING = ("stat", "lstat", "access", "readlink", "listxattr", "getxattr")


class Scratch:
    """Maps paths into `root`. What is there hides the file of the same name outside; a removed file
    is only hidden to its remover."""

    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)
        self.true = {
            name: getattr(os, name) for name in (*CHANGING, *READING, *OTHERS) if hasattr(os, name)
        }
        self.true_open = builtins.open
        self.gone: set[str] = set()
        self.used = self.busy = (
            # whether anything differs yet from what lies outside; whether we are asking ourselves
            False
        )
        self.folders: dict[str, str] = {}

    def inside(self, path: Any) -> str | None:
        """The place in the scratch folder that stands for `path`; None for what may be touched: the
        folder itself, devices, open files."""
        if self.busy or not isinstance(path, (str, bytes, os.PathLike)):
            return None
        folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        if folder not in self.folders:
            self.busy = True  # `realpath` looks at every part of a path
            self.folders[folder] = os.path.realpath(folder)
            self.busy = False
        name = os.path.join(self.folders[folder], name)
        if name.startswith((self.root + os.sep, *FREE)) or name == self.root:
            return None
        return self.root + os.sep + "files" + os.path.splitdrive(name)[1]

    def exists(self, path: str) -> bool:
        try:
            self.true["lstat"](path)
        except (OSError, ValueError):
            return False
        return True

    def read(self, path: Any) -> Any:
        """Where to read `path` from."""
        if not self.used:
            return path
        place = self.inside(path)
        if place is None:
            return path
        if self.exists(place):
            return place
        return self.root + "/nothing/here" if place in self.gone else path

    def write(self, path: Any, *, keep: bool = False) -> Any:
        """Where to write `path`; `keep`: what stands there is copied first, because it will only be
        changed."""
        place = self.inside(path)
        if place is None:
            return path
        self.used = True
        parent = os.path.dirname(place)
        if not self.exists(parent):
            if not self.exists(os.path.dirname(os.path.abspath(os.fsdecode(path)))):
                return path  # fails as it would
            Path(parent).mkdir(parents=True, exist_ok=True)
        if keep and not self.exists(place) and self.exists(path):
            shutil.copyfile(path, place)
        self.gone.discard(place)
        return place

    # -- what takes the place of Python's own
    # ----------------------------------------------------------------------
    def open(self, file: Any, mode: str = "r", *args: Any, **given: Any) -> Any:
        if given.get("opener") is None and isinstance(mode, str):
            file = (
                self.write(file, keep="a" in mode or "+" in mode)
                if set(mode) & set("wxa+")
                else self.read(file)
            )
        return self.true_open(file, mode, *args, **given)

    def os_open(
        self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        path = self.based(path, dir_fd)
        path = self.write(path, keep=not flags & os.O_TRUNC) if flags & WRITING else self.read(path)
        return int(self.true["open"](path, flags, mode))

    def based(self, path: Any, folder: int | None) -> Any:
        """A path below an open folder as one from the root; where the system does not tell, nothing
        is touched."""
        if folder is None or isinstance(path, int) or os.path.isabs(path):
            return path
        try:
            return os.path.join(self.true["readlink"](f"/proc/self/fd/{folder}"), os.fsdecode(path))
        except OSError:
            raise PermissionError(1, "a trace changes no files", os.fspath(path)) from None

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        path = self.based(path, dir_fd)
        if self.exists(path) and self.inside(path) not in self.gone:
            raise FileExistsError(17, "File exists", os.fspath(path))
        self.true["mkdir"](self.write(path), mode)

    def make(self, name: str) -> Callable[..., Any]:
        """Something that is neither a file nor a folder."""
        true = getattr(os, name)
        return lambda path, *args, dir_fd=None, **given: true(
            self.write(self.based(path, dir_fd)), *args, **given
        )

    def change(self, name: str) -> Callable[..., Any]:
        """A file outside is only said to have been changed."""
        true = self.true[name]

        def run(path: Any, *args: Any, dir_fd: int | None = None, **given: Any) -> Any:
            path = self.based(path, dir_fd)
            place = self.inside(path)
            if place is None or self.exists(place):
                return true(path if place is None else place, *args, **given)
            self.true["lstat"](path)  # fails as it would
            if name in ("remove", "unlink", "rmdir"):
                self.used = True
                self.gone.add(place)
            return None

        return run

    def look(self, name: str) -> Callable[..., Any]:
        true = self.true[name]

        def run(path: Any = ".", *args: Any, dir_fd: int | None = None, **given: Any) -> Any:
            return true(self.read(self.based(path, dir_fd)), *args, **given)

        return run

    def move(self, name: str) -> Callable[..., Any]:
        true = self.true[name]

        def run(
            source: Any,
            target: Any,
            *args: Any,
            src_dir_fd: int | None = None,
            dst_dir_fd: int | None = None,
            **given: Any,
        ) -> Any:
            source, target = self.based(source, src_dir_fd), self.based(target, dst_dir_fd)
            place = self.inside(source)
            if place is not None and not self.exists(place) and name in ("rename", "replace"):
                self.used = True
                if os.path.isfile(source):
                    shutil.copyfile(source, self.write(target))
                self.gone.add(place)
                return None
            return true(
                source if name == "symlink" else self.read(source),
                self.write(target),
                *args,
                **given,
            )

        return run

    def names(self, path: Any = ".") -> list[Any]:
        place = self.inside(path) if self.used else None
        if place is None or not self.exists(place):
            found = list(self.true["listdir"](path))
        else:
            found = list(self.true["listdir"](place))
            with contextlib.suppress(OSError):
                found += [name for name in self.true["listdir"](path) if name not in found]
        return [
            name
            for name in found
            if not self.gone or self.inside(os.path.join(path, name)) not in self.gone
        ]

    def patches(self) -> list[tuple[Any, str, Any]]:
        made: dict[str, Any] = {"open": self.os_open, "mkdir": self.mkdir, "listdir": self.names}
        made |= {name: self.make(name) for name in ("mkfifo", "mknod") if hasattr(os, name)}
        made |= {name: self.change(name) for name in CHANGING if name in self.true}
        made |= {name: self.look(name) for name in (*READING, "scandir") if name in self.true}
        made |= {
            name: self.move(name)
            for name in ("rename", "replace", "link", "symlink")
            if name in self.true
        }
        return [(os, name, function) for name, function in made.items()] + [
            (builtins, "open", self.open),
            (io, "open", self.open),
            (_io, "open", self.open),
        ]


__all__ = ["Scratch"]
