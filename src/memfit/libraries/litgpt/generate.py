"""LitGPT's generation: a cache made before the weights are read, one pass over the prompt, then a
token at a time (0.5.13 generate/base.py main, generate_fn)."""

from __future__ import annotations

from memfit.formats import BOOL, FORMATS, FP32, INT64
from memfit.lower import head, ops
from memfit.lower.body import Body
from memfit.lower.cache import Cache
from memfit.lower.context import context
from memfit.lower.infer import walked
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Dim, Tensor
from memfit.model.modules import Attention
from memfit.program import Program

TABLES = ("rope.cos", "rope.sin")
FILLED = (0, 5)  # since 0.5.4 only what is filled of the cache is read (`input_pos_maxp1`)
TOP = 50  # candidates, where the script is not told otherwise


def generates(r: Recorder, program: Program) -> tuple[object, ...]:
    """The tape of one call; returns what is held when the last token is there."""
    job, body = program.job, Body(r, program)
    body.load()
    r.grad = False
    limit = max(job.cache_tokens, job.seq + job.new_tokens)
    cache = Cache(kind="static", limit=limit)
    for entry, bound in zip(program.entries, body.layers, strict=True):
        r.mark("load", bound.prefix)
        mixer = next(
            block.mixer for block in entry.layer.blocks if isinstance(block.mixer, Attention)
        )
        shape, format = (
            (Dim(job.batch, "B"), mixer.kv_heads, limit, mixer.head),
            FORMATS[program.weights],
        )
        cache.layers[bound.prefix] = (
            r.tensor(shape, format, "zeros", "kv_cache"),
            r.tensor(shape, format, "zeros", "kv_cache"),
        )
    r.mark("load")
    ones = r.tensor((limit, limit), BOOL, "ones")
    masks = r.tensor((1, 1, limit, limit), BOOL, "tril", "buffers")
    del ones
    prompt = ops.integers(r, (job.batch, job.seq), "inputs")
    said = [passed(program, body, cache, prompt, 0)]
    for step in walked(job):
        said.append(passed(program, body, cache, said[-1], step))
    return body, cache, masks, prompt, said


def passed(program: Program, body: Body, cache: Cache, ids: Tensor, step: int) -> Tensor:
    """One pass and the choice of the next token. The positions' angles and rows of the mask are
    picked out; logits are those of all positions, and the precision plugin makes them fp32."""
    r, job, ends = body.r, program.job, body.ends
    r.mark("decode" if step else "prefill", "", step)
    tokens = ids.shape[1]
    keys = job.seq + step if job.version("litgpt") >= FILLED else cache.limit
    positions = ops.integers(r, (tokens,), "positions")
    ctx = context(
        r, program, body.programs, (job.batch, tokens), keys=keys, training=False, cache=cache
    )
    ctx.cos, ctx.sin = (
        r.tensor((1, 1, tokens, ends[name].shape[1]), FP32, "index_select") for name in TABLES
    )
    rows = r.tensor((1, 1, tokens, cache.limit), BOOL, "index_select")
    ctx.masks[0] = rows if keys == cache.limit else rows.view(1, 1, tokens, keys)
    held = [
        rows,
        positions,
        ctx.cos,
        ctx.sin,
    ]  # variables of the model's own forward, until it returns
    del rows, positions
    hidden = body.forward(ids, ctx, step)
    scores = head.logits(hidden, body.model, ends, ctx)
    del hidden, held
    scores = ops.cast(r, scores, FP32)
    return sampled(r, scores, job.batch)


def sampled(r: Recorder, scores: Tensor, batch: int) -> Tensor:
    """The last position's logits: all but the best ones are masked, then temperature, softmax, and
    one is drawn (sample)."""
    vocabulary = scores.shape[-1]
    best = r.tensor((TOP,), FP32, "topk"), r.tensor((TOP,), INT64, "topk")
    rest = r.tensor((vocabulary,), FP32, "full_like", "logits")
    scaled = r.tensor((vocabulary,), FP32, "div", "logits")
    del rest
    shares = r.tensor((vocabulary,), FP32, "softmax", "logits")
    noise = r.tensor((vocabulary,), FP32, "exponential", "logits")
    del noise, shares, scaled, best
    return ops.integers(r, (batch, 1), "multinomial")
