"""Attention masks as transformers 5.23 builds them (masking_utils.py): often none, and then the
kernel gets `is_causal`."""

from __future__ import annotations

from memfit.errors import InputError
from memfit.formats import BOOL
from memfit.lower import ops, views
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Shape, Tensor
from memfit.model.model import Model
from memfit.model.modules import Attention, Latent, Module

OWN_WINDOW = {"gpt_neo"}  # cut out of a mask of the layer's own; the shared one is causal
OWN_MASK = {"qwen"}  # made by the family's own code


def windows(model: Model, *, asked: bool = False) -> tuple[int, ...]:
    """The distinct windows of the layers, 0 for full attention, and of the masks that the model
    makes for none of them; `asked`: those that `generate` makes, which looks at the layers alone.
    """
    if None in model.masks:
        raise InputError.one(
            "this family's code needs a `sliding_window`",
            where="config.sliding_window",
            hint="add it to the config",
        )
    made = set() if asked else {window for window in model.masks if window is not None}
    shared = (
        mixer
        for mixer in model.mixers
        if isinstance(mixer, (Attention, Latent)) and mixer.style not in OWN_MASK
    )
    return tuple(sorted(made.union(window_of(mixer) for mixer in shared)))


def window_of(mixer: Module) -> int:
    return mixer.window if isinstance(mixer, Attention) and mixer.style not in OWN_WINDOW else 0


def build(ctx: Context, window: int, eager: bool) -> Tensor | None:
    """SDPA needs none for full sequences, nor for a window that holds them all; eager always adds
    one in the model's dtype; the flash-attn package takes which tokens are real, if not all are.
    For a static cache `generate` makes them itself, whole, and also while decoding, where no pass
    could do without (generation/utils.py prepare_inputs_for_generation)."""
    r, padded, keys = ctx.r, not ctx.job.packing, ctx.span(window)
    if not ctx.programs.sequences.masked:
        return None
    if ctx.job.attention.startswith("flash-attn") and not eager:
        return r.tensor((ctx.batch, keys), BOOL, "mask") if padded else None
    open_ = ctx.program.model.both_ways
    narrow, single = 0 < window <= keys, ctx.tokens == 1 and not ctx.static
    if (
        not eager
        and not narrow
        and not open_
        and (single or not padded)
        and not (ctx.tokens == 1 and ctx.static)
    ):
        return None
    shape = (ctx.batch, 1, ctx.tokens, keys)
    allowed = views.expand(r, crossed(ctx, keys, narrow, padded), *shape)
    if eager:
        return r.tensor(shape, ctx.format, "mask")
    return ops.packed(r, allowed) if ctx.static else allowed


def crossed(ctx: Context, keys: int, narrow: bool, padded: bool) -> Tensor:
    """(B or 1, 1, S, keys) truth values: causal, within the window, and real tokens only. Each
    `and` writes a new tensor, and so does the first one, with `true` (masking_utils.py and_masks).
    """
    r, square = ctx.r, (1, 1, ctx.tokens, keys)
    real = r.tensor((ctx.batch, keys), BOOL, "mask") if padded else None
    causal = r.tensor(square, BOOL, "mask")
    if narrow:
        causal = met(r, causal, square)
        within = r.tensor(square, BOOL, "mask")
        causal = met(r, causal, square)
        del within
    if ctx.program.model.both_ways:  # `or` with what is seen behind (or_masks)
        causal = met(r, causal, square)
    if real is not None:
        causal = met(r, causal, square)
        chosen = r.tensor((ctx.batch, 1, 1, keys), BOOL, "mask")
        causal = met(r, causal, (ctx.batch, 1, ctx.tokens, keys))
        del chosen, real
    return causal


def met(r: Recorder, before: Tensor, shape: Shape) -> Tensor:
    """`before & other`; what was before goes."""
    return r.tensor(shape, before.format, "and")
