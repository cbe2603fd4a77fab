"""Tokens that a script generates one by one: once a few of them have been, the model is not run for
those in the middle, and their keys and values join the cache all the same."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from memfit.trace import like

FIRST = 3  # tokens that the model is run for, behind the prompt
LAST = 2  # tokens at the end that it is run for, when the cache is largest
PAIR = "EncoderDecoderCache"  # of which only the decoder's own part grows
GROWING = {"DynamicLayer", "DynamicSlidingWindowLayer"}  # layers of a cache with keys and values
CACHES = ("cache", "past_key_values")  # its name from transformers 5.24 on, and before
NEAR = 12  # frames between `generate`'s loop and the model that it calls


def growing(cache: Any) -> Any:
    """The part of a cache that grows with each token."""
    return cache.self_attention_cache if type(cache).__name__ == PAIR else cache


def layers_of(cache: Any) -> int:
    """How many layers a cache has that holds keys and values alone; else 0."""
    if type(cache).__name__ != "DynamicCache":
        return 0
    layers = getattr(cache, "layers", None)
    if layers is None:  # before transformers 4.54
        return len(cache.key_cache)
    plain = all(type(one).__name__ in GROWING for one in layers)
    return len(layers) if plain else 0


def pair(cache: Any, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer."""
    if not hasattr(cache, "layers"):
        return cache.key_cache[index], cache.value_cache[index]
    return cache.layers[index].keys, cache.layers[index].values


def limit() -> int:
    """The length at which the loop that is running ends; 0 if none says so."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(NEAR):
        if frame is None:
            break
        criteria = frame.f_locals.get("stopping_criteria")
        if isinstance(criteria, list):
            return max((int(getattr(one, "max_length", 0) or 0) for one in criteria), default=0)
        frame = frame.f_back
    return 0


class Generation:
    """The answer that is being generated, if there is one."""

    def __init__(self, joining: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self.joining = joining  # around what joins the cache
        self.cache: Callable[[], Any] = lambda: None
        self.length = self.count = 0  # of the cache; of tokens that the model was run for
        self.name = ""  # of the cache in the result
        self.result: Any = None
        self.kind: Any = None
        self.shared: dict[str, int] = {}  # names in the result -> what the encoder gave

    def runs(self, length: int) -> bool:
        """Whether the model is run for the token with which the cache gets this length."""
        return self.count < FIRST or self.result is None or length + LAST >= limit()

    def step(self, call: Callable[[], Any], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Whether the model was not run for this token, and its result."""
        cache: Any = next((kwargs[one] for one in CACHES if kwargs.get(one) is not None), None)
        ids = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
        one = isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.shape[1] == 1
        if not one or not kwargs.get("use_cache") or not layers_of(growing(cache)):
            return False, call()
        encoded = [*like.tensors_in(kwargs.get("encoder_outputs") or ())]
        length = int(cache.get_seq_length())
        if self.cache() is not cache or length != self.length:
            self.cache, self.count, self.result = weakref.ref(cache), 0, None
        self.length = length + 1
        if not self.runs(self.length):
            return True, self.grown(cache, encoded)
        found = call()
        self.count += 1
        self.remember(found, cache, encoded)
        return False, found

    def remember(self, found: Any, cache: Any, encoded: list[torch.Tensor]) -> None:
        """The result without the cache, which ends with the answer, and without what the encoder
        gave, which is the caller's."""
        rest = dict(found) if isinstance(found, dict) else {}
        places = {id(one): place for place, one in enumerate(encoded)}
        self.shared = {name: places[id(one)] for name, one in rest.items() if id(one) in places}
        rest = {name: one for name, one in rest.items() if name not in self.shared}
        self.name = next((one for one in CACHES if rest.get(one) is cache), "")
        rest.pop(self.name, None)
        if self.name and all(map(like.plain, like.parts(rest))):
            self.result, self.kind = like.template(rest), type(found)

    def grown(self, cache: Any, encoded: list[torch.Tensor]) -> Any:
        own = growing(cache)
        for index in range(layers_of(own)):
            new = [one.new_empty((*one.shape[:-2], 1, one.shape[-1])) for one in pair(own, index)]
            with self.joining():
                own.update(*new, index)
        shared = {name: encoded[place] for name, place in self.shared.items()}
        return self.kind(**like.made(self.result), **shared, **{self.name: cache})


class Growing:
    """An answer that is generated without a cache, with one token more in each pass. The last
    passes, which are the largest, are run, so a loop is left alone whose end nothing says."""

    def __init__(self) -> None:
        self.module: Callable[[], Any] = lambda: None
        self.form: Hashable = None  # what stays the same
        self.sizes: list[list[int]] = []  # of inputs in the passes that were run
        self.results: list[Any] = []
        self.last: list[int] = []  # sizes of inputs in the pass before, run or not

    def skips(self, module: Any, form: Hashable, sizes: list[int], length: int) -> bool:
        """Whether the pass that begins is like those before it, and none of the last ones."""
        known = self.module() is module and form == self.form
        if not known or grown(self.last, sizes) is None:
            self.module, self.form, self.sizes, self.results = weakref.ref(module), form, [], []
        before, self.last = self.last, sizes
        if len(self.results) < FIRST or length + LAST >= limit():
            return False
        *_, one, two = self.sizes
        return grown(one, two) == grown(before, sizes)

    def ran(self, result: Any, plain: bool) -> None:
        """`plain` results are of tensors alone that are new."""
        tensors = [*like.tensors_in(result)]
        if plain and all(one.is_contiguous() and one._base is None for one in tensors):
            self.sizes.append(self.last)
            self.results.append(like.replaced(result, shaped))
        else:
            self.sizes, self.results = [], []

    def result(self) -> Any:
        """As large as the growth so far says."""
        *_, before, latest = self.results
        (step,) = {b - a for a, b in zip(*self.sizes[-2:], strict=True) if b != a}
        (more,) = {b - a for a, b in zip(self.sizes[-1], self.last, strict=True) if b != a}
        shapes = iter([*like.parts(before)])

        def made(one: Any) -> Any:
            earlier = next(shapes)
            if not isinstance(one, Shaped):
                return one
            size = [b + (b - a) * more // step for a, b in zip(earlier.size, one.size, strict=True)]
            return torch.zeros(size, dtype=one.dtype, device=one.device)

        return like.replaced(latest, made)


@dataclass(frozen=True)
class Shaped:
    """A new tensor of a result."""

    size: torch.Size
    dtype: torch.dtype
    device: torch.device


def shaped(one: Any) -> Any:
    return Shaped(one.shape, one.dtype, one.device) if isinstance(one, torch.Tensor) else one


def grown(before: list[int], after: list[int]) -> list[int] | None:
    """How much each size has grown, if some have, all of them by as much."""
    if len(before) != len(after):
        return None
    found = [two - one for one, two in zip(before, after, strict=True)]
    return found if len({*found} - {0}) == 1 and min(found) >= 0 else None


__all__ = ["Generation", "Growing"]
