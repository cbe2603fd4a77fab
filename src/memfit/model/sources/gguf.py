"""GGUF: metadata and tensor list of a file, read from its start and never beyond; no tensor data is
touched.

The package `gguf` is not used: it maps the whole file and needs numpy. Layout: ggml/docs/gguf.md
and ggml/src/gguf.cpp; versions 2 and 3, both byte orders. Tests compare with files written by that
package, and with its own reader.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from memfit.errors import Problem, SourceError, raise_errors
from memfit.lazy_dataclass import dataclass
from memfit.model.sources.files import listed, looks_like, opened, shown
from memfit.model.sources.ggml import GGML_TYPES, REMOVED
from memfit.model.sources.inventory import TensorInfo
from memfit.units import MIB, round_up

MAGIC = b"GGUF"
HEADER_LIMIT = 64 * MIB  # the largest vocabularies with their merges take about 16
STEP = MIB
MOST_KEYS = 2**16
MOST_TENSORS = 2**18
MOST_PARTS = 1024
KEY_LIMIT = 2**16 - 1  # gguf.md: keys are at most 2^16 - 1 bytes
NAME_LIMIT = 255  # gguf.md says 64 bytes; some files have longer names of experts
KEPT_STRING = 2**12  # longer strings (chat templates, whole tokenizers) are skipped
KEPT_ARRAY = 2**12  # longer arrays (the vocabulary) are only counted
KEPT_VALUES = 2**18  # of all arrays together
MOST_DIMENSIONS = 4  # GGML_MAX_DIMS
LARGEST = 2**60
ALIGNMENT = 32  # GGUF_DEFAULT_ALIGNMENT
SHOWN = 20
_STRING, _ARRAY, _BOOL = 8, 9, 7
# gguf_type: struct code. Strings and arrays have none.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

Value = int | float | bool | str
Values = tuple[Value, ...]


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """What a GGUF file says about itself. Of arrays, `lengths` has every one; `metadata` only short
    ones of numbers."""

    where: str
    metadata: Mapping[str, Value | Values]
    lengths: Mapping[str, int]
    tensors: tuple[TensorInfo, ...]


class _Cursor:
    """A forward reader that grows its buffer step by step and says where the file ends too
    early."""

    def __init__(self, file: BinaryIO, size: int, where: str) -> None:
        self.file, self.size, self.where = file, size, where
        self.buffer, self.at, self.order = bytearray(), 0, "<"

    def fail(self, message: str, hint: str = "") -> SourceError:
        return SourceError.one(f"`{self.where}` {message}", where="model", hint=hint)

    def need(self, count: int, what: str) -> None:
        """Have `count` more bytes in the buffer."""
        end = self.at + count
        if end > self.size:
            raise self.fail(
                (
                    f"is truncated or has a wrong length: {what} ends at offset {end}, but "
                    f"the file ends at {self.size}"
                ),
                "download it again",
            )
        if end > HEADER_LIMIT:
            raise self.fail(f"has more metadata than the limit of {HEADER_LIMIT // MIB} MiB")
        while len(self.buffer) < end:
            more = self.file.read(max(STEP, end - len(self.buffer)))
            if not more:
                raise self.fail("shrank while it was read")
            self.buffer += more

    def take(self, code: str, what: str, count: int = 1) -> tuple[int | float, ...]:
        form = struct.Struct(f"{self.order}{count}{code}")
        self.need(form.size, what)
        values: tuple[int | float, ...] = form.unpack_from(self.buffer, self.at)
        self.at += form.size
        return values

    def whole(self, code: str, what: str) -> int:
        return int(self.take(code, what)[0])

    def text(self, limit: int, what: str) -> str:
        """A string of at most `limit` bytes."""
        length = self.whole("Q", f"the length of {what}")
        if length > limit:
            raise self.fail(
                f"declares {length} bytes for {what} at offset {self.at}, more than the "
                f"limit of {limit}"
            )
        self.need(length, what)
        try:
            text = bytes(self.buffer[self.at : self.at + length]).decode()
        except UnicodeDecodeError:
            raise self.fail(f"has {what} at offset {self.at} that is not UTF-8 text") from None
        self.at += length
        return text

    def short_text(self, limit: int, what: str) -> str | None:
        """A string, or None where it is longer than `limit` and so stepped over."""
        length = self.whole("Q", f"the length of {what}")
        self.at -= 8
        if length <= limit:
            return self.text(limit, what)
        self.skip_strings(1, what)
        return None

    def skip_strings(self, count: int, what: str) -> None:
        """Step over the strings of an array; a quick loop, for a vocabulary has hundreds of
        thousands."""
        unpack = struct.Struct(f"{self.order}Q").unpack_from
        at, end = self.at, len(self.buffer)
        for _ in range(count):
            if at + 8 > end:
                self.at = at
                self.need(8, what)
                end = len(self.buffer)
            at += 8 + unpack(self.buffer, at)[0]
            if at > end:
                self.at = at
                self.need(0, what)
                end = len(self.buffer)
        self.at = at


def read_file(path: Path) -> Gguf:
    """One file, or all parts of a split model when `path` is one of `…-00001-of-00003.gguf`."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return _read_one(path)
    parts = int(match[3])
    if not 1 <= int(match[2]) <= parts <= MOST_PARTS:
        raise SourceError.one(
            f"`{shown(path)}` has impossible part numbers in its name",
            where="model",
            hint=f"from 1 to {MOST_PARTS}",
        )
    paths = [
        path.with_name(f"{match[1]}-{part:05d}-of-{parts:05d}.gguf") for part in range(1, parts + 1)
    ]
    missing = [one.name for one in paths if not one.is_file()]
    if missing:
        raise SourceError.one(
            f"{len(missing)} of the {parts} parts of the model are missing: {listed(missing)}",
            where="model",
        )
    problems: list[Problem] = []
    read: list[Gguf] = []
    for one in paths:
        try:
            read.append(_read_one(one))
        except SourceError as error:
            problems.extend(error.problems)
    raise_errors(problems, SourceError)
    first = read[0]
    tensors = tuple(tensor for part in read for tensor in part.tensors)
    _no_twice([tensor.name for tensor in tensors], first.where)
    return Gguf(where=first.where, metadata=first.metadata, lengths=first.lengths, tensors=tensors)


