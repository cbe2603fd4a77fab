"""Local files of data that are not there and that a script opens itself: random words for texts,
records for JSON, and numbers of frequent tokens for arrays."""

from __future__ import annotations

import functools
import os
import random
import re
import tempfile
from pathlib import Path
from typing import Any

from memfit.trace import near_files
from memfit.trace.imports import Patch
from memfit.trace.missing_pictures import OWN
from memfit.trace.missing_weights import expected
from memfit.trace.refuse import Watcher
from memfit.trace.savers import starter_is_user
from memfit.trace.synthetic_downloads import JSON, TEXTS, content

ARRAYS = (".bin", ".dat", ".memmap")
TOKENS, KNOWN = 1 << 20, 64  # of an array, and different ones: less than any vocabulary
# Files that are no data: a made-up one would be a guess.
OTHER = re.compile(
    r"conf|setting|param|args|vocab|merge|token(?!s\b|ized)|special|class|label|index|readme|requi|"
    r"secret|passw|version|state|result|metric|prompt|template|schema|stat(?:s|istics)\b|^ds_|zero|"
    r"deepspeed|ann?ot|split|list|licen|key|map|stopword|char",
    re.IGNORECASE,
)
INSTALLED = (".dist-info", ".egg-info")  # folders in which a package says what it holds


def stands_for_data(path: str, ends: tuple[str, ...]) -> bool:
    """Whether a file that is not there is one of data by its name."""
    folder, name = os.path.split(path)
    stem, end = os.path.splitext(name)
    if folder.endswith(INSTALLED):
        return False
    own = OWN.search(folder) or OWN.search(stem)
    return end.lower() in ends and not own and OTHER.search(stem) is None


class Files:
    """Makes each stand-in once, in a temporary folder."""

    def __init__(self, recorder: Watcher) -> None:
        self.recorder, self.made = recorder, dict[str, str]()

    def absent(self, path: Any, ends: tuple[str, ...]) -> str:
        """The path of a file that needs a stand-in, or nothing."""
        if not isinstance(path, (str, os.PathLike)) or os.path.exists(path):
            return ""
        name = os.fsdecode(path)
        if not stands_for_data(name, ends) or expected():
            return ""
        near_files.refuse_misspelled(name)
        return name

    def place(self, name: str, kind: str, held: Any) -> str:
        if name not in self.made:
            path = Path(tempfile.mkdtemp(), os.path.basename(name))
            path.write_bytes(held())
            self.made[name] = str(path)
            self.recorder.note(f"file {name}", f"`{name}` was not found: {kind} take its place")
        return self.made[name]

    def text(self, name: str) -> str:
        kind = "records with the fields that the script asks for"
        kind = kind if name.lower().endswith(JSON) else "random words"
        return self.place(name, kind, functools.partial(content, name))

    def array(self, name: str, numpy: Any, dtype: Any) -> str:
        held = random.Random(0).choices(range(KNOWN), k=TOKENS)
        made = functools.partial(lambda: numpy.asarray(held, dtype=dtype).tobytes())
        kind = f"{TOKENS:,} random tokens below {KNOWN}"
        return self.place(name, kind, made)


def opening(true: Any, files: Files) -> Any:
    @functools.wraps(true)
    def open(file: Any, mode: Any = "r", *args: Any, **given: Any) -> Any:
        reads = isinstance(mode, str) and not set(mode) & set("wxa+")
        if reads and (name := files.absent(file, (*TEXTS, *JSON))) and starter_is_user():
            file = files.text(name)
        return true(file, mode, *args, **given)

    return open


def arrays(numpy: Any, files: Files) -> list[Patch]:
    """For numpy: a mapped file of tokens, and one that is read whole."""
    true, whole = numpy.memmap, numpy.fromfile

    class Mapped(type):
        """`isinstance(one, numpy.memmap)` stays true for the real ones."""

        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, true)

    class memmap(true, metaclass=Mapped):  # type: ignore[misc, valid-type]
        def __new__(cls, filename: Any, dtype: Any = numpy.uint8, *args: Any, **given: Any) -> Any:
            mode = given.get("mode", args[0] if args else "r+")
            name = files.absent(filename, ARRAYS) if mode in ("r", "c", "r+") else ""
            if name and starter_is_user():
                filename, given = files.array(name, numpy, dtype), {**given, "shape": None}
                args = args[:2]
            return true(filename, dtype, *args, **given)

    def fromfile(file: Any, dtype: Any = float, *args: Any, **given: Any) -> Any:
        name = files.absent(file, ARRAYS)
        if name and starter_is_user():
            file = files.array(name, numpy, dtype)
        return whole(file, dtype, *args, **given)

    return [(numpy, "memmap", memmap), (numpy, "fromfile", fromfile)]


def patches(recorder: Watcher) -> list[Patch]:
    import builtins
    import importlib.util
    import io

    files = Files(recorder)
    found: list[Patch] = [
        (builtins, "open", opening(builtins.open, files)),
        (io, "open", opening(io.open, files)),
    ]
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        found += arrays(numpy, files)
    return found


__all__ = ["Files", "patches", "stands_for_data"]
