"""Folders of pictures or recordings that are not there: listed with a number of files, of which
each reads as a blank picture or as silence."""

from __future__ import annotations

import builtins
import fnmatch
import functools
import glob
import importlib
import io
import itertools
import os
import pathlib
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from memfit.trace import lines, near_files
from memfit.trace.asked_columns import Columns, by_user
from memfit.trace.imports import Change, Patch
from memfit.trace.missing_weights import expected

COUNT = 256  # files of a folder
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".gif")
TABLES = (".txt", ".json", ".jsonl", ".csv", ".parquet")
KINDS, MANY = range(2), 1 << 14  # classes and files of a folder that is walked through
SHARDS, SHARD_COUNT = "*.bin", 4  # arrays of tokens, of which a script may keep one to evaluate
RECORDINGS = (".wav", ".flac", ".mp3", ".ogg")
# What scripts read such files by, where they do not say how the files end.
READING = {
    ".jpg": ("image.open(", "imread(", "read_image(", "decode_image("),
    ".wav": ("torchaudio.load(", "soundfile", "librosa.load(", "wavfile"),
}
RATES = (
    "sampling_rate",
    "sample_rate",
    "sr",
    "target_sr",
    "target_sample_rate",
)  # as they are named
# Folders that a script itself fills, and those of descriptions beside pictures.
OWN = re.compile(r"out|che?ck?p|log|save|result|runs?\b|cache|weights|models?\b", re.IGNORECASE)
DESCRIBED = (".xml", ".txt", ".json", ".npy", ".mat")
DESCRIBING = re.compile(r"annot|label|xml|json|txt|meta", re.IGNORECASE)
GRAY = re.compile(r"mask|label|annot|segm|[_/]gt\b", re.IGNORECASE)


def ending(pattern: str = "") -> str:
    """How the files of a folder end: as the pattern or the script says."""
    last = os.path.splitext(pattern)[1].lower()
    known = (*PICTURES, *RECORDINGS)
    if last not in ("", ".*"):
        return last if last in known else ""
    said = next((one for one in known if lines.speaks(f"{one}'", f'{one}"')), "")
    return said or next((one for one, words in READING.items() if lines.speaks(*words)), "")


def lacks(folder: str) -> bool:
    """Whether a folder that is not there may be one of the user's data."""
    if os.path.exists(folder) or OWN.search(folder) or expected():
        return False
    described = DESCRIBING.search(os.path.basename(folder)) and lines.speaks(*DESCRIBED)
    return not described


# An option that names a folder of data: `--instance_data_dir=dog`.
GIVEN = re.compile(r"data|image|img|photo|picture|instance|train|valid|audio|input", re.IGNORECASE)


def is_given(folder: str) -> bool:
    """Whether the script got this folder as one of data, on its command line."""
    wanted = os.path.normpath(folder)
    for option, following in itertools.pairwise((*sys.argv[1:], "")):
        name, sign, value = option.partition("=")
        path = value if sign else following
        named = name.startswith("-") and GIVEN.search(name) and not OWN.search(name)
        if named and path and os.path.normpath(path) == wanted:
            return True
    return False