def _no_twice(names: list[str], where: str) -> None:
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise SourceError.one(f"`{where}` has tensors twice: {listed(twice)}", where="model")


def _read_one(path: Path) -> Gguf:
    with opened(path) as (file, size):
        cursor = _Cursor(file, size, shown(path))
        tensor_count, key_count = _start(cursor)
        metadata, lengths = _metadata(cursor, key_count)
        tensors = _tensors(cursor, tensor_count, _alignment(cursor, metadata))
    return Gguf(where=cursor.where, metadata=metadata, lengths=lengths, tensors=tensors)


def _start(cursor: _Cursor) -> tuple[int, int]:
    """Magic, version and the two counts."""
    if cursor.size < 24:
        raise cursor.fail(
            "is empty" if not cursor.size else f"has {cursor.size} bytes, too few for a GGUF file"
        )
    cursor.need(24, "the start")
    if cursor.buffer[:4] != MAGIC:
        hint = looks_like(bytes(cursor.buffer[:64])) or (
            "it has a format older than GGUF (GGML, GGMF or GGJT): convert it again"
            if bytes(cursor.buffer[:4]) in (b"lmgg", b"fmgg", b"tjgg")
            else ""
        )
        raise cursor.fail("is not a GGUF file: it does not start with `GGUF`", hint)
    cursor.at = 4
    version = cursor.whole("I", "the version")
    if version & 0xFFFF == 0:  # the other byte order, as gguf_reader.py tells it
        cursor.order, cursor.at = ">", 4
        version = cursor.whole("I", "the version")
    if version not in (2, 3):
        raise cursor.fail(
            f"is GGUF version {version}; memfit reads versions 2 and 3",
            "convert it again" if version == 1 else "",
        )
    tensor_count, key_count = (
        cursor.whole("Q", "the number of tensors"),
        cursor.whole("Q", "the number of keys"),
    )
    if tensor_count > MOST_TENSORS or key_count > MOST_KEYS:
        raise cursor.fail(
            f"declares {tensor_count} tensors and {key_count} keys; the limits are "
            f"{MOST_TENSORS} and {MOST_KEYS}"
        )
    return tensor_count, key_count


def _metadata(cursor: _Cursor, count: int) -> tuple[dict[str, Value | Values], dict[str, int]]:
    metadata: dict[str, Value | Values] = {}
    lengths: dict[str, int] = {}
    seen: set[str] = set()
    room = KEPT_VALUES
    for _ in range(count):
        key = cursor.text(KEY_LIMIT, "a key")
        if key in seen:
            raise cursor.fail(f"has the key `{shown(key)}` twice")
        seen.add(key)
        kind = cursor.whole("I", f"the type of `{shown(key)}`")
        if kind == _ARRAY:
            lengths[key], values = _array(cursor, f"`{shown(key)}`", min(KEPT_ARRAY, room))
            if values is not None:
                metadata[key] = values
                room -= len(values)
        elif kind == _STRING:
            text = cursor.short_text(KEPT_STRING, f"`{shown(key)}`")
            if text is not None:
                metadata[key] = text
        else:
            metadata[key] = _scalars(cursor, kind, f"`{shown(key)}`", 1)[0]
    return metadata, lengths


def _scalars(cursor: _Cursor, kind: int, what: str, count: int) -> Values:
    code = _SCALARS.get(kind)
    if code is None:
        raise cursor.fail(f"has the unknown type {kind} for {what} at offset {cursor.at}")
    values = cursor.take(code, what, count)
    if kind != _BOOL:
        return values
    if any(value not in (0, 1) for value in values):
        raise cursor.fail(f"has a boolean for {what} that is not 0 or 1")
    return tuple(bool(value) for value in values)


