"""Attention masks as transformers 5.23 builds them (masking_utils.py): often none, and then the kernel is told `causal`."""

from __future__ import annotations

from memfit.formats import BOOL
from memfit.lower.context import Context
from memfit.lower.recorder import Dim, Tensor
from memfit.model.modules import Attention, Model


def windows(model: Model) -> tuple[int, ...]:
    """The distinct windows of the layers, 0 for full attention."""
    found = {block.mixer.window if isinstance(block.mixer, Attention) else 0 for layer, _ in model.kinds for block in layer.blocks}
    return tuple(sorted(found))


def build(ctx: Context, window: int, eager: bool) -> Tensor | None:
    """SDPA needs none for full sequences, nor for a window that holds them all; eager always adds one in the model's dtype."""
    if ctx.job.attention.startswith("flash-attn") and not eager:
        return None  # at most the two-dimensional mask that the caller gave
    narrow = 0 < window <= ctx.keys
    if not eager and not narrow and ctx.job.packing:
        return None
    if ctx.tokens == 1 and not eager and not narrow:
        return None
    r = ctx.r
    rows = ctx.batch if not ctx.job.packing else Dim(1, "1")
    allowed = r.tensor((rows, 1, ctx.tokens, ctx.keys), BOOL, "mask")
    if not eager:
        return allowed
    return r.tensor((ctx.batch, 1, ctx.tokens, ctx.keys), ctx.format, "mask")
