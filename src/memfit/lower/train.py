"""A training run: load, then steps until it repeats itself. Gradients, states and temporaries come
and go as in the real one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memfit import kernels
from memfit.formats import FP32
from memfit.lower import ops, versions
from memfit.lower.activation_offload import around_steps
from memfit.lower.body import Body
from memfit.lower.cache import Cache
from memfit.lower.compact import Copy
from memfit.lower.context import Context, context, leave_autocast
from memfit.lower.engine import ROOT
from memfit.lower.engines import engine_of
from memfit.lower.optimize import Stepper, release
from memfit.lower.programs import StageRunner
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Dim, Hooks, Tensor
from memfit.program import Program
from memfit.tape import LONGEST, Alloc, Free, Mark, Part, Phase

if TYPE_CHECKING:
    from memfit.lower.script import Keep

MICRO_BATCHES = 2  # of an accumulation: the second finds gradients there, as all later ones do


def train(
    r: Recorder, program: Program, folded: tuple[Program, Keep] | None = None
) -> tuple[object, ...]:
    """The steps; returns what is still held after the last one. `folded`: the program with one
    layer for many, whose passes are walked once, for all that keep them together."""
    job, engine = program.job, engine_of(r, program)
    body = Body(r, program, engine)
    engine.load(body)
    r.leave()
    r.adds = body.programs.kept is not None
    stepper = engine.stepper(body)
    body.hooks = around_steps(body)
    r.leave()
    buffers = body.programs.kept(r, program) if body.programs.kept is not None else ()
    scaler = [
        r.tensor((1,), FP32, "scaler", "optimizer")
        for _ in range(2 if job.precision == "autocast-fp16" else 0)
    ]
    if body.programs.validates:
        evaluate(r, program, body, job.batch, 0)
    first: Stretch | None = None
    if folded is not None and not (body.programs.keeps_outputs or job.keep_outputs):
        from memfit.lower.engine_hooks import Hooked
        from memfit.lower.script import Player

        if isinstance(engine, Hooked):
            body.player = Player(body, engine, folded[0], micro_batch, folded[1])
    steps, pipeline = engine.steps, stage_runner(r, program, body)
    for step in range(steps):
        first = run_step(body, stepper, pipeline, step, job.seq, first)
    if job.longest:
        run_step(body, stepper, pipeline, LONGEST, job.longest, None)
    if job.evaluate and pipeline is not None and pipeline.evaluates:
        pipeline.evaluate(steps - 1, job.eval_batch, job.seq)
    elif job.evaluate:
        evaluate(r, program, body, job.eval_batch, steps - 1)
    if job.merge and job.adapters and body.programs.merge is not None:
        body.programs.merge(r, program, [body.ends, *body.layers], steps - 1)
    body.player = None  # an engine and a body hold each other: its scripts would stay as long
    return body, stepper, scaler, buffers, pipeline


def stage_runner(r: Recorder, program: Program, body: Body) -> StageRunner | None:
    """The code that runs a stage's micro-batches; None: the model is whole."""
    if program.stage is None or body.programs.stages is None:
        return None
    return body.programs.stages(r, program, body)


def run_step(
    body: Body,
    stepper: Stepper,
    pipeline: StageRunner | None,
    step: int,
    tokens: int,
    first: Stretch | None,
) -> Stretch | None:
    """One optimizer step on sequences of `tokens`; `first` is repeated where that says all. Returns
    what a later step can repeat."""
    r, program, job = body.r, body.program, body.program.job
    tokens //= program.strategy.size("cp")
    if job.zero_grad == "before_backward":
        stepper.drop_gradients(step)
    leaves = [tensor for _, some in stepper.model_spans for tensor in some]
    fresh = all(tensor.grad is None for tensor in leaves)
    if first is not None and fresh:
        first.again(r, leaves, step)
    else:
        begin, place = len(r.events), len(r.marks)
        if pipeline is not None:
            body.engine.begin(True)
            with r.hooked(body.hooks):
                pipeline.step(step, tokens)
            body.engine.finish()
        for left in range(min(job.accumulate, MICRO_BATCHES) if pipeline is None else 0, 0, -1):
            body.engine.begin(left == 1)
            micro_batch(r, program, body, step, tokens)
        repeats = (
            body.engine.repeats and (pipeline is None or pipeline.repeats) and body.hooks is None
        )
        alike = fresh and repeats and not (body.programs.keeps_outputs or job.keep_outputs)
        first = Stretch(r, begin, place, leaves) if alike else None
    r.mark("step", "", step)
    body.engine.stepping()
    if job.clip and stepper.optimizer.when == "after" and body.engine.clips:
        clip(
            r,
            stepper,
            {
                bound.prefix: entry.times
                for entry, bound in zip(program.entries, body.layers, strict=True)
            },
            step,
        )
    stepper.step(step)
    body.engine.stepped(step)
    if job.zero_grad == "after_step":
        stepper.drop_gradients(step)
    return first


