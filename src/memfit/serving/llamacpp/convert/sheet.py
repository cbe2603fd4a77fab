"""A config.json on its way to GGUF: its keys, and the tensors that llama.cpp's converter writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.errors import Problem, SourceError, raise_errors
from memfit.serving.llamacpp.model import Fact

LARGEST = 2**40


class Sheet:
    """Collects facts and tensor shapes of one model; problems are told all at once."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        text = config.get("text_config")
        self.config: Mapping[str, Any] = {**config, **text} if isinstance(text, Mapping) else config
        self.name = name
        self.facts: dict[str, Fact] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.types: dict[str, str] = {}  # of tensors that the publisher stores quantized
        self.problems: list[Problem] = []
        self.prefix = ""

    # -------------------------------------------------------- reading

    def optional(self, *keys: str) -> Any:
        for key in keys:
            value = self.config.get(key)
            if value is not None:
                return value
        return None

    def whole(self, *keys: str, default: int | None = None) -> int:
        value = self.optional(*keys)
        if value is None and default is not None:
            return default
        if isinstance(value, list) and value and all(type(one) is int for one in value):
            value = max(value)
        if type(value) is not int or not 0 <= value <= LARGEST:
            said = "is missing" if value is None else f"is `{str(value)[:40]}`, not an integer"
            self.problems.append(
                Problem(message=f"`{keys[0]}` {said}", where=f"config of {self.name}")
            )
            return default if default is not None else 1
        return value

    def each(self, *keys: str, layers: int, default: int | None = None) -> list[int]:
        """One number for every layer."""
        value = self.optional(*keys)
        if isinstance(value, list) and len(value) >= layers:
            return [int(one) if isinstance(one, int) else 0 for one in value[:layers]]
        return [self.whole(*keys, default=default)] * layers

    def flag(self, *keys: str, default: bool = False) -> bool:
        value = self.optional(*keys)
        return default if value is None else bool(value)

    def words(self, *keys: str) -> list[str]:
        value = self.optional(*keys)
        return [str(one) for one in value] if isinstance(value, list) else []

    def rope(self) -> Mapping[str, Any]:
        for key in ("rope_scaling", "rope_parameters"):
            value = self.config.get(key)
            if isinstance(value, Mapping):
                return value
        return {}

    # -------------------------------------------------------- writing

    def put(self, **facts: Fact) -> None:
        for key, value in facts.items():
            self.facts[key.replace("__", ".")] = value

    def layer(self, index: int) -> None:
        self.prefix = f"blk.{index}."

    def top(self) -> None:
        self.prefix = ""

    def matrix(self, name: str, outputs: int, inputs: int, *, bias: bool = False) -> None:
        """A weight of a linear layer or a table; ggml counts the inputs first."""
        self.shapes[f"{self.prefix}{name}.weight"] = (inputs, outputs)
        if bias:
            self.shapes[f"{self.prefix}{name}.bias"] = (outputs,)

    def vector(self, name: str, size: int, *, bias: bool = False) -> None:
        self.shapes[f"{self.prefix}{name}.weight"] = (size,)
        if bias:
            self.shapes[f"{self.prefix}{name}.bias"] = (size,)

    def plain(self, name: str, *sizes: int) -> None:
        """A tensor by its full name within the layer."""
        self.shapes[f"{self.prefix}{name}"] = sizes

    def norms(self, size: int, *names: str, bias: bool = False) -> None:
        for name in names:
            self.vector(name, size, bias=bias)

    def done(self) -> None:
        raise_errors(list(dict.fromkeys(self.problems)), SourceError)
