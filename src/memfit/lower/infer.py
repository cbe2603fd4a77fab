"""Generation with transformers: prefill of the prompt, then one token after another until the last."""

from __future__ import annotations

from memfit.formats import BOOL, FP32, INT64
from memfit.lower import head, ops, versions
from memfit.lower.body import Body
from memfit.lower.cache import Cache, last
from memfit.lower.context import context
from memfit.lower.recorder import Dim, Recorder, Tensor
from memfit.program import Program

WALKED = 24  # decoding steps written one by one; of more, evenly spaced ones and always the last


def infer(r: Recorder, program: Program) -> tuple[object, ...]:
    """The tape of one `generate` call, or of one forward pass where nothing is generated; returns what is held before it returns."""
    body = Body(r, program)
    body.load()
    r.grad = False
    job = program.job
    rows = Dim(job.batch * job.beams, "B")
    ids = ops.integers(r, (rows, Dim(job.seq, "S")), "inputs")
    padding = r.tensor((rows, job.seq), INT64, "attention_mask", "inputs")
    kept = job.cache != "none" and job.new_tokens > 0
    kind = versions.growing(program) if job.cache == "dynamic" else job.cache
    cache = Cache(kind=kind, limit=job.seq + job.new_tokens, bits=job.cache_bits) if kept else None
    r.mark("prefill")
    chosen = forward(r, program, body, ids, rows, job.seq, job.seq, cache, 0)
    for step in decoded(job.new_tokens):
        r.mark("decode", "", step)
        ids = appended(r, ids, rows, job.seq + step)
        padding = appended(r, padding, rows, job.seq + step)
        if cache is not None:
            skip_to(r, cache, job.seq + step - 1, step)
            r.mark("decode", "", step)
            chosen = forward(r, program, body, chosen, rows, 1, job.seq + step, cache, step)
        else:
            chosen = forward(r, program, body, ids, rows, job.seq + step, job.seq + step, None, step)
    return body, cache, ids, padding, chosen


def decoded(new_tokens: int) -> list[int]:
    """The passes after the prefill: the prompt's own pass gives the first token."""
    passes = max(0, new_tokens - 1)
    if passes <= WALKED:
        return list(range(1, passes + 1))
    return sorted({1 + (passes - 1) * index // (WALKED - 1) for index in range(WALKED)})


def appended(r: Recorder, tokens: Tensor, rows: int, length: int) -> Tensor:
    return r.tensor((rows, length), tokens.format, "cat", "inputs")


def skip_to(r: Recorder, cache: Cache, length: int, step: int) -> None:
    """Bring a growing cache to what it is before this pass, where passes in between were not walked; behind a window it grows no more."""
    if cache.kind == "static":
        return
    for where in list(cache.past):
        r.mark("decode", where, step)
        del cache.past[where]
    for where, window in cache.windows.items():
        pair = cache.layers[where]
        room = min(length, window) if window > 0 else length
        if 0 < pair[0].shape[-2] < room - (room == window):
            r.mark("decode", where, step)
            whole = [r.tensor((*one.shape[:-2], room, one.shape[-1]), one.format, "cat", "kv_cache") for one in pair]
            cache.layers[where] = (last(whole[0], window), last(whole[1], window))
            del whole
        del pair  # freed within the layer's own span


def forward(
    r: Recorder, program: Program, body: Body, ids: Tensor, rows: Dim, tokens: int, keys: int, cache: Cache | None, step: int
) -> Tensor:
    """One pass and the choice of the next token; returns its id."""
    job = program.job
    ctx = context(r, program, body.programs, (rows, tokens), keys=keys, training=False, cache=cache)
    hidden = body.forward(ids.view(rows, tokens), ctx, step)
    if job.logits == "last" and job.new_tokens and not versions.whole_prompt(program):
        hidden = hidden.view(rows, 1, hidden.shape[-1])
    scores = head.logits(hidden, body.model, body.ends, ctx)
    if versions.fp32_logits(program):
        scores = versions.wide(scores, ctx)
    del hidden
    return next_token(r, scores, rows)


def next_token(r: Recorder, scores: Tensor, rows: int) -> Tensor:
    """The last position in fp32, then argmax (generation/utils.py _sample)."""
    wide = r.tensor((rows, scores.shape[-1]), FP32, "to", "logits")
    chosen = r.tensor((rows,), INT64, "argmax", "inputs")
    done = r.tensor((rows,), BOOL, "eq")
    del wide, done
    return chosen.view(rows, 1)
