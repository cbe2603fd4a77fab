"""vLLM's KV cache arithmetic: what a layer keeps, how layers are grouped, how many blocks fit.

Source: vLLM `v1/kv_cache_interface.py` and `v1/core/kv_cache_utils.py`, 0.9.2 to 0.24.0; what
differs between versions is a field of `rules.Rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memfit.errors import InputError
from memfit.lazy_dataclass import dataclass
from memfit.serving.vllm.rules import Rules


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What one layer keeps: `page` bytes for `block` tokens. `kind` is full, sliding, chunked,
    crossing (an encoder's `window` outputs), or state (a fixed size per request)."""

    kind: str
    block: int
    page: int
    window: int = 0
    heads: int = 0
    head: int = 0
    states: int = 1  # pages of a request's state
    each: int = 0  # tokens of a block whose state a cached prefix keeps, too

    def pages(self, length: int, batched: int) -> int:
        """The most pages that one request of `length` tokens uses."""
        if self.kind == "state":
            return self.states + (-(-length // self.each) if self.each else 0)
        if self.kind == "sliding":
            # the window less one, the tokens of one step, and a page for a window that starts
            # within a block
            return -(-min(self.window - 1 + batched, length) // self.block) + 1
        if self.kind == "crossing":
            return -(-self.window // self.block)
        if self.kind == "chunked":
            return -(-min(self.window + batched, length) // self.block)
        return -(-length // self.block)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that share one block table. `page` is what a block takes in one layer of the group; it
    differs from the layer's own where pages are padded."""

    spec: Spec
    layers: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The groups of a model. A block takes `per_block` bytes over all layers of the largest
    group."""

    groups: tuple[Group, ...]
    per_block: int

    def blocks(self, available: int) -> int:
        return max(0, available // self.per_block) if self.per_block else 0

    def blocks_per_request(self, length: int, batched: int) -> int:
        return sum(group.spec.pages(length, batched) for group in self.groups)

    def request_bytes(self, length: int, batched: int) -> int:
        """Bytes that one request of this length needs."""
        return self.blocks_per_request(length, batched) * self.per_block

    def concurrency(self, blocks: int, length: int, batched: int) -> float:
        need = self.blocks_per_request(length, batched)
        return blocks / need if need else 0.0

    def tokens(self, blocks: int, length: int, batched: int, rules: Rules) -> int:
        """`GPU KV cache size` of the log."""
        if not self.groups:
            return 0
        if rules.tokens_by_concurrency:
            return int(self.concurrency(blocks, length, batched) * length)
        return blocks // len(self.groups) * min(group.spec.block for group in self.groups)

    def longest(self, available: int, length: int, batched: int) -> int:
        """The longest request that fits, found as vLLM does, by halving."""
        low, high, found = 1, length, 0
        while low <= high:
            middle = (low + high) // 2
            if self.request_bytes(middle, batched) <= available:
                found, low = middle, middle + 1
            else:
                high = middle - 1
        return found


def full(spec: Spec) -> Spec:
    """The same layer, cached for all tokens."""
    return replace(spec, kind="full", window=0) if spec.kind in ("sliding", "chunked") else spec


def layout(specs: Sequence[Spec], rules: Rules, *, hybrid: bool = True) -> Layout:
    """The groups that vLLM makes of the layers' specs. Without the hybrid manager, and in versions
    that have none, a sliding window layer is cached for all tokens where others are."""
    kept = list(specs)
    if not (hybrid and rules.hybrid_groups) and any(one.kind == "full" for one in kept):
        kept = [full(one) for one in kept]
    if not kept:
        return Layout(groups=(), per_block=0)
    if len(set(kept)) == 1:
        return Layout(
            groups=(Group(spec=kept[0], layers=len(kept)),), per_block=kept[0].page * len(kept)
        )
    if len({(one.kind, one.block, one.window) for one in kept}) == 1:  # only sizes differ
        return Layout(
            groups=(Group(spec=kept[0], layers=len(kept)),), per_block=sum(one.page for one in kept)
        )
    if len({one.page for one in kept}) > 1 and not rules.unified_pages:
        raise InputError.one(
            "NotImplementedError: this version of vLLM has no pages of different sizes",
            where="model",
            hint="0.12 and later have",
        )
    kept = unified(kept)
    kinds: dict[Spec, int] = {}
    for one in kept:
        kinds[one] = kinds.get(one, 0) + 1
    size = min(kinds.values())
    most = max(kinds.values())
    if rules.group_slack and most < size * rules.group_slack:
        size = most
    groups = []
    for spec, count in kinds.items():
        number = -(-count // size)
        groups += [
            Group(spec=spec, layers=len(range(index, count, number))) for index in range(number)
        ]
    largest = max(group.layers for group in groups)
    return Layout(groups=tuple(groups), per_block=largest * groups[0].spec.page)


def unified(specs: list[Spec]) -> list[Spec]:
    """Layers of smaller pages get longer blocks, or padded pages, until all pages are equal."""
    largest = max(one.page for one in specs)
    return [
        one
        if one.page == largest
        else replace(one, block=one.block * (largest // one.page), page=largest)
        if largest % one.page == 0
        else replace(one, page=largest)
        for one in specs
    ]
