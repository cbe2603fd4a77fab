"""YAML as its version 1.2 reads plain words (yaml.org/spec/1.2.2, core schema, 10.3.2). PyYAML
reads 1.1, where `34:08` is a number of base 60, `02000` one of base 8, and `no` is false.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

TAG = "tag:yaml.org,2002:"
# Tag, pattern, and the characters that a word of it may begin with.
PLAIN = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
)


@cache
def loader() -> Any:
    """PyYAML's safe loader, with the words of YAML 1.2."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[Any, Any] = {}

    for name, pattern, first in PLAIN:
        Loader.add_implicit_resolver(TAG + name, re.compile(f"^(?:{pattern})$"), list(first))
    Loader.add_constructor(f"{TAG}int", integer)
    Loader.add_constructor(f"{TAG}float", fraction)
    return Loader


def integer(reader: Any, node: Any) -> int:
    text = str(reader.construct_scalar(node))
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text[2:] if base != 10 else text, base)


def fraction(reader: Any, node: Any) -> float:
    text = str(reader.construct_scalar(node)).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


__all__ = ["loader"]
