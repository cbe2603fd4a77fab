"""Reading a config.json with care: types, ranges and relations, every problem reported at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.errors import InputError, Problem

LARGEST_WIDTH = 2**24
LARGEST_LAYERS = 4096
_MISSING = object()


class Fields:
    """A config with its problems. Readers return a harmless stand-in where a value is bad; `done` raises them all."""

    def __init__(self, config: Mapping[str, Any], where: str = "config") -> None:
        self.config, self.where = config, where
        self.problems: list[Problem] = []

    def blame(self, key: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(message=message, where=f"{self.where}.{key}", hint=hint))

    def value(self, *keys: str, default: Any = _MISSING) -> Any:
        """The first of `keys` that is there and not null."""
        for key in keys:
            if self.config.get(key) is not None:
                return self.config[key]
        if default is _MISSING:
            self.blame(keys[0], f"`{keys[0]}` is missing")
        return default

    def key(self, keys: tuple[str, ...]) -> str:
        return next((key for key in keys if self.config.get(key) is not None), keys[0])

    def count(self, *keys: str, default: Any = _MISSING, low: int = 1, high: int = LARGEST_WIDTH) -> int:
        """A whole number in range."""
        value = self.value(*keys, default=default)
        if value is _MISSING:
            return low or 1
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self.blame(self.key(keys), f"`{str(value)[:60]}` is no whole number")
            return low or 1
        if not low <= value <= high:
            self.blame(self.key(keys), f"`{str(value)[:60]}` is out of range", f"from {low} to {high}")
            return low or 1
        return value

    def layers(self, *keys: str) -> int:
        return self.count(*(keys or ("num_hidden_layers",)), high=LARGEST_LAYERS)

    def number(self, *keys: str, default: float) -> float:
        value = self.value(*keys, default=default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            self.blame(self.key(keys), f"`{str(value)[:60]}` is no number")
            return default
        return float(value)

    def flag(self, *keys: str, default: bool) -> bool:
        value = self.value(*keys, default=default)
        if not isinstance(value, bool):
            self.blame(self.key(keys), f"`{str(value)[:60]}` is neither true nor false")
            return default
        return value

    def text(self, *keys: str, default: str) -> str:
        value = self.value(*keys, default=default)
        if not isinstance(value, str):
            self.blame(self.key(keys), f"`{str(value)[:60]}` is no text")
            return default
        return value

    def listing(self, key: str, length: int, default: list[Any] | None = None) -> list[Any]:
        """A list with one entry a layer, or `default`."""
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, list) or len(value) < length:
            self.blame(key, f"`{key}` needs {length} entries, one a layer")
            return default if default is not None else [None] * length
        return value[:length]

    def divides(self, small: int, large: int, key: str, what: str) -> None:
        if large % small:
            self.blame(key, f"{small} does not divide {what} {large}")

    def dtype(self) -> str:
        """The dtype of the stored weights; float32 where the config does not say, as transformers takes it."""
        value = self.text("dtype", "torch_dtype", default="float32").removeprefix("torch.")
        known = {"float32", "bfloat16", "float16", "float64", "float8_e4m3fn"}
        if value not in known:
            self.blame(self.key(("dtype", "torch_dtype")), f"unknown dtype `{value[:40]}`", "known: " + ", ".join(sorted(known)))
            return "bfloat16"
        return value

    def done(self) -> None:
        if self.problems:
            raise InputError(*self.problems)
