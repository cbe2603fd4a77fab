"""safetensors: every tensor's name, shape, dtype and bytes from the header alone; 8 + N bytes are
read, never a weight.

The package `safetensors` is not used: it wants the whole file, and a framework to put it in. The
rules are those of its `safetensors/src/tensor.rs` (0.8): an 8-byte little-endian length, a JSON
object of at most 100 MB, data without hole or overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memfit.errors import Problem, SourceError, raise_errors
from memfit.lazy_dataclass import dataclass
from memfit.model.sources.files import listed, looks_like, opened, parse_object, read_bytes, shown
from memfit.model.sources.inventory import TensorInfo

PREFIX = 8
HEADER_LIMIT = 100_000_000  # MAX_HEADER_SIZE, safetensors/src/tensor.rs
INDEX_LIMIT = HEADER_LIMIT
MOST_TENSORS = (
    2**18
)  # a header's JSON takes ten times its size once parsed; the largest real files hold about 90,000
MOST_SHARDS = 2048
MOST_OF_MODEL = 2**20
LARGEST_COUNT = 2**62
SHOWN = 20  # problems of one file
# dtype in the file: bits, and the name of the row in memfit.formats where there is one (safetensors
# 0.8, `enum Dtype`).
DTYPES: Mapping[str, tuple[int, str]] = {
    "BOOL": (8, "bool"),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "U16": (16, "uint16"),
    "I16": (16, "int16"),
    "U32": (32, "uint32"),
    "I32": (32, "int32"),
    "U64": (64, "uint64"),
    "I64": (64, "int64"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "F32": (32, "float32"),
    "F64": (64, "float64"),
    "C64": (64, "C64"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "F8_E4M3FNUZ"),
    "F8_E5M2FNUZ": (8, "F8_E5M2FNUZ"),
    "F4": (4, "F4"),
    "F6_E2M3": (6, "F6_E2M3"),
    "F6_E3M2": (6, "F6_E3M2"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """An index: which files hold the tensors, and which tensor is said to lie where."""

    files: tuple[str, ...]
    placed: Mapping[str, str]


def read_file(path: Path) -> tuple[TensorInfo, ...]:
    """The tensors of one local file."""
    where = shown(path)
    with opened(path) as (file, size):
        start = file.read(64)
        length = header_length(start, where=where, file_bytes=size)
        header = start[PREFIX : PREFIX + length] + file.read(max(0, PREFIX + length - len(start)))
    if len(header) < length:
        raise SourceError.one(f"`{where}` is truncated inside its header", where="model")
    return parse_header(header, where=where, data_bytes=size - PREFIX - length)


def header_length(prefix: bytes, *, where: str, file_bytes: int | None) -> int:
    """The length that the first 8 bytes announce, if the file can hold it; more bytes help only to
    say what the file is instead."""
    if len(prefix) < PREFIX:
        raise SourceError.one(
            f"`{where}` has {len(prefix)} bytes, too few for a safetensors file"
            if prefix
            else f"`{where}` is empty",
            where="model",
        )
    length = int.from_bytes(prefix[:PREFIX], "little")
    if (
        length < 2
        or length > HEADER_LIMIT
        or (file_bytes is not None and PREFIX + length > file_bytes)
    ):
        reason = (
            "fewer than the minimum of 2"
            if length < 2
            else f"more than the format's limit of {HEADER_LIMIT}"
        )
        if 2 <= length <= HEADER_LIMIT:
            reason = f"more than the file has ({file_bytes})"
        raise SourceError.one(
            f"`{where}` declares a header of {length} bytes, {reason}",
            where="model",
            hint=looks_like(prefix[:64])
            or "it is not a safetensors file, or the download was incomplete",
        )
    return length


def parse_header(header: bytes, *, where: str, data_bytes: int | None) -> tuple[TensorInfo, ...]:
    """The tensors in the order of their data; every flaw at once (the first twenty)."""
    if not header.startswith(b"{"):
        raise SourceError.one(
            f"the header of `{where}` does not start with a brace",
            where="model",
            hint=looks_like(header),
        )
    # Counted before parsing, so that a header made of brackets cannot fill the memory.
    if (
        header.count(b"{") > MOST_TENSORS + 2
        or header.count(b"[") > 2 * MOST_TENSORS
        or header.count(b",") > 12 * MOST_TENSORS
    ):
        raise SourceError.one(
            f"the header of `{where}` describes more than {MOST_TENSORS} tensors", where="model"
        )
    entries = parse_object(header, where=f"{where} (header)", search=False)
    problems: list[Problem] = []
    placed: list[tuple[int, int, TensorInfo]] = []
    for name, entry in entries.items():
        if name == "__metadata__":
            if entry is not None and not (
                isinstance(entry, dict) and all(isinstance(value, str) for value in entry.values())
            ):
                problems.append(
                    Problem(message="`__metadata__` must be an object of strings", where=where)
                )
            continue
        try:
            placed.append(_entry(name, entry))
        except ValueError as error:
            problems.append(Problem(message=f"tensor `{shown(name)}` {error}", where=where))
    placed.sort(key=lambda item: (item[0], item[1]))
    if not problems:
        problems = _layout(placed, where, data_bytes)
    raise_errors(_some(problems, where), SourceError)
    return tuple(tensor for _, _, tensor in placed)


def _some(problems: list[Problem], where: str) -> list[Problem]:
    more = len(problems) - SHOWN
    return (
        problems
        if more <= 0
        else [
            *problems[:SHOWN],
            Problem(message=f"and {more} more problems like this", where=where),
        ]
    )


def _entry(name: str, entry: Any) -> tuple[int, int, TensorInfo]:
    """One header entry, checked by itself. A ValueError says what is wrong with it."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("needs exactly `dtype`, `shape` and `data_offsets`")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"has the unknown dtype `{shown(str(dtype))[:40]}`")
    if not _wholes(shape) or len(shape) > 32:
        raise ValueError("has a shape that is not a list of sizes")
    if not _wholes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError("has `data_offsets` that are not an increasing pair")
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ValueError("has an invalid character in its name")
    bits, form = DTYPES[dtype]
    count = math.prod(shape)
    if count > LARGEST_COUNT or count * bits != 8 * (offsets[1] - offsets[0]):
        raise ValueError(
            f"has {offsets[1] - offsets[0]} bytes of data, but shape {str(shape)[:80]} "
            f"of {dtype} needs {_bytes(count, bits)}"
        )
    return (
        offsets[0],
        offsets[1],
        TensorInfo(name=name, shape=tuple(shape), format=form, bytes=offsets[1] - offsets[0]),
    )