class Folders:
    """Lists what is not there; `known` are the paths that it has named."""

    def __init__(self, columns: Columns) -> None:
        self.source, self.known = columns.source, set[str]()

    def listed(self, folder: Any, pattern: str = "", count: int = COUNT) -> list[str]:
        path = os.fsdecode(folder)
        shards = pattern == SHARDS and lines.speaks("memmap(", "fromfile(")
        if (shards or pattern.lower().endswith(TABLES)) and lacks(path):
            return self.told(path, pattern)
        end = ending(pattern)
        if not end or not lacks(path):
            return []
        near_files.refuse_misspelled_folder(path)
        nested = path in self.known
        names = [f"{one:06}{end}" for one in range(count // 16 if nested else count)]
        names = fnmatch.filter(names, pattern) if pattern else names
        self.known.update(os.path.join(path, one) for one in names)
        if names and not nested:
            kind = "recordings" if end in RECORDINGS else "pictures"
            message = f"`{path}` was not found: {len(names)} {kind} are assumed in it"
            self.source.note(f"folder {path}", message)
        return names

    def exists(self, path: Any) -> bool:
        """Whether a script that asks for a folder gets one with stand-ins."""
        if not isinstance(path, (str, os.PathLike)) or not is_given(os.fspath(path)):
            return False
        name = os.fspath(path)
        return not os.path.splitext(name)[1] and bool(ending()) and lacks(name)

    def told(self, path: str, pattern: str) -> list[str]:
        """A folder of texts or tables, whose files are read by those who have stand-ins."""
        near_files.refuse_misspelled_folder(path)
        count = SHARD_COUNT if pattern == SHARDS else 1
        files = f"{count} files" if count > 1 else "one file"
        message = (
            f"`{path}` was not found: {files} `{pattern}` {'are' if count > 1 else 'is'} assumed"
        )
        self.source.note(f"folder {path}", f"{message} in it")
        return [re.sub(r"[*?\[\]]+", f"part-{one}", pattern) for one in range(count)]

    def absent(self, path: Any, ends: tuple[str, ...]) -> bool:
        """Whether a file that is to be read needs a stand-in."""
        if not isinstance(path, (str, os.PathLike)) or os.path.exists(path):
            return False
        name = os.fspath(path)
        if name not in self.known and not name.lower().endswith(ends):
            return False
        near_files.refuse_misspelled(name)
        return name in self.known or not expected()

    def picture(self, path: Any) -> Any:
        return self.source.picture("", "L" if is_gray(path) else "RGB").copy()

    def array(self, gray: bool) -> Any:
        side, numpy = self.source.side(), importlib.import_module("numpy")
        return numpy.zeros((side, side) if gray else (side, side, 3), dtype="uint8")


def asked_rate() -> int:
    """The rate that the code which reads a recording has at hand to compare with, if it has one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if lines.is_users(frame.f_code.co_filename):
            held = frame.f_locals
            for place in (held, getattr(held.get("self"), "__dict__", {})):
                found = next((place[one] for one in RATES if isinstance(place.get(one), int)), 0)
                if found:
                    return int(found)
        frame = frame.f_back
    return 0


def is_gray(path: Any) -> bool:
    """Whether it is the mask of another picture."""
    return bool(GRAY.search(os.fspath(path)))


def listing(folders: Folders) -> list[Patch]:
    """Python's own ways to list a folder."""
    true_names, true_glob, true_kind = os.listdir, glob.iglob, os.path.isfile

    def listdir(path: Any = ".") -> Any:
        found = folders.listed(path) if path_like(path) and by_user() else []
        return found or true_names(path)

    def named(pattern: Any, **given: Any) -> list[str]:
        """`folder/*/*.jpg` and `folder/**/*.jpg`, too."""
        folder, last = os.path.split(os.fsdecode(pattern))
        place = re.sub(r"[*?\[][^/]*", "000000", folder)
        first = re.split(r"[*?\[]", folder)[0]
        if given.get("root_dir") or not first or os.path.isdir(first):
            return []
        return [os.path.join(place, one) for one in folders.listed(place, last)]

    def matching(pathname: Any, **given: Any) -> list[Any]:
        user = by_user()
        return list(true_glob(pathname, **given)) or (named(pathname, **given) if user else [])

    def below(true: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(true)
        def method(self: Any, *args: Any, **given: Any) -> Any:
            user = by_user()
            if user and not os.path.isdir(self):
                names = folders.listed(self, os.path.basename(args[0]) if args else "")
                if names:
                    return iter([self / one for one in names])
            return true(self, *args, **given)

        return method

    def isfile(path: Any) -> bool:
        return true_kind(path) or (isinstance(path, str) and path in folders.known and by_user())

    def iglob(pathname: Any, **given: Any) -> Any:
        user = by_user()
        return iter([*true_glob(pathname, **given)] or (named(pathname, **given) if user else []))

    kind = pathlib.Path
    return [
        (os, "listdir", listdir),
        (os.path, "isfile", isfile),
        (glob, "glob", matching),
        (glob, "iglob", iglob),
        *((kind, name, below(getattr(kind, name))) for name in ("glob", "rglob", "iterdir")),
    ]


def walking(folders: Folders) -> list[Patch]:
    """Whether a folder is there, all that is below it, and one file of it."""
    true_walk = os.walk

    def walk(top: Any, *args: Any, **given: Any) -> Any:
        """As a folder of each class, whose number nobody knows."""
        user = by_user() and path_like(top) and not os.path.isdir(top)
        if not user or not (names := folders.listed(top, count=MANY)):
            return true_walk(top, *args, **given)
        halves = {os.path.join(top, str(one)): names[one :: len(KINDS)] for one in KINDS}
        folders.known.update(os.path.join(one, name) for one in halves for name in halves[one])
        found = [(top, [*map(str, KINDS)], []), *((one, [], halves[one]) for one in halves)]
        down = given.get("topdown", args[0] if args else True)
        return iter(found if down else found[::-1])

    def opened(true: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(true)
        def open(file: Any, mode: Any = "r", *args: Any, **given: Any) -> Any:
            """Of a picture that a folder has listed."""
            known = mode == "rb" and isinstance(file, str) and file in folders.known
            if not (known and by_user() and folders.absent(file, PICTURES)):
                return true(file, mode, *args, **given)
            held = io.BytesIO()
            folders.picture(file).save(held, "PNG")
            held.seek(0)
            return held

        return open

    def asking(true: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(true)
        def exists(path: Any, *args: Any, **given: Any) -> bool:
            user = by_user()
            return true(path, *args, **given) or (user and folders.exists(path))

        return exists

    kind = pathlib.Path
    return [
        (os, "walk", walk),
        *((one, "open", opened(one.open)) for one in (builtins, io)),
        *((os.path, name, asking(getattr(os.path, name))) for name in ("exists", "isdir")),
        *((kind, name, asking(getattr(kind, name))) for name in ("exists", "is_dir")),
    ]


def path_like(path: Any) -> bool:
    return isinstance(path, (str, os.PathLike))


def readers(folders: Folders) -> dict[str, Change]:
    """Functions that read one file."""

    def reading(names: str, ends: tuple[str, ...], made: Callable[..., Any]) -> Change:
        def wrapped(true: Any) -> Any:
            @functools.wraps(true)
            def read(*args: Any, **given: Any) -> Any:
                path = args[0] if args else next(iter(given.values()), None)
                if folders.absent(path, ends):
                    return made(path, *args[1:], **given)
                return true(*args, **given)

            return read

        return lambda module: [
            (module, name, wrapped(getattr(module, name)))
            for name in names.split()
            if hasattr(module, name)
        ]

    def opencv(path: Any, flags: int = 1, **_: Any) -> Any:
        return folders.array(flags == 0)

    def tensor(path: Any, *_: Any, **__: Any) -> Any:
        array = folders.array(is_gray(path))
        found = importlib.import_module("torch").from_numpy(array)
        return found[None] if array.ndim == 2 else found.permute(2, 0, 1).contiguous()

    def samples(*_: Any, **given: Any) -> Any:
        found = folders.source.recording()
        return found["array"], int(given.get("sr") or found["sampling_rate"])

    def waves(*_: Any, **__: Any) -> Any:
        array, rate = samples()
        return importlib.import_module("torch").from_numpy(array)[None], asked_rate() or rate

    def integers(*_: Any, **__: Any) -> Any:
        """As most files hold them, in 16 bits."""
        array, rate = samples()
        return asked_rate() or rate, array.astype("int16")

    def array(path: Any, *_: Any, **__: Any) -> Any:
        return folders.array(is_gray(path))

    return {
        "PIL.Image": reading("open", PICTURES, lambda path, *_, **__: folders.picture(path)),
        "cv2": reading("imread", PICTURES, opencv),
        "torchvision.io.image": reading("read_image decode_image", PICTURES, tensor),
        "skimage.io._io": reading("imread", PICTURES, array),
        "imageio.v2": reading("imread", PICTURES, array),
        "librosa.core.audio": reading("load", RECORDINGS, samples),
        "soundfile": reading("read", RECORDINGS, samples),
        "scipy.io.wavfile": reading("read", RECORDINGS, integers),
        "torchaudio": reading("load", RECORDINGS, waves),
    }


__all__ = ["PICTURES", "Folders", "listing", "readers", "walking"]