class Stretch:
    """The micro-batches of a step that began without gradients. A later step that begins so repeats
    them: the same events and blocks, which are all free again, without what stays for good (a
    workspace), and with its own gradients left behind."""

    def __init__(self, r: Recorder, begin: int, place: int, leaves: list[Tensor]) -> None:
        self.begin, self.end, self.marks = begin, len(r.events), range(place, len(r.marks))
        self.gradients = [
            None if tensor.grad is None or tensor.grad.storage is None else tensor.grad.storage.id
            for tensor in leaves
        ]
        own = r.events[begin:]
        made = {event[0]: at for at, event in enumerate(own, begin) if type(event) is Alloc}
        staying = (
            made.keys() - {event[0] for event in own if type(event) is Free} - set(self.gradients)
        )
        self.gone = sorted(made[id] for id in staying)

    def again(self, r: Recorder, leaves: list[Tensor], step: int) -> None:
        copy = Copy(self.begin, self.end, len(r.events), self.gone)
        at = self.begin
        for gone in (*self.gone, self.end):
            r.events += r.events[at:gone]
            at = gone + 1
        for number in self.marks:
            mark = r.events[r.marks[number]]
            assert isinstance(mark, Mark)
            place = copy.place(r.marks[number])
            r.events[place] = Mark(mark.phase, mark.where, step)
            r.marks.append(place)
            r.marked.append(r.marked[number])
        if r.notes is not None:
            r.notes.copies.append(copy)
        for tensor, id in zip(leaves, self.gradients, strict=True):
            if id is not None:
                tensor.grad = Tensor(tensor.shape, tensor.format, r.adopt(id, tensor))


def micro_batch(r: Recorder, program: Program, body: Body, step: int, tokens: int) -> None:
    """Forward, loss, backward, as a Trainer runs them: the outputs are dropped before backward."""
    r.mark("forward", "", step)
    body.batch = batch_of(r, body, program.job.batch, tokens)
    if body.player is None or not body.player.play(step, tokens):
        passes(r, program, body, step)


def passes(r: Recorder, program: Program, body: Body, step: int) -> None:
    """Layer by layer."""
    hooks = body.hooks
    if hooks is not None:
        hooks.begin()
    with r.hooked(hooks):
        loss = forward_loss(r, program, body, body.batch, "forward", step)
        r.mark("backward", "", step)
        seed = r.like(loss, "ones_like")
        r.thread = "backward"
        r.backward(loss, seed)
        r.thread = "forward"
        if hooks is not None:
            hooks.over()
    body.engine.finish()
    r.over()
    del loss
    if body.programs.keeps_outputs or program.job.keep_outputs:
        r.former, r.kept = r.kept, []
    r.let_go(r.kept)


def batch_of(r: Recorder, body: Body, batch: int, tokens: int) -> tuple[Tensor, ...]:
    """Token ids, labels and, with padding, which tokens are real; the loop's variable holds them
    until the next batch."""
    shape, sequences = (Dim(batch, "B"), Dim(tokens, "S")), body.programs.sequences
    if body.programs.batch is not None:
        return body.programs.batch(r, body.program, shape[0], tokens)
    own = sequences.batch(r, body.program, shape)
    if own is not None:
        return own
    usual = body.program.job.packing and not (sequences.counted and r.grad)
    together = 2 if usual else 3  # positions, or which tokens are real
    return tuple(ops.integers(r, shape, "inputs") for _ in range(together))