def _array(cursor: _Cursor, what: str, most: int) -> tuple[int, Values | None]:
    """Length, and the values where they are numbers and at most so many. Arrays in arrays are
    refused, as ggml does."""
    kind, count = (
        cursor.whole("I", f"the type of {what}"),
        cursor.whole("Q", f"the length of {what}"),
    )
    if kind == _STRING:
        cursor.need(8 * count, what)  # each string takes that much at least
        cursor.skip_strings(count, what)
        return count, None
    if kind == _ARRAY:
        raise cursor.fail(f"has an array of arrays for {what}, which GGUF does not support")
    if kind in _SCALARS and count > most:
        size = struct.calcsize(_SCALARS[kind]) * count
        cursor.need(size, what)
        cursor.at += size
        return count, None
    return count, _scalars(cursor, kind, what, count)


def _alignment(cursor: _Cursor, metadata: Mapping[str, Value | Values]) -> int:
    value = metadata.get("general.alignment", ALIGNMENT)
    if type(value) is not int or not 1 <= value <= 2**20 or value & (value - 1):
        raise cursor.fail(f"has `general.alignment` {str(value)[:40]}, which is not a power of two")
    return value


def _tensors(cursor: _Cursor, count: int, alignment: int) -> tuple[TensorInfo, ...]:
    problems: list[Problem] = []
    placed: list[tuple[int, TensorInfo]] = []
    for _ in range(count):
        name = cursor.text(NAME_LIMIT, "a tensor's name")
        rank = cursor.whole("I", f"the rank of `{shown(name)}`")
        if rank > MOST_DIMENSIONS:
            raise cursor.fail(
                f"has tensor `{shown(name)}` with {rank} dimensions; the limit is {MOST_DIMENSIONS}"
            )
        sizes = [int(size) for size in cursor.take("Q", f"the shape of `{shown(name)}`", rank)]
        kind, offset = (
            cursor.whole("I", f"the type of `{shown(name)}`"),
            cursor.whole("Q", f"the offset of `{shown(name)}`"),
        )
        try:
            placed.append((offset, _tensor(name, sizes, kind, offset, alignment)))
        except ValueError as error:
            problems.append(Problem(message=f"tensor `{shown(name)}` {error}", where=cursor.where))
    if not problems:
        problems = _layout(placed, cursor, round_up(cursor.at, alignment))
    if len(problems) > SHOWN:
        problems = [
            *problems[:SHOWN],
            Problem(
                message=f"and {len(problems) - SHOWN} more problems like this", where=cursor.where
            ),
        ]
    raise_errors(problems, SourceError)
    _no_twice([tensor.name for _, tensor in placed], cursor.where)
    return tuple(tensor for _, tensor in placed)


def _tensor(name: str, sizes: list[int], kind: int, offset: int, alignment: int) -> TensorInfo:
    """One tensor checked by itself. A ValueError says what is wrong with it."""
    row = GGML_TYPES.get(kind)
    if row is None:
        old = (
            f" (`{REMOVED[kind]}`, which llama.cpp has removed: quantize it again)"
            if kind in REMOVED
            else ""
        )
        raise ValueError(f"has the unknown type {kind}{old}")
    count = math.prod(sizes)
    if not all(sizes) or count > LARGEST:
        raise ValueError(f"has the impossible shape {str(sizes)[:80]}")
    if (sizes[0] if sizes else 1) % row.block:
        raise ValueError(
            f"has rows of {sizes[0] if sizes else 1} values, not a multiple of the "
            f"block size {row.block} ({row.name})"
        )
    if offset % alignment:
        raise ValueError(f"is at offset {offset}, not a multiple of the alignment {alignment}")
    return TensorInfo(
        name=name, shape=tuple(reversed(sizes)), format=row.name, bytes=row.bytes(count)
    )


def _layout(placed: list[tuple[int, TensorInfo]], cursor: _Cursor, start: int) -> list[Problem]:
    """Data must not overlap nor reach beyond the file."""
    problems: list[Problem] = []
    end = 0
    for offset, tensor in sorted(placed, key=lambda item: item[0]):
        if offset < end:
            problems.append(
                Problem(
                    message=(
                        f"tensor `{shown(tensor.name)}` overlaps the previous one by "
                        f"{end - offset} bytes"
                    ),
                    where=cursor.where,
                )
            )
        end = max(end, offset + tensor.bytes)
    if start + end > cursor.size:
        problems.append(
            Problem(
                message=(
                    f"the file is truncated: its tensors need {start + end} bytes, but it has "
                    f"{cursor.size}"
                ),
                where=cursor.where,
                hint="download it again",
            )
        )
    return problems
