"""A model as llama.cpp sees it: an architecture, its numbers under GGUF's names, and tensors with
their types."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import field
from functools import cached_property
from threading import Lock
from typing import Any, TypeVar

from memfit.lazy_dataclass import dataclass
from memfit.model.sources.ggml import GgmlType

T = TypeVar("T")
MOST = 64  # findings that a model remembers
MISSING: Any = object()
LOCK = Lock()  # of what is remembered, while the oldest goes
Number = int | float | bool | str
Fact = Number | tuple[Number, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """A tensor of a file: sizes as ggml counts them, the quickest axis first."""

    name: str
    sizes: tuple[int, ...]
    type: GgmlType

    @property
    def count(self) -> int:
        total = 1
        for size in self.sizes:
            total *= size
        return total

    @property
    def bytes(self) -> int:
        return self.type.bytes(self.count)

    @property
    def layer(self) -> int:
        """The number of its layer; -1 for what lies outside the layers."""
        return layer_of(self.name)


def layer_of(name: str) -> int:
    """The layer of `blk.7.attn_q.weight`, and of T5's `enc.blk.7` and `dec.blk.7`."""
    half, found, rest = name.partition("blk.")
    return int(rest.partition(".")[0]) if found and half in ("", "enc.", "dec.") else -1


@dataclass(frozen=True, kw_only=True)
class GgufModel:
    """`facts` are the metadata of the architecture, without its prefix."""

    name: str
    arch: str
    facts: Mapping[str, Fact]
    tensors: tuple[GgufTensor, ...] = field(repr=False)
    origin: str = ""

    @cached_property
    def _known(self) -> dict[Hashable, Any]:
        return {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()`, remembered by all that it depends on beside the model: a search for settings
        that fit asks for the same again and again, and the next question for much of it."""
        known = self._known.get(key, MISSING)
        if known is MISSING:
            known = make()
            with LOCK:
                while len(self._known) >= MOST:
                    del self._known[next(iter(self._known))]
                self._known[key] = known
        found: T = known
        return found

    @cached_property
    def by_name(self) -> Mapping[str, GgufTensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    def number(self, key: str, default: int = 0, layer: int | None = None) -> int:
        """A whole number; a list has one for each layer."""
        value = self.facts.get(key, default)
        if isinstance(value, tuple):
            if not value:
                return default
            value = value[min(layer, len(value) - 1)] if layer is not None else value[0]
        return int(value) if isinstance(value, (int, float)) else default

    def real(self, key: str, default: float = 0.0) -> float:
        value = self.facts.get(key, default)
        return float(value) if isinstance(value, (int, float)) else default

    @cached_property
    def layers(self) -> int:
        """Layers that run for a token; those that predict further tokens are not among them."""
        return self.number("block_count") - self.number("nextn_predict_layers")

    @cached_property
    def width(self) -> int:
        return self.number("embedding_length")

    @cached_property
    def vocabulary(self) -> int:
        table = self.by_name.get("token_embd.weight")
        return table.sizes[1] if table else self.number("vocab_size")

    def heads(self, layer: int = 0) -> int:
        return self.number("attention.head_count", layer=layer)

    def kv_heads(self, layer: int = 0) -> int:
        return self.number("attention.head_count_kv", self.heads(layer), layer=layer)

    def head(self, layer: int = 0) -> int:
        """Values of a key; sliding layers may have a size of their own."""
        if self.slides(layer) and "attention.key_length_swa" in self.facts:
            return self.number("attention.key_length_swa")
        heads = self.heads(layer) or max(1, self.heads(0))
        return self.number("attention.key_length", self.width // max(1, heads))

    def value_head(self, layer: int = 0) -> int:
        if self.slides(layer) and "attention.value_length_swa" in self.facts:
            return self.number("attention.value_length_swa")
        heads = self.heads(layer) or max(1, self.heads(0))
        return self.number("attention.value_length", self.width // max(1, heads))

    @cached_property
    def widest_values(self) -> int:
        """The most values that a layer keeps for a token (`n_embd_v_gqa_max`)."""
        layers = range(self.number("block_count"))
        return max((self.value_head(one) * self.kv_heads(one) for one in layers), default=0)

    @cached_property
    def window(self) -> int:
        return self.number("attention.sliding_window")

    @cached_property
    def sliding(self) -> tuple[bool, ...]:
        """Which layers see a window only (`set_swa_pattern` in load_hparams of llama-model.cpp)."""
        return tuple(_slides(self, layer) for layer in range(self.number("block_count")))

    def slides(self, layer: int) -> bool:
        return self.sliding[layer] if 0 <= layer < len(self.sliding) else False

    def cache_of(self, layer: int) -> int:
        """The layer whose cache a layer reads: its own, or, where the last layers share, that of
        the last of its kind before them (`reuse` in create_memory of llama-model.cpp)."""
        first = self.layers - self.number("attention.shared_kv_layers")
        return layer if layer < first else first - (2 if self.slides(layer) else 1)

    @property
    def parameters(self) -> int:
        return sum(tensor.count for tensor in self.tensors)

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)

    @cached_property
    def layered(self) -> Mapping[int, tuple[GgufTensor, ...]]:
        found: dict[int, list[GgufTensor]] = {}
        for tensor in self.tensors:
            found.setdefault(tensor.layer, []).append(tensor)
        return {layer: tuple(tensors) for layer, tensors in found.items()}

    def of_layer(self, layer: int) -> tuple[GgufTensor, ...]:
        return self.layered.get(layer, ())

    @cached_property
    def shapes(self) -> Mapping[int, tuple[tuple[str, tuple[int, ...]], ...]]:
        """Names within the layer, and sizes, of the tensors of each layer."""
        return {
            layer: tuple((one.name.replace(f"blk.{layer}.", "", 1), one.sizes) for one in tensors)
            for layer, tensors in self.layered.items()
        }


# Every n-th layer sees all, the others a window; `True`: the first of each n instead of the last.
# llama-model.cpp load_hparams of each architecture, b11549.
PATTERNS: Mapping[str, tuple[int, bool]] = {
    "gemma2": (2, False),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "gemma-embedding": (6, False),
    "cohere2": (4, False),
    "gpt-oss": (2, False),
    "olmo2": (4, False),
    "exaone4": (4, False),
    "llama4": (4, False),
    "smallthinker": (4, True),
    "afmoe": (4, False),
    "modern-bert": (3, True),
}


def _slides(model: GgufModel, layer: int) -> bool:
    window = model.number("attention.sliding_window")
    if not window:
        return False
    pattern = model.facts.get("attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        return bool(pattern[layer]) if layer < len(pattern) else False
    every, dense_first = PATTERNS.get(model.arch, (0, False))
    if isinstance(pattern, int) and pattern > 1:
        every = pattern
    if not every:
        return False
    return layer % every != 0 if dense_first else layer % every < every - 1