def forward_loss(
    r: Recorder, program: Program, body: Body, inputs: tuple[Tensor, ...], phase: Phase, step: int
) -> Tensor:
    """One forward pass with labels; what the model returns beside the loss goes when the caller has
    it."""
    ids, labels, *_ = inputs
    training = phase == "forward"
    cache = (
        Cache(kind=versions.returned_cache(program))
        if versions.fills_cache(program, training)
        else None
    )
    ctx = context(
        r,
        program,
        body.programs,
        ids.shape,
        keys=ids.shape[1],
        training=training,
        cache=cache,
        engine=body.engine,
    )
    ctx.inputs = inputs
    ctx.outputs, ctx.positions = (
        body.outputs,
        inputs[2] if ctx.shifted else ctx.matrices.positions(ctx),
    )
    ids = body.engine.before(ROOT, ids)
    run_loss = body.programs.losses[program.job.loss]
    hooks = r.hooks
    with r.hooked(None if hooks is not None and hooks.model_only else hooks):
        loss = run_loss(hidden(body, ids, ctx, step, hooks), labels, body.model, body.ends, ctx)
    loss = body.engine.after(ROOT, loss)
    leave_autocast(ctx)
    wide = in_fp32(ctx, step)
    if wide:
        ctx.returned.clear()
    body.engine.handed(wide[0][1] if wide else ctx.returned)
    if program.job.keep_outputs and training:
        kept = ctx.returned[:] if not wide else [one for _, some in wide for one in some]
        kept += ctx.caches
        replace_outputs(r, body, kept, None if len(wide) > 1 else ctx.cache, step)
    ctx.returned.clear()
    ctx.caches.clear()
    if ctx.cache is not None and ctx.cache is not body.cache:
        forget(r, ctx.cache, step)
    release(r, wide, step, phase)
    return loss


def hidden(body: Body, ids: Tensor, ctx: Context, step: int, hooks: Hooks | None) -> Tensor:
    with ctx.r.hooked(hooks):
        return body.forward(ids, ctx, step)


def replace_outputs(
    r: Recorder, body: Body, outputs: list[Tensor], cache: Cache | None, step: int
) -> None:
    """The loop's variable takes what this forward returned; what the one before did goes only
    now."""
    old, body.cache = body.cache, cache
    body.outputs[:] = outputs
    r.let_go(r.former)
    if old is not None:
        forget(r, old, step)


def in_fp32(ctx: Context, step: int) -> list[tuple[str, list[Tensor]]]:
    """Under autocast accelerate makes fp32 copies of all 16-bit outputs, while those still stand,
    and hands the others on: of the logits, and of keys and values where the cache is a tuple of
    them (accelerate 1.0 and 1.15 utils/operations.py convert_outputs_to_fp32)."""
    if ctx.autocast is None or not ctx.job.hugging:
        return []
    r = ctx.r
    outputs: list[tuple[str, list[Tensor], Part]] = [("", ctx.returned, "logits")]
    if ctx.cache is not None and ctx.cache.kind == "tuple":
        outputs += [(where, list(pair), "kv_cache") for where, pair in ctx.cache.layers.items()]
    made: list[tuple[str, list[Tensor]]] = []
    for where, tensors, part in outputs:
        r.mark(r.phase, where, step)
        made.append(
            (
                where,
                [
                    r.tensor(one.shape, FP32, "float", part) if one.format.block_bytes == 2 else one
                    for one in tensors
                ],
            )
        )
    r.mark(r.phase, "", step)
    return made


def forget(r: Recorder, cache: Cache, step: int) -> None:
    """The outputs go, and the cache with them; what is a layer's goes in its own span."""
    phase, span = r.phase, r.span
    for where in list(cache.layers):
        r.mark(phase, where, step)
        del cache.layers[where]
        cache.counts.pop(where, None)
    r.mark(phase, span, step)


def evaluate(r: Recorder, program: Program, body: Body, batch: int, step: int) -> None:
    """One evaluation batch without gradients, logits and loss alive together (transformers 5.23
    trainer.py prediction_step)."""
    r.mark("evaluate", "", step)
    r.grad = False
    parts = program.strategy.size("cp") if body.programs.sequences.evaluates else 1
    inputs = batch_of(r, body, batch, program.job.seq // parts)
    loss = forward_loss(r, program, body, inputs, "evaluate", step)
    r.grad = True
    del loss, inputs


def clip(r: Recorder, stepper: Stepper, times: Mapping[str, int], step: int) -> None:
    """A norm per tensor, stacked, and the coefficient; gradients are scaled in place (torch 2.13
    nn/utils/clip_grad.py). `times` says how many layers a span stands for."""
    sizes = [
        tensor.count
        for where, some in stepper.model_spans
        for tensor in some
        for _ in range(times.get(where, 1))
    ]
    partial = r.scratch(kernels.foreach_norm(tuple(sizes)), "foreach_norm")
    norms = []
    for where, some in stepper.model_spans:
        r.mark("step", where, step)
        norms.append((where, [r.tensor((1,), tensor.format, "norm") for tensor in some]))
    r.mark("step", "", step)
    stacked = r.tensor((len(sizes),), FP32, "stack")
    del partial, stacked
    release(r, norms, step)
    r.mark("step", "", step)
