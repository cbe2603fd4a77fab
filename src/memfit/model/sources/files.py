"""Reading files that strangers made: regular files only, no more bytes than announced, and JSON in
its strict reading."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from memfit.errors import Problem, SourceError, raise_errors
from memfit.units import MIB

CONFIG_LIMIT = (
    10 * MIB
)  # the largest config.json seen is 2.4 MiB: one quantization entry per expert
DEPTH_LIMIT = 64
_REASONS = {
    errno.ENOENT: "there is no such file",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ELOOP: "its symbolic links form a loop",
    errno.EISDIR: "it is a folder",
    errno.ENAMETOOLONG: "its name is too long",
    errno.ENOTDIR: "a part of its path is not a folder",
}
# What a file that should be something else turns out to be, by its first bytes.
_LOOKS = (
    (
        b"version https://git-lfs",
        "it is a Git LFS pointer: run `git lfs pull` to download the file",
    ),
    (
        b"<",
        ("it is a web page, perhaps an error page or the login page of a proxy"),
    ),
    (b"GGUF", "it is a GGUF file: name it `*.gguf`"),
    (
        b"PK\x03\x04",
        (
            "it is a zip archive, perhaps a PyTorch checkpoint; memfit does not open "
            "those, because loading one can run code"
        ),
    ),
    (
        b"\x80",
        (
            "it looks like a Python pickle; memfit does not open those, because "
            "loading one can run code"
        ),
    ),
    (b"\x1f\x8b", "it is compressed: run `gunzip`"),
)


def looks_like(start: bytes) -> str:
    """A hint for a file that is not what its name says, or nothing."""
    start = start.lstrip()
    return next((hint for magic, hint in _LOOKS if start.startswith(magic)), "")


def typed_path(spec: str, where: str = "model") -> Path:
    """The path that a user typed, which may be missing; refused where the system cannot look for
    it."""
    path = Path(spec)
    try:
        path = path.expanduser()
        path.stat()
    except RuntimeError:
        raise SourceError.one(
            f"`{shown(spec)}` starts with the home folder of an unknown user", where=where
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        raise unreadable(spec, error, where) from None
    return path


def unreadable(path: Path | str, error: OSError | ValueError, where: str = "model") -> SourceError:
    """The one message for a path that the system refuses."""
    code = error.errno if isinstance(error, OSError) else None
    reason = (
        _REASONS.get(code or 0)
        or (error.strerror if isinstance(error, OSError) else None)
        or "it is not a valid path"
    )
    return SourceError.one(f"`{shown(path)}` cannot be read: {reason}", where=where)


def shown(path: Path | str) -> str:
    """A path as it may stand in a message: short, and nothing that moves the cursor."""
    text = "".join(letter if letter.isprintable() else "?" for letter in str(path))
    return text if len(text) <= 160 else text[:60] + "…" + text[-90:]


def listed(names: list[str], most: int = 12) -> str:
    """Names for a message, the tail counted instead of shown."""
    text = ", ".join(f"`{shown(name)}`" for name in names[:most])
    return text + (f" and {len(names) - most} more" if len(names) > most else "")


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file and its size. A pipe or a device is refused before it can block or answer
    without end."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise _irregular(path)
        # Not blocking, in case a pipe took the file's place since.
        handle = os.open(
            path,
            os.O_RDONLY
            | getattr(os, "O_NONBLOCK", 0)
            | getattr(os, "O_BINARY", 0)
            | getattr(os, "O_CLOEXEC", 0),
        )
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    with os.fdopen(handle, "rb") as file:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode):
            raise _irregular(path)
        try:
            yield file, state.st_size
        except OSError as error:
            raise unreadable(path, error) from None


def _irregular(path: Path) -> SourceError:
    what = "a folder" if path.is_dir() else "not a regular file (a pipe, socket or device)"
    return SourceError.one(f"`{shown(path)}` is {what}", where="model")


def read_bytes(path: Path, limit: int = CONFIG_LIMIT) -> bytes:
    """The whole file, or a message when it is larger than it may be."""
    with opened(path) as (file, size):
        data = file.read(limit + 1) if size <= limit else b""
    if size > limit or len(data) > limit:
        raise SourceError.one(
            (
                f"`{shown(path)}` has {max(size, len(data))} bytes, more than the limit "
                f"of {limit // MIB} MiB"
            ),
            where="model",
            hint=looks_like(data),
        )
    return data


def read_object(path: Path, limit: int = CONFIG_LIMIT) -> dict[str, Any]:
    """A JSON file that holds an object."""
    return parse_object(read_bytes(path, limit), where=shown(path))


def parse_object(data: bytes, *, where: str, search: bool = True) -> dict[str, Any]:
    """JSON, strictly: UTF-8 without mark, no key twice, no NaN, not too deep, an object at the
    root.

    `search=False` leaves out the look at every value, for headers whose every value is checked
    anyway.
    """
    text = _decode(data, where)
    twice: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            twice.extend(
                name for name, times in Counter(name for name, _ in items).items() if times > 1
            )
        return made

    try:
        root = json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise SourceError.one(
            (
                f"`{where}` is not valid JSON: {error.msg.removesuffix(' at')} at line "
                f"{error.lineno}, column {error.colno}"
            ),
            where="model",
            hint=looks_like(data)
            or (
                "the file seems to be truncated"
                if error.pos >= len(text.rstrip()) - 1 or "Unterminated" in error.msg
                else ""
            ),
        ) from None
    except RecursionError:
        raise SourceError.one(
            f"`{where}` is nested too deeply: more than {DEPTH_LIMIT} levels", where="model"
        ) from None
    except ValueError as error:  # Python refuses whole numbers beyond some thousand digits
        raise SourceError.one(
            f"`{where}` contains a number with too many digits", where="model", hint=str(error)[:80]
        ) from None
    if not isinstance(root, dict):
        raise SourceError.one(
            (f"`{where}` contains a JSON {_kind(root)}, not an object with the model's fields"),
            where="model",
        )
    problems = [
        Problem(message=f"key `{shown(name)}` is given twice in one object", where=where)
        for name in twice[:20]
    ]
    raise_errors(
        [*problems, *(_strange_values(root, where, surrogates="\\u" in text) if search else ())],
        SourceError,
    )
    return root


def _kind(value: Any) -> str:
    return {list: "list", str: "string", bool: "true or false", type(None): "null"}.get(
        type(value), "number"
    )


def _decode(data: bytes, where: str) -> str:
    message = hint = ""
    if not data.strip():
        message = "is empty"
    elif data.startswith((b"\xff\xfe", b"\xfe\xff")):
        message, hint = "is UTF-16, not UTF-8", "save it as UTF-8"
    elif data.startswith(b"\xef\xbb\xbf"):
        message, hint = (
            "starts with a byte order mark, which JSON does not allow",
            "save it as UTF-8 without BOM",
        )
    else:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            message, hint = (
                f"is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}",
                looks_like(data),
            )
    raise SourceError.one(f"`{where}` {message}", where="model", hint=hint)


def _strange_values(root: dict[str, Any], where: str, *, surrogates: bool) -> list[Problem]:
    """Depth, NaN and half characters, looked for without recursion.

    `Infinity` passes in `time_step_limit` alone: transformers itself writes `[0.0, Infinity]` there
    (Mamba2Config, NemotronHConfig).
    """
    problems: list[Problem] = []
    stack: list[tuple[Any, str, int]] = [(root, "", 1)]
    while stack and len(problems) < 20:
        node, path, depth = stack.pop()
        if depth > DEPTH_LIMIT:
            return [
                Problem(
                    message=f"`{where}` is nested too deeply: more than {DEPTH_LIMIT} levels",
                    where="model",
                )
            ]
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            kind = type(value)
            if kind is dict or kind is list:
                stack.append((value, f"{path}.{key}", depth + 1))
            elif kind is float and not math.isfinite(value):
                if math.isnan(value) or not path.endswith(".time_step_limit"):
                    problems.append(
                        Problem(
                            message=f"`{shown(f'{path}.{key}'[1:])}` is {value}, not a number",
                            where=where,
                        )
                    )
            elif surrogates and (_broken(value) or _broken(key)):
                problems.append(
                    Problem(
                        message=f"`{shown(f'{path}.{key}'[1:])}` contains an invalid character",
                        where=where,
                    )
                )
    return problems


def _broken(value: Any) -> bool:
    return isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value)
