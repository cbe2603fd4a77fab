"""Key/value caches of transformers 5.23 (cache_utils.py): what a layer's update allocates, keeps
and hands to the kernel."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from memfit.formats import INT64, Format
from memfit.lazy_dataclass import dataclass
from memfit.lower.ops import back_cat
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Tensor

if TYPE_CHECKING:
    from memfit.lower.quantized_cache import Pair

SERVING = (
    "prefill",
    "decode",
)  # elsewhere a cache is filled though nothing will ask it: keys and values are what backward keeps


@dataclass(slots=True, kw_only=True)
class Cache:
    """One tensor pair a layer, found by the layer's path. `limit`: tokens a static cache has room
    for."""

    kind: str
    limit: int = 0
    seen: int = 0  # tokens of the passes before
    bits: int = 4
    layers: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    packed: dict[str, Pair] = field(
        default_factory=dict
    )  # of the quantized cache, in place of `layers`
    windows: dict[str, int] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(
        default_factory=dict
    )  # a layer's own length, where it is a tensor
    states: dict[str, dict[str, Tensor]] = field(
        default_factory=dict
    )  # of captured layers, in place of `layers`: their tensors by the names in their graph
    past: dict[str, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # what a tuple cache still holds of the pass before

    def update(
        self, r: Recorder, where: str, k: Tensor, v: Tensor, window: int
    ) -> tuple[Tensor, Tensor]:
        """The keys and values to attend to; `k` and `v` are the new ones."""
        self.windows[where] = window
        return UPDATES[self.kind](self, r, where, k, v, window)

    def span(self, tokens: int, window: int) -> int:
        """How many keys a layer will hand out in a pass over so many tokens (get_mask_sizes of each
        layer class)."""
        whole = self.seen + tokens
        if self.kind == "static":
            room = min(self.limit, window) if window > 0 else self.limit
            return (
                room
                if window <= 0 or whole <= room
                else room - 1 + tokens
                if self.seen >= room
                else whole
            )
        return window - 1 + tokens if self.kind == "dynamic" and 0 < window <= self.seen else whole


def grown(r: Recorder, old: Tensor | None, new: Tensor, least: Format) -> Tensor:
    """`cat` along the tokens, also of an empty cache, which has the dtype of the first keys
    (`least`): always a copy."""
    tokens = (old.shape[-2] if old is not None else 0) + new.shape[-2]
    out = r.tensor(
        (*new.shape[:-2], tokens, new.shape[-1]),
        wider(new.format, least),
        "cat",
        "kv_cache" if r.phase in SERVING else None,
    )
    return r.node("cat", out, (new,), back_cat, extra=((new.shape, new.format),))


def wider(a: Format, b: Format) -> Format:
    return a if a.block_bytes >= b.block_bytes else b


def dynamic(
    cache: Cache, r: Recorder, where: str, k: Tensor, v: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """DynamicLayer grows by concatenation; DynamicSlidingWindowLayer keeps a view of its last
    window − 1 tokens, and so the whole block it is a view of."""
    past_keys, past_values = cache.layers.pop(where, (None, None))
    if window > 0 and where not in cache.counts:
        cache.counts[where] = r.tensor((1,), INT64, "to", "kv_cache")
    keys = grown(r, past_keys, k, k.format)
    if window <= 0:
        # the layer's attribute takes the new keys before the values grow; a window's takes both at
        # the end
        del past_keys
    values = grown(r, past_values, v, k.format)
    del past_values
    cache.layers[where] = (last(keys, window), last(values, window))
    return keys, values


def last(x: Tensor, window: int) -> Tensor:
    if window <= 0 or x.shape[-2] < window:
        return x
    return x.view(*x.shape[:-2], window - 1, x.shape[-1])


def static(
    cache: Cache, r: Recorder, where: str, k: Tensor, v: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """StaticLayer is allocated whole at its first update, in the keys' dtype, and written in place;
    a window bounds it: what does not fit is attended to as it comes, and once it is full it is
    turned by one token in new tensors (StaticSlidingWindowLayer)."""
    room = min(cache.limit, window) if window > 0 else cache.limit
    kept = cache.layers.get(where)
    if kept is None:
        cache.counts[where] = r.tensor((1,), INT64, "to", "kv_cache")
        kept = zeros(r, k, room, k.format), zeros(r, v, room, k.format)
        cache.layers[where] = kept
    if window > 0 and cache.seen >= room:
        turned = [r.like(one, "roll") for one in kept]
        del turned
    elif window > 0 and cache.seen + k.shape[-2] > room:
        return k, v
    return kept


def zeros(r: Recorder, new: Tensor, room: int, format: Format) -> Tensor:
    return r.tensor((*new.shape[:-2], room, new.shape[-1]), format, "zeros", "kv_cache")


def referenced(
    cache: Cache, r: Recorder, where: str, k: Tensor, v: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """DynamicCache before 4.54: the first keys and values are kept as they come, later ones
    concatenated; no window."""
    cache.windows[where] = 0
    if where not in cache.layers:
        cache.layers[where] = (k, v)
        return k, v
    return dynamic(cache, r, where, k, v, 0)


def tuples(
    cache: Cache, r: Recorder, where: str, k: Tensor, v: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """`past_key_values` as tuples: what the caller holds of the last pass stands beside the new."""
    old = cache.layers.get(where)
    found = referenced(cache, r, where, k, v, 0)
    if old is not None:
        cache.past[where] = old
    return found


def quantized(
    cache: Cache, r: Recorder, where: str, k: Tensor, v: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    from memfit.lower import quantized_cache

    cache.packed[where], keys, values = quantized_cache.update(
        r, cache.packed.get(where), k, v, cache.bits
    )
    return keys, values


UPDATES = {
    "quantized": quantized,
    "dynamic": dynamic,
    "static": static,
    "referenced": referenced,
    "tuple": tuples,
}
