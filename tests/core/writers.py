"""Writers of safetensors and GGUF headers that can lie: lengths, counts and offsets are what a test
says."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

# ---------------------------------------------------------------- safetensors


def packed(header: Any, data: int | None = None) -> bytes:
    """A file with this header (an object, or raw bytes) and so many bytes of data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if data is None:
        data = max(
            (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"),
            default=0,
        )
    return len(text).to_bytes(8, "little") + text + bytes(data)


def sharded(folder: Path, *, skip: tuple[str, ...] = (), shards: int = 3) -> Path:
    """An index over some shards of one tensor each, the skipped ones not written."""
    placed = {f"layer.{index}": f"model-{index:05d}.safetensors" for index in range(shards)}
    for name, file in placed.items():
        if file not in skip:
            (folder / file).write_bytes(
                packed({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})
            )
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 8 * shards}, "weight_map": placed}))
    return path


# ---------------------------------------------------------------- GGUF

CODES = {
    "u8": 0,
    "i8": 1,
    "u16": 2,
    "i16": 3,
    "u32": 4,
    "i32": 5,
    "f32": 6,
    "bool": 7,
    "str": 8,
    "array": 9,
    "u64": 10,
    "i64": 11,
    "f64": 12,
}
FORMS = {
    "u8": "B",
    "i8": "b",
    "u16": "H",
    "i16": "h",
    "u32": "I",
    "i32": "i",
    "f32": "f",
    "bool": "B",
    "u64": "Q",
    "i64": "q",
    "f64": "d",
}


def text(value: bytes | str) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def pair(key: str, kind: str, value: Any) -> bytes:
    return (
        text(key)
        + struct.pack("<I", CODES[kind])
        + (text(value) if kind == "str" else struct.pack("<" + FORMS[kind], value))
    )


def array(key: str, kind: str, values: list[Any], length: int | None = None) -> bytes:
    body = b"".join(
        text(value) if kind == "str" else struct.pack("<" + FORMS[kind], value) for value in values
    )
    return (
        text(key)
        + struct.pack(
            "<IIQ", CODES["array"], CODES[kind], len(values) if length is None else length
        )
        + body
    )


def tensor(name: str, sizes: list[int], kind: int, offset: int, rank: int | None = None) -> bytes:
    rank = len(sizes) if rank is None else rank
    return (
        text(name)
        + struct.pack("<I", rank)
        + struct.pack(f"<{len(sizes)}Q", *sizes)
        + struct.pack("<IQ", kind, offset)
    )


def whole(
    pairs: list[bytes],
    tensors: list[bytes],
    data: int,
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    count, keys = counts or (len(tensors), len(pairs))
    start = (
        b"GGUF" + struct.pack("<IQQ", version, count, keys) + b"".join(pairs) + b"".join(tensors)
    )
    return start + bytes(-len(start) % 32) + bytes(data)
