"""Where captured graphs are stored: a JSON file for each family and setting in a checkout, and in
the wheel a compressed file for each family (`hatch_build.py` packs it)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from memfit.errors import InputError

HERE = "libraries/transformers/graphs"


def stored_settings(name: str, known: tuple[str, ...]) -> frozenset[str]:
    """Of the known settings, those that a family was captured in."""
    packed = unpacked(name)
    return frozenset(one for one in known if one in packed or place_of(name, one).is_file())


def read_graphs(name: str, setting: str) -> Mapping[str, Any]:
    """The graphs of a family in a setting; those captured anew go before those of the wheel."""
    place = place_of(name, setting)
    text = place.read_text(encoding="utf-8") if place.is_file() else unpacked(name).get(setting)
    if text is None:
        raise FileNotFoundError(str(place))
    found: Mapping[str, Any] = json.loads(text)
    return found


def place_of(name: str, setting: str) -> Traversable:
    return files("memfit").joinpath(HERE, f"{name}.{setting}.json" if setting else f"{name}.json")


@cache
def unpacked(name: str) -> Mapping[str, str]:
    """The text of each setting in a wheel; nothing in a checkout."""
    place = files("memfit").joinpath(HERE, f"{name}.xz")
    if not place.is_file():
        return {}
    try:
        import lzma
    except ImportError:
        raise InputError.one(
            f"the graphs of `{name}` are compressed, and this Python has no `lzma` module",
            where="model",
            hint="install a Python that was built with liblzma (`xz-devel` or `liblzma-dev`)",
        ) from None
    first, *texts = lzma.decompress(place.read_bytes()).decode().split("\n")
    return dict(zip(json.loads(first), texts, strict=True))
