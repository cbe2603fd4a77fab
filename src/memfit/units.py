"""Bytes and seconds: parsing what people write. Bytes are `int`; rendering is the business of
`report`."""

from __future__ import annotations

import re

from memfit.errors import InputError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_SUFFIXES = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "kib": KIB,
    "m": 10**6,
    "mb": 10**6,
    "mib": MIB,
    "g": 10**9,
    "gb": 10**9,
    "gib": GIB,
    "t": 10**12,
    "tb": 10**12,
    "tib": TIB,
}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")
LARGEST = 2**60  # an exbibyte: beyond it, a figure is a slip of the pen
LEAST_BARE = MIB  # a smaller number without a unit is GiB


def parse_bytes(text: str | int, *, where: str = "") -> int:
    """`24GiB`, `80 GB`, `512MiB`; a bare number below 2^20 is GiB, a larger one is bytes."""
    match = None
    if isinstance(text, int) and not isinstance(text, bool):
        amount, scale = float(text), 1
    else:
        match = _QUANTITY.fullmatch(text) if isinstance(text, str) and len(text) < 64 else None
        scale = _SUFFIXES.get(match[2].lower(), 0) if match else 0
        if match is None or not scale:
            raise InputError.one(
                f"`{str(text)[:40]}` is not an amount of memory",
                where=where,
                hint="write it like `24GiB` or `80GB`",
            )
        amount = float(match[1])
        if not match[2] and 0 < amount < LEAST_BARE:
            scale = GIB
    size = int(amount * scale)
    if not 0 < size <= LARGEST:
        raise InputError.one(
            f"`{str(text)[:40]}` is out of range",
            where=where,
            hint="more than 0 and at most 1024 PiB",
        )
    return size


_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def parse_count(text: str) -> float:
    """`10M`, `1.5B` or whatever Python takes as a number; a ValueError for others."""
    match = _QUANTITY.fullmatch(text) if len(text) < 64 else None
    scale = _COUNTS.get(match[2].lower()) if match else None
    return float(text) if match is None or scale is None else float(match[1]) * scale


_SECONDS = {"": 1, "ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600}


def parse_seconds(text: str, where: str = "") -> float:
    """`25m`, `540s`, `1.5h` or a bare number of seconds."""
    match = _QUANTITY.fullmatch(text) if len(text) < 64 else None
    scale = _SECONDS.get(match[2].lower(), 0) if match else 0
    if match is None or not scale:
        raise InputError.one(
            f"`{text[:40]}` is not a duration",
            where=where,
            hint="write it like `25m`, `540s` or `40ms`",
        )
    return float(match[1]) * scale


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