def _bytes(count: int, bits: int) -> str:
    if count > LARGEST_COUNT:
        return "more than 2^62"
    return str(count * bits // 8) + ("" if count * bits % 8 == 0 else " and a fraction")


def _wholes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(one) is int and 0 <= one <= LARGEST_COUNT for one in value
    )


def _layout(
    placed: list[tuple[int, int, TensorInfo]], where: str, data_bytes: int | None
) -> list[Problem]:
    """Tensors must follow one another without hole or overlap, to the end of the file."""
    problems: list[Problem] = []
    end = 0
    for begin, after, tensor in placed:
        if begin != end:
            what = (
                f"overlaps the previous one by {end - begin}"
                if begin < end
                else f"leaves a gap of {begin - end}"
            )
            problems.append(
                Problem(message=f"tensor `{shown(tensor.name)}` {what} bytes", where=where)
            )
        end = max(end, after)
    if data_bytes is not None and end != data_bytes:
        what = "truncated" if end > data_bytes else "longer than its header says"
        problems.append(
            Problem(
                message=(
                    f"the file is {what}: its tensors take {end} bytes, and {data_bytes} "
                    "follow the header"
                ),
                where=where,
                hint="download it again" if end > data_bytes else "",
            )
        )
    return problems


def read_index(path: Path) -> tuple[TensorInfo, ...]:
    """The tensors of a sharded model by its local `model.safetensors.index.json`."""
    shards = parse_index(read_bytes(path, INDEX_LIMIT), where=shown(path))
    missing = [name for name in shards.files if not (path.parent / name).is_file()]
    if missing:
        raise SourceError.one(
            (
                f"{len(missing)} of the {len(shards.files)} files that `{shown(path)}` names "
                f"are missing: {listed(missing)}"
            ),
            where="model",
            hint=(
                "download them, or give only the config.json for an estimate without exact tensors"
            ),
        )
    return joined(shards, lambda name: read_file(path.parent / name), where=shown(path))


def parse_index(data: bytes, *, where: str) -> Shards:
    """An index, checked: file names are plain, so that nothing outside its folder is opened."""
    if data.count(b":") > 8 * MOST_TENSORS:
        raise SourceError.one(
            f"`{where}` names more than {8 * MOST_TENSORS} tensors", where="model"
        )
    index = parse_object(data, where=where)
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise SourceError.one(
            f"`{where}` has no `weight_map`, so it is not an index of a sharded model",
            where="model",
        )
    odd = sorted(
        {str(name) for name in placed.values() if not (isinstance(name, str) and _plain(name))}
    )
    if odd:
        raise SourceError.one(
            f"`{where}` lists files that are not `*.safetensors`: {listed(odd)}",
            where="model",
            hint="they must be next to the index",
        )
    files = tuple(dict.fromkeys(placed.values()))
    if len(files) > MOST_SHARDS:
        raise SourceError.one(
            f"`{where}` names {len(files)} files, more than {MOST_SHARDS}", where="model"
        )
    return Shards(files=files, placed=placed)


def _plain(name: str) -> bool:
    return (
        name.endswith(".safetensors")
        and len(name) <= 255
        and name.isprintable()
        and not set(name) & set('/\\:*?"<>|')
    )


def joined(
    shards: Shards, read: Callable[[str], tuple[TensorInfo, ...]], *, where: str
) -> tuple[TensorInfo, ...]:
    """All shards' tensors, each once, and each that the index names where it says; the flaws of all
    shards at once."""
    problems: list[Problem] = []
    found: dict[str, tuple[str, TensorInfo]] = {}
    for name in shards.files:
        try:
            tensors = read(name)
        except SourceError as error:
            problems.extend(error.problems)
            continue
        if len(found) + len(tensors) > MOST_OF_MODEL:
            raise SourceError.one(
                f"the files of `{where}` have more than {MOST_OF_MODEL} tensors", where="model"
            )
        for tensor in tensors:
            if tensor.name in found:
                problems.append(
                    Problem(
                        message=(
                            f"tensor `{shown(tensor.name)}` is in both "
                            f"`{found[tensor.name][0]}` and `{name}`"
                        ),
                        where=where,
                    )
                )
            found[tensor.name] = name, tensor
    if not problems:
        absent = [name for name, file in shards.placed.items() if found.get(name, ("",))[0] != file]
        if absent:
            problems.append(
                Problem(
                    message=f"the files do not match the index: {listed(absent)}",
                    where=where,
                )
            )
    raise_errors(_some(problems, where), SourceError)
    return tuple(tensor for _, tensor in found.values())
