"""Reading a config.json with care: types, ranges and relations, every problem reported at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from memfit.errors import InputError, Problem
from memfit.registry import nearest

LARGEST_WIDTH = 2**24
LARGEST_LAYERS = 4096
LARGEST_HEADS = 4096
LARGEST_NUMBER = 1e30  # an integer beyond 1e308 would not even become a float
# Keys whose absence decides much: the cache's size, and the size of the embedding's twin.
DECISIVE = ("num_key_value_heads", "tie_word_embeddings")
_MISSING = object()
# What `hidden_act` may name: ACT2FN of transformers 5.23 (activations.py) less `prelu` and `xielu`,
# which have weights of their own
ACTIVATIONS = {
    "gelu",
    "gelu_10",
    "gelu_accurate",
    "gelu_fast",
    "gelu_new",
    "gelu_python",
    "gelu_python_tanh",
    "gelu_pytorch_tanh",
    "hardswish",
    "laplace",
    "leaky_relu",
    "linear",
    "mish",
    "quick_gelu",
    "relu",
    "relu2",
    "relu6",
    "sigmoid",
    "silu",
    "sqrtsoftplus",
    "swish",
    "tanh",
}


def shown(value: Any) -> str:
    """A value as a message may quote it; Python refuses to print integers of more than 4300
    digits."""
    try:
        return str(value)[:60]
    except (ValueError, RecursionError):
        return f"a huge {type(value).__name__}"


class StandIn(int):
    """Takes the place of a bad number, and so do results of arithmetic with it: nothing is said of
    how they go with others. At least 2, so that `max(1, …)` keeps it."""

    def __add__(self, other: int) -> Any:
        return with_number(other, lambda: int(self) + other)

    def __sub__(self, other: int) -> Any:
        return with_number(other, lambda: int(self) - other)

    def __rsub__(self, other: int) -> Any:
        return with_number(other, lambda: other - int(self))

    def __mul__(self, other: int) -> Any:
        return with_number(other, lambda: int(self) * other)

    def __floordiv__(self, other: int) -> Any:
        return with_number(other, lambda: max(2, int(self) // other))

    def __rfloordiv__(self, other: int) -> Any:
        return with_number(other, lambda: max(2, other // int(self)))

    __radd__, __rmul__ = __add__, __mul__


def with_number(other: Any, result: Callable[[], int]) -> Any:
    """Of integers alone; a list may be repeated, and a fraction stays one."""
    return StandIn(result()) if isinstance(other, int) else NotImplemented


class Fields:
    """A config with its problems. Readers return a harmless stand-in where a value is bad; `done`
    raises them all."""

    def __init__(self, config: Mapping[str, Any], where: str = "config") -> None:
        self.config, self.where = config, where
        self.problems: list[Problem] = []
        self.taken: dict[str, Any] = {}  # for keys that decide much, where the config has none

    def assume(self, **defaults: Any) -> None:
        """What transformers' config class says of keys that are absent; a key that is there and
        null stays null."""
        self.taken |= {
            key: value
            for key, value in defaults.items()
            if key in DECISIVE and key not in self.config
        }
        self.config = {**defaults, **self.config}

    def complete(self, **defaults: Any) -> None:
        """The same of keys that all count, whose values the answer names."""
        self.taken |= {key: value for key, value in defaults.items() if key not in self.config}
        self.assume(**defaults)

    def blame(self, key: str, message: str, hint: str = "", of: tuple[int, ...] = ()) -> None:
        """`of`: the numbers that do not go together; nobody chose a stand-in."""
        if any(isinstance(one, StandIn) for one in of):
            return
        problem = Problem(message=message, where=f"{self.where}.{key}", hint=hint)
        if problem not in self.problems:  # several layers may read the same field
            self.problems.append(problem)

    def doubts(self, *keys: str) -> bool:
        """Whether one of these keys was found wrong."""
        return any(
            problem.where == f"{self.where}.{key}" for problem in self.problems for key in keys
        )

    def value(self, *keys: str, default: Any = _MISSING) -> Any:
        """The first of `keys` that is there and not null."""
        for key in keys:
            if self.config.get(key) is not None:
                return self.config[key]
        if default is _MISSING:
            self.blame(keys[0], f"`{keys[0]}` is missing")
        elif keys[0] in DECISIVE:
            self.taken[keys[0]] = default
        return default

    def key(self, keys: tuple[str, ...]) -> str:
        return next((key for key in keys if self.config.get(key) is not None), keys[0])

    def count(
        self, *keys: str, default: Any = _MISSING, low: int = 1, high: int = LARGEST_WIDTH
    ) -> int:
        """A whole number in range."""
        value = self.value(*keys, default=default)
        if value is _MISSING:
            return StandIn(max(low, 2))
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self.blame(self.key(keys), f"`{shown(value)}` must be an integer")
            return StandIn(max(low, 2))
        if isinstance(high, StandIn):
            return value
        if not low <= value <= high:
            self.blame(
                self.key(keys), f"`{shown(value)}` is out of range", f"must be from {low} to {high}"
            )
            return StandIn(max(low, 2))
        return value

    def layers(self, *keys: str) -> int:
        return self.count(*(keys or ("num_hidden_layers",)), high=LARGEST_LAYERS)

    def number(self, *keys: str, default: float) -> float:
        value = self.value(*keys, default=default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            self.blame(self.key(keys), f"`{shown(value)}` must be a number")
            return default
        if abs(value) > LARGEST_NUMBER:
            self.blame(self.key(keys), f"`{shown(value)}` is out of range")
            return default
        return float(value)

    def flag(self, *keys: str, default: bool) -> bool:
        value = self.value(*keys, default=default)
        if not isinstance(value, bool):
            self.blame(self.key(keys), f"`{shown(value)}` must be true or false")
            return default
        return value

    def text(self, *keys: str, default: str) -> str:
        value = self.value(*keys, default=default)
        if not isinstance(value, str):
            self.blame(self.key(keys), f"`{shown(value)}` must be text")
            return default
        return value

    def listing(self, key: str, length: int, default: list[Any] | None = None) -> list[Any]:
        """A list with one entry a layer, or `default`."""
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, list) or len(value) != length:
            self.blame(key, f"`{key}` needs {length} entries, one per layer", of=(length,))
            return default if default is not None else [None] * length
        return value

    def integers(self, key: str) -> frozenset[int]:
        """A list of whole numbers in any order; none where it is absent."""
        value = self.config.get(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            self.blame(key, f"`{key}` must be a list of integers")
            return frozenset()
        return frozenset(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object inside the config, empty where it is absent."""
        value = self.config.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.blame(key, f"`{key}` must be an object")
            return {}
        return value

    def section(self, key: str) -> Fields:
        """An object inside the config, read the same way; its problems are reported with those of
        the whole."""
        inner = Fields(self.mapping(key), f"{self.where}.{key}")
        inner.problems, inner.taken = self.problems, self.taken
        return inner

    def optional(self, key: str, *, low: int = 1) -> int:
        """A whole number, or 0 where it is null or absent."""
        return 0 if self.value(key, default=None) is None else self.count(key, low=low)

    def activation(self, *keys: str, default: str) -> str:
        value = self.text(*keys, default=default)
        if value not in ACTIVATIONS:
            close = nearest(value, ACTIVATIONS, 1)
            self.blame(
                self.key(keys),
                f"unknown activation `{value[:40]}`",
                f"did you mean `{close[0]}`?" if close else "",
            )
        return value

    def divides(self, small: int, large: int, key: str, what: str) -> None:
        if large % small:
            self.blame(key, f"{small} does not divide {what} {large}", of=(small, large))

    def dtype(self) -> str:
        """The dtype of the stored weights; float32 where the config does not say, as transformers
        takes it."""
        value = self.text("dtype", "torch_dtype", default="float32").removeprefix("torch.")
        known = {"float32", "bfloat16", "float16", "float64", "float8_e4m3fn"}
        if value not in known:
            close = nearest(value, sorted(known))
            hint = (
                "did you mean " + ", ".join(f"`{one}`" for one in close) + "?"
                if close
                else "known: " + ", ".join(sorted(known))
            )
            self.blame(self.key(("dtype", "torch_dtype")), f"unknown dtype `{value[:40]}`", hint)
            return "bfloat16"
        return value

    def done(self) -> None:
        if self.problems:
            raise InputError(*self.problems)
