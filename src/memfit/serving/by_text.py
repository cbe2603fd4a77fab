"""A config as a key of a cache: a process that is asked about a model again need not build it
again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class ByText:
    """Equal to another one of the same text."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config, self.text = config, json.dumps(config, default=repr)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByText) and other.text == self.text
