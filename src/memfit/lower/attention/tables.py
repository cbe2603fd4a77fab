"""Tables of sines and cosines, made once a pass for all layers, as each family's rotary embedding
makes them."""

from __future__ import annotations

from memfit.formats import COMPLEX64, FP32
from memfit.lower import ops
from memfit.lower.context import Context
from memfit.lower.tensors import Tensor
from memfit.model.model import Model
from memfit.model.modules import Attention, Latent, Weight

WIDE = {"olmo", "olmo2", "ernie4_5"}  # kept in fp32 (modeling_olmo.py OlmoRotaryEmbedding)
HALF = {"gpt_oss"}  # one angle for each pair, not two (modeling_gpt_oss.py GptOssRotaryEmbedding)
KEPT = {"qwen"}  # made once, and kept (attention/qwen.py)
COMPLEX = {"deepseek_v2"}  # (modeling_deepseek_v2.py DeepseekV2RotaryEmbedding)


def make(model: Model, ctx: Context) -> None:
    """One pair of tables, or one for each type of layer (modeling_gemma3.py
    Gemma3RotaryEmbedding)."""
    found = frequencies(model)
    if not found:
        return
    style = next(
        block.mixer.style
        for layer in model.layers
        for block in layer.blocks
        if isinstance(block.mixer, (Attention, Latent))
    )
    if style in KEPT:
        return
    grad, ctx.r.grad = ctx.r.grad, False
    for weight in found:
        ctx.r.where = weight.name.rpartition(".")[0]
        pair = (
            turns(weight.shape[0], ctx) if style in COMPLEX else angles(weight.shape[0], style, ctx)
        )
        ctx.cos, ctx.sin = ctx.tables["sliding_attention" in weight.name] = pair
    ctx.r.grad = grad


def frequencies(model: Model) -> list[Weight]:
    return [
        one
        for one in model.buffers
        if one.name.endswith("inv_freq") and not one.name.endswith("original_inv_freq")
    ]


def rows(ctx: Context) -> int:
    """One for all sequences, unless each comes with positions of its own."""
    if ctx.program.model.own_positions:
        return int(ctx.batch)
    return ctx.positions.shape[0] if ctx.positions is not None else 1


def angles(half: int, style: str, ctx: Context) -> tuple[Tensor, Tensor]:
    """positions · frequencies, doubled, their cosine and sine, each scaled and cast
    (modeling_llama.py LlamaRotaryEmbedding)."""
    r = ctx.r
    freqs = scaled_positions(half, ctx)
    emb = freqs if style in HALF else r.tensor((rows(ctx), 1, ctx.tokens, 2 * half), FP32, "cat")
    cos, sin = (ops.scale(r, ops.scale(r, emb, name)) for name in ("cos", "sin"))
    if style in WIDE:
        return cos, sin
    return ops.cast(r, cos, ctx.format), ops.cast(r, sin, ctx.format)


def scaled_positions(half: int, ctx: Context) -> Tensor:
    positions = ctx.r.tensor((rows(ctx), 1, ctx.tokens, 1), FP32, "to")
    out = ctx.r.tensor((rows(ctx), 1, ctx.tokens, half), FP32, "freqs")
    del positions
    return out


def turns(half: int, ctx: Context) -> tuple[Tensor, Tensor | None]:
    """Complex numbers of length 1, scaled."""
    r = ctx.r
    freqs = scaled_positions(half, ctx)
    ones = r.like(freqs, "ones_like")
    polar = r.tensor(freqs.shape, COMPLEX64, "polar")
    del ones
    return ops.scale(r, polar), None


def choose(ctx: Context, window: int) -> None:
    """Where each type of layer has its own tables: those of this one."""
    pair = ctx.tables.get(window > 0)
    if pair is not None:
        ctx.cos, ctx.sin = pair
