"""Generation with transformers: prefill of the prompt, then one token after another until the
last."""

from __future__ import annotations

from dataclasses import field

from memfit.formats import BOOL, FP32, INT64
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.lower import infer_stage, ops, quantized_cache, versions
from memfit.lower.body import Body
from memfit.lower.cache import Cache, last
from memfit.lower.context import context
from memfit.lower.engines import engine_of
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Dim, Tensor
from memfit.program import Program

WALKED = 12  # decoding steps written one by one; of more, evenly spaced ones and always the last


@dataclass(slots=True, kw_only=True)
class Said:
    """What `generate` holds between passes: the tokens so far, their positions, and the scores that
    the last one was chosen by."""

    rows: Dim
    ids: Tensor
    positions: Tensor
    beams: int = 1
    directions: int = 1  # of its positions
    scores: list[Tensor] = field(default_factory=list)
    sequences: list[Tensor] = field(default_factory=list)
    held: list[Tensor] = field(
        default_factory=list
    )  # from the start: single numbers, and the first positions
    small: list[Tensor] = field(default_factory=list)  # of the last choice

    @property
    def length(self) -> int:
        return self.ids.shape[1]


def infer(r: Recorder, program: Program) -> tuple[object, ...]:
    """The tape of one `generate` call, or of one forward pass where nothing is generated; returns
    what is held before it returns."""
    job = program.job
    if job.cache == "quantized":
        quantized_cache.check(program)
    body = Body(r, program, engine_of(r, program) if program.engine else None)
    if program.engine:
        body.engine.load(body)
    else:
        body.load()
    r.grad = False
    if body.programs.batch is not None:
        return body, *once(program, body)
    prompt = ops.integers(r, (Dim(job.batch, "B"), Dim(job.seq, "S")), "inputs")
    kind = versions.growing(program) if job.cache == "dynamic" or job.new_tokens == 0 else job.cache
    cache = (
        Cache(kind=kind, limit=job.cache_room, bits=job.cache_bits) if job.cache != "none" else None
    )
    if job.new_tokens == 0:
        r.mark("prefill")
        return body, prompt, cache, passed(program, body, prompt, None, cache, 0)
    said = spoken(r, program, prompt)
    r.mark("prefill")
    given = ops.integers(r, (said.rows, Dim(job.seq, "S")), "clone")
    first = [given]
    del given
    generated(program, body, first.pop(), said, cache, 0)
    for step in walked(job, r.passes or WALKED):
        r.mark("decode", "", step)
        if said.length < job.seq + step:
            said.ids = ops.integers(r, (said.rows, job.seq + step), "cat")
            said.positions = counted(r, said, job.seq + step)
        if cache is not None:
            skip_to(r, cache, job.seq + step - 1, step)
            if cache.states:
                from memfit.lower import captured  # written programs start without graphs

                captured.skip_to(r, program, cache, job.seq + step - 1, step)
            r.mark("decode", "", step)
        given = (
            ops.integers(r, (said.rows, said.length), "clone")
            if cache is None
            else newest(said.ids)
        )
        generated(program, body, given, said, cache, step)
    return body, cache, prompt, said


def once(program: Program, body: Body) -> tuple[object, ...]:
    """One forward pass of a model that generates nothing; its results are there when it ends. A
    decoder with a head of labels returns a cache beside them."""
    r, job, programs = body.r, program.job, body.programs
    assert programs.batch is not None
    inputs = programs.batch(r, program, Dim(job.batch, "B"), job.seq)
    r.mark("prefill")
    caches = programs.scores is not None and job.cache != "none"
    cache = Cache(kind=versions.growing(program)) if caches else None
    ctx = context(
        r, program, programs, (job.batch, job.seq), keys=job.seq, training=False, cache=cache
    )
    ctx.inputs = inputs
    hidden = body.forward(inputs[0], ctx, 0)
    if programs.scores is not None:
        hidden = programs.scores(hidden, body.model, body.ends, ctx)
    return inputs, hidden, cache, ctx.returned


