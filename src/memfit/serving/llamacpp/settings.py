"""The options of llama.cpp, by the names of its flags."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from memfit.lazy_dataclass import dataclass
from memfit.units import round_up

if TYPE_CHECKING:
    from memfit.serving.llamacpp.drafts import Draft

# n_outputs_max came with pull request 23861 (merged 2026-05-30, build 9431 or so): the server
# reserves one row of logits a sequence, older builds one a token of a micro-batch.
FEW_OUTPUTS = 9431
NEWEST = 11549
# Pull request 18148 (2025-12-18): `-ngl` counts the output matrix first; before, it came last.
OUTPUT_FIRST = 7470
# Pull request 23764 (2026-05-28): with flash attention the mask is an input of 16 bits.
HALF_MASK = 9390
# Pull request 23398 (2026-06-07, build 9550 or so): Gemma 4 keeps the rows of all tokens to the
# end, where drafts read them; before, the last layer kept those that give logits.
LATE_OUTPUTS = 9550
# Pull requests 18549 and 18550 (January 2026): graphs have room for embeddings beside tokens.
BOTH_INPUTS = 7900
MIXED_INPUTS = 11000  # and for batches that mix the two; found in b11549
# MLA keeps one tensor: its values are a view of its keys (January 2026).
LATENT_ONLY = 7800
# Pull request 14158 (2025-06-30): the product of a gated feed-forward is one operation, which has a
# buffer of its own; before, the activation and the product overwrote the gate.
ONE_PRODUCT = 5780
STREAMS = 5900  # pull request 14363, July 2025: a cache for each slot
# Pull request 15434, August 2025: `-fa auto` is the default; before it was off.
FLASH_AUTO = 6325
# Four slots with one cache are the default of llama-server since the end of 2025.
FOUR_SLOTS = 7400


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run. `gpu_layers`: layers on GPUs, counted from the last; the output matrix is one more
    (`-ngl`)."""

    context: int = 4096  # -c
    parallel: int = 1  # -np
    unified: bool = False  # one cache for all sequences (--kv-unified)
    batch: int = 2048  # -b
    ubatch: int = 512  # -ub
    cache_k: str = "f16"  # -ctk
    cache_v: str = "f16"  # -ctv
    flash: bool = True  # -fa
    gpu_layers: int = 999  # -ngl
    cpu_moe: int = 0  # --n-cpu-moe
    overrides: tuple[tuple[str, str], ...] = ()  # -ot pattern=buffer
    split: tuple[float, ...] = ()  # -ts
    swa_full: bool = False
    kv_offload: bool = True  # off: --no-kv-offload
    op_offload: bool = True  # off: --no-op-offload
    mmap: bool = True
    embedding: bool = False
    all_outputs: bool = False  # a row of logits for every token (perplexity and the like)
    keeps_embeddings: bool = False  # embeddings are handed out beside the logits
    draft: Draft | None = field(default=None, compare=False, hash=False)  # -md
    drafted: int = 0  # tokens of a draft that the model checks at once (--draft-max)
    build: int = NEWEST

    @property
    def shared(self) -> bool:
        """Whether all slots have one cache; before streams there was no other way."""
        return self.unified or self.parallel == 1 or self.build < STREAMS

    @property
    def cells(self) -> int:
        """Tokens of the cache for each of its streams."""
        if self.shared:
            return round_up(self.context, 256)
        return round_up(max(1, self.context // self.parallel), 256)

    @property
    def streams(self) -> int:
        return 1 if self.shared else self.parallel

    @property
    def tokens(self) -> int:
        """Tokens of the largest graph: a whole number for each sequence."""
        tokens = min(self.cells * self.streams, self.batch, self.ubatch)
        if tokens % self.parallel:
            tokens = -(-tokens // self.parallel) * self.parallel
        return tokens

    @property
    def outputs(self) -> int:
        """Rows of logits that the graph reserves."""
        if self.build >= FEW_OUTPUTS and not self.all_outputs and not self.embedding:
            return min(self.parallel * (1 + self.drafted), self.tokens)
        return self.tokens
