"""Attention masks as transformers 5.23 builds them (masking_utils.py): often none, and then the kernel is told `causal`."""

from __future__ import annotations

from memfit.errors import InputError
from memfit.formats import BOOL
from memfit.lower import views
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder, Shape, Tensor
from memfit.model.modules import Attention, Model, Module

OWN_WINDOW = {"gpt_neo"}  # cut out of a mask of the layer's own; the shared one is causal


def windows(model: Model) -> tuple[int, ...]:
    """The distinct windows of the layers, 0 for full attention, and of the masks that are made for none of them."""
    if None in model.masks:
        raise InputError.one(
            "the code of this family stops without a `sliding_window`", where="config.sliding_window", hint="give the window"
        )
    made = {window for window in model.masks if window is not None}
    return tuple(sorted(made.union(window_of(block.mixer) for layer, _ in model.kinds for block in layer.blocks)))


def window_of(mixer: Module) -> int:
    return mixer.window if isinstance(mixer, Attention) and mixer.style not in OWN_WINDOW else 0


def build(ctx: Context, window: int, eager: bool) -> Tensor | None:
    """SDPA needs none for full sequences, nor for a window that holds them all; eager always adds one in the model's dtype;
    the flash-attn package takes which tokens are real, if not all are."""
    r, padded = ctx.r, not ctx.job.packing
    if ctx.job.attention.startswith("flash-attn") and not eager:
        return r.tensor((ctx.batch, ctx.keys), BOOL, "mask") if padded else None
    narrow = 0 < window <= ctx.keys
    if not eager and not narrow and not padded:
        return None
    if ctx.tokens == 1 and not eager and not narrow:
        return None
    allowed = views.expand(r, crossed(ctx, narrow, padded), ctx.batch, 1, ctx.tokens, ctx.keys)
    return r.tensor((ctx.batch, 1, ctx.tokens, ctx.keys), ctx.format, "mask") if eager else allowed


def crossed(ctx: Context, narrow: bool, padded: bool) -> Tensor:
    """(B or 1, 1, S, keys) truth values: causal, within the window, and real tokens only. Each `and` writes a new tensor, and
    so does the first one, with `true` (masking_utils.py and_masks)."""
    r, square = ctx.r, (1, 1, ctx.tokens, ctx.keys)
    real = r.tensor((ctx.batch, ctx.keys), BOOL, "mask") if padded else None
    causal = r.tensor(square, BOOL, "mask")
    if narrow:
        causal = met(r, causal, square)
        within = r.tensor(square, BOOL, "mask")
        causal = met(r, causal, square)
        del within
    if real is not None:
        causal = met(r, causal, square)
        chosen = r.tensor((ctx.batch, 1, 1, ctx.keys), BOOL, "mask")
        causal = met(r, causal, (ctx.batch, 1, ctx.tokens, ctx.keys))
        del chosen, real
    return causal


def met(r: Recorder, before: Tensor, shape: Shape) -> Tensor:
    """`before & other`; what was before goes."""
    return r.tensor(shape, before.format, "and")