def counted(r: Recorder, said: Said, length: int) -> Tensor:
    """The positions of this many tokens."""
    return ops.integers(r, (said.rows, said.directions * length), "cat")


def spoken(r: Recorder, program: Program, prompt: Tensor) -> Said:
    """The prompt as `generate` keeps it: once for each beam, with positions counted along its mask
    of ones. Where they have three directions, those of text stand beside them (transformers 5.23
    modeling_qwen2_vl.py _prepare_position_ids_for_generation)."""
    job = program.job
    rows = Dim(job.batch * job.beams, "B")
    ids = prompt if job.beams == 1 else ops.integers(r, (rows, job.seq), "repeat_interleave")
    held = [ops.integers(r, (1,), one) for one in ("pad", "end")]
    said = Said(
        rows=rows,
        ids=ids,
        positions=ops.integers(r, (rows, job.seq), "positions"),
        beams=job.beams,
        directions=4 if program.model.own_positions else 1,
        held=held,
    )
    if said.directions > 1:
        held.append(ops.integers(r, (rows,), "zeros"))
        said.positions = counted(r, said, job.seq)
    held += [said.positions, ops.integers(r, (rows,), "ones")]
    if (
        job.beams > 1
        # running_sequences and sequences, as long as they will get (generation/utils.py
        # _beam_search)
    ):
        said.sequences = [
            ops.integers(r, (rows, job.seq + job.new_tokens), "full") for _ in range(2)
        ]
    return said


def newest(tokens: Tensor) -> Tensor:
    """The last column."""
    return Tensor((tokens.shape[0], 1), tokens.format, tokens.storage)


def walked(job: Job, most: int = WALKED) -> list[int]:
    """The decoding passes that are written, beside those that pack a cache no more than `most`."""
    packing = quantized_cache.flushes(job.new_tokens - 1) if job.cache == "quantized" else []
    return sorted({*decoded(job.new_tokens, most), *packing})


