"""SGLang's pools: tokens of full and sliding layers, states of linear attention.

Source: `srt/model_executor/model_runner_kv_cache_mixin.py` (0.5.9), `srt/mem_cache/memory_pool.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.model.modules import Attention, Latent
from memfit.serving.sglang.setup import Setup
from memfit.serving.weights import kv_heads

INDEX_BLOCK = 128  # values per scale of the sparse indexer's keys (NSATokenToKVPool)


@dataclass(frozen=True, kw_only=True)
class Pools:
    """Tokens of each pool and their bytes."""

    tokens: int
    full: int
    sliding_tokens: int = 0
    sliding: int = 0

    @property
    def bytes(self) -> int:
        return self.full + self.sliding


def number_bytes(setup: Setup, values: int) -> int:
    """Bytes of so many cached values; fp4 keeps a byte of scale for 16 of them."""
    if setup.kv_dtype.startswith("fp8"):
        return values
    if setup.kv_dtype.startswith("fp4"):
        return values // 2 + values // 16
    return values * setup.width


def cells(setup: Setup) -> tuple[int, int]:
    """Bytes of one token over all full layers, and over all sliding ones."""
    full = sliding = 0
    for layer in setup.model.layers:
        for block in layer.blocks:
            mixer = block.mixer
            if isinstance(mixer, Attention):
                values = 2 * kv_heads(mixer.kv_heads, setup.rank.heads) * mixer.head
                if mixer.window:
                    sliding += number_bytes(setup, values)
                else:
                    full += number_bytes(setup, values)
            elif isinstance(mixer, Latent):
                full += number_bytes(setup, mixer.cached) + indexer(setup)
    return full, sliding


def indexer(setup: Setup) -> int:
    """Keys of DeepSeek's sparse attention: a byte a value and a scale for each 128 of them."""
    size = setup.subject.config.get("index_head_dim")
    return 0 if not isinstance(size, int) else size + size // INDEX_BLOCK * 4


def pools(setup: Setup, rest: int) -> Pools:
    """What `rest` bytes hold."""
    full, sliding = cells(setup)
    if not full + sliding or rest <= 0:
        return Pools(tokens=0, full=0)
    tokens = rest // (full + sliding)
    if setup.tokens:
        tokens = min(tokens, setup.tokens)
    tokens -= tokens % setup.page
    if not sliding or not full:
        return Pools(tokens=tokens, full=tokens * (full + sliding))
    everything = tokens * (full + sliding)
    kept = int(everything / (full + setup.swa_ratio * sliding))
    slides = int(kept * setup.swa_ratio)
    kept, slides = kept - kept % setup.page, slides - slides % setup.page
    return Pools(tokens=kept, full=kept * full, sliding_tokens=slides, sliding=slides * sliding)
