"""The result of reading a model: its raw config and, where headers were available, every tensor
with its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.errors import Problem
from memfit.lazy_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """One stored tensor. `shape` is in PyTorch's order (rows first), also for GGUF, which writes it
    the other way round."""

    name: str
    shape: tuple[int, ...]
    # a name in `memfit.formats`, or the name of a safetensors or GGUF type that has no row there
    # (`Q4_K`, `F4`)
    format: str
    bytes: int

    @property
    def count(self) -> int:
        """Elements stored; for packed integers (AWQ, GPTQ, bitsandbytes) that is fewer than the
        weights they hold."""
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model as found, before any family has looked at it."""

    name: str  # what the user asked for, shortened
    origin: str  # a sentence for people: where this was read
    config: Mapping[str, Any]  # config.json as parsed, or GGUF metadata in the words of config.json
    tensors: tuple[TensorInfo, ...] | None = (
        None  # exact, from the headers; None where no header was read
    )
    parameters: int | None = (
        None  # counted on the meta device, else published: only the catalog knows
    )
    problems: tuple[
        Problem, ...
    ] = ()  # warnings: what could not be read, and what was taken instead

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of all stored tensors."""
        return None if self.tensors is None else sum(tensor.bytes for tensor in self.tensors)