def decoded(new_tokens: int, most: int = WALKED) -> list[int]:
    """The passes after the prefill: the prompt's own pass gives the first token. Fewer are some of
    the usual ones."""
    passes = max(0, new_tokens - 1)
    if passes <= most:
        return list(range(1, passes + 1))
    usual = [(WALKED - 1) * index // (most - 1) for index in range(most)]
    return sorted({1 + (passes - 1) * index // (WALKED - 1) for index in usual})


def skip_to(r: Recorder, cache: Cache, length: int, step: int) -> None:
    """Bring a growing cache to what it is before this pass, where passes in between were not
    walked; behind a window it grows no more."""
    if cache.kind == "static":
        return
    if cache.kind == "quantized":
        for where in [where for where, pair in cache.packed.items() if pair.tokens < length]:
            r.mark("decode", where, step)
            cache.packed[where] = quantized_cache.skipped(
                r, cache.packed, where, length, cache.bits
            )
        return
    for where in list(cache.past):
        r.mark("decode", where, step)
        del cache.past[where]
    for where, window in cache.windows.items():
        shapes = [(one.shape, one.format) for one in cache.layers[where]]
        room = min(length, window) if window > 0 else length
        if 0 < shapes[0][0][-2] < room - (room == window):
            r.mark("decode", where, step)
            del cache.layers[where]  # first: no pass holds it beside both of the new ones
            whole = [
                r.tensor((*shape[:-2], room, shape[-1]), format, "cat", "kv_cache")
                for shape, format in shapes
            ]
            cache.layers[where] = (last(whole[0], window), last(whole[1], window))
            del whole


def generated(
    program: Program, body: Body, ids: Tensor, said: Said, cache: Cache | None, step: int
) -> None:
    """One pass and the choice of the next token."""
    positions = said.positions if ids.shape[1] > 1 else newest(said.positions)
    scores = passed(program, body, ids, positions, cache, step)
    del ids, positions
    said.positions = counted(body.r, said, said.length + 1)
    if not infer_stage.begins(program):  # the first GPU has the tokens, and chooses
        said.ids = ops.integers(body.r, (said.rows, said.length + 1), "cat")
        return
    (chosen if said.beams == 1 else chosen_beams)(body.r, scores, said)
    if said.beams > 1 and cache is not None:
        reordered(body.r, cache, step)


def passed(
    program: Program,
    body: Body,
    ids: Tensor,
    positions: Tensor | None,
    cache: Cache | None,
    step: int,
) -> Tensor:
    """One pass from tokens to logits: those of the last one, or of all."""
    r, job = body.r, program.job
    rows, tokens = Dim(ids.shape[0], "B"), ids.shape[1]
    past = positions is not None and cache is not None
    ctx = context(
        r,
        program,
        body.programs,
        (rows, tokens),
        keys=job.seq + step if past else tokens,
        training=False,
        cache=cache,
        engine=body.engine,
    )
    ctx.positions = positions
    if cache is not None:
        cache.seen = ctx.keys - tokens
    del positions
    hidden = infer_stage.forward(body, program, ids, ctx, step)
    del ids
    if job.logits == "last" and not versions.whole_prompt(program):
        hidden = hidden.view(rows, 1, hidden.shape[-1])
    return infer_stage.logits(r, program, body, hidden, ctx)


def chosen(r: Recorder, scores: Tensor, said: Said) -> None:
    """The last position copied to fp32, which the loop's variable holds until the next copy, then
    argmax (generation/utils.py _sample)."""
    said.scores = [r.tensor((said.rows, scores.shape[-1]), FP32, "to", "logits")]
    chosen = ops.integers(r, (said.rows,), "argmax")
    said.ids = ops.integers(r, (said.rows, said.length + 1), "cat")
    done = r.tensor((said.rows,), BOOL, "eq")
    said.small = [
        chosen,
        ops.integers(r, (said.rows,), "and"),
        *(ops.integers(r, (said.rows, 1), "clone") for _ in range(2)),
    ]
    del done


def chosen_beams(r: Recorder, scores: Tensor, said: Said) -> None:
    """Log-probabilities are added to those of each beam; twice as many candidates are gathered as
    there are beams, then merged with the finished ones (generation/utils.py _beam_search)."""
    shape, length = (said.rows, scores.shape[-1]), said.sequences[0].shape[1]
    wide = r.tensor(shape, FP32, "to", "logits")
    said.scores[:1] = [wide]
    logs = r.tensor(shape, FP32, "log_softmax", "logits")
    del said.scores[1:]
    total = r.tensor(shape, FP32, "add", "logits")
    said.scores.append(total)
    del logs, wide, total
    candidates = [ops.integers(r, (2 * said.rows, length), "gather") for _ in range(2)]
    del candidates[0]
    running = ops.integers(r, (said.rows, length), "gather")
    merged = ops.integers(r, (3 * said.rows, length), "cat")
    said.sequences = [running, ops.integers(r, (said.rows, length), "gather"), *candidates]
    said.ids = Tensor((said.rows, said.length + 1), INT64, running.storage)
    del merged, candidates, running


def reordered(r: Recorder, cache: Cache, step: int) -> None:
    """Every layer's keys, then its values, are picked anew by beam (cache_utils.py
    reorder_cache)."""
    phase = r.phase
    for where in list(cache.layers):
        r.mark(phase, where, step)
        keys, values = cache.layers.pop(where)
        shapes = keys.shape, values.shape
        fresh = r.tensor(shapes[0], keys.format, "index_select", "kv_cache")
        del keys
        cache.layers[where] = (
            fresh,
            r.tensor(shapes[1], values.format, "index_select", "kv_cache"),
        )
        del values, fresh
    r.mark(phase, "", step)
