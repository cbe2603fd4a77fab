"""Ulysses attention of DeepSpeed (ALST) under transformers: every rank has some tokens of all heads
between attentions, and in them all tokens of some heads (deepspeed 0.19.8
runtime/sequence_parallel/ulysses_sp.py UlyssesSPAttentionHF; sequence/layer.py
`_dim_zero_all_to_all`).

Left out: what the data loader holds of whole sequences while it cuts them, before the forward
begins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memfit.formats import INT64
from memfit.lower import ops, views
from memfit.lower.context import Context
from memfit.lower.programs import Programs
from memfit.lower.recorder import Recorder
from memfit.lower.sequence_layout import Run, SequenceLayout
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.program import Program


def ranks(program: Program) -> int:
    """That share the tokens of a sequence this way."""
    cp = program.strategy.cp
    return 1 if program.engine or cp is None or cp.style != "ulysses" else cp.size


def around(run: Run, q: Tensor, k: Tensor, v: Tensor, module: Any, ctx: Context) -> Tensor:
    """`run` on all tokens of this rank's heads; queries come and results go as (B, N, S, H) of this
    rank's tokens."""
    r, size = ctx.r, ranks(ctx.program)
    batch, heads, tokens, head = q.shape
    q, k, v = (views.permute(r, one, 2, 0, 1, 3) for one in (q, k, v))
    positions = [r.tensor((batch, tokens), INT64, "empty_like", "temporaries") for _ in range(size)]
    positions.append(r.tensor((batch, tokens * size), INT64, "cat", "temporaries"))
    r.comm("all_gather", 8 * batch * tokens * size, size, "cp")
    keys = [together(r, one, size) for one in (q, k, v)]
    queries, *keys = [by_heads(r, keys) for _ in range(3)]
    local = replace(module, heads=heads // size, kv_heads=max(1, module.kv_heads // size))
    blind = replace(ctx, masks={})  # a mask is of this rank's tokens, and taken away
    context = views.transpose(
        r,
        ops.packed(r, views.transpose(r, run(queries, keys[0], keys[1], local, blind), 1, 2)),
        0,
        1,
    )
    context = views.reshape(r, context, tokens * size, batch, heads // size * head)
    out = apart(r, context, size)
    out = views.reshape(r, views.permute(r, out, 1, 0, 2), batch, tokens, heads, head)
    del positions, queries, keys, context
    return views.transpose(r, out, 1, 2)


def by_heads(r: Recorder, waiting: list[Tensor]) -> Tensor:
    """The first of (S, B, N, H) as (B, N, S, H), contiguous; what it was goes."""
    return ops.packed(r, views.permute(r, waiting.pop(0), 1, 2, 0, 3))


def together(r: Recorder, x: Tensor, size: int) -> Tensor:
    """(S / size, B, N, H) as (S, B, N / size, H); where there are fewer heads than ranks, each is
    copied first."""
    tokens, batch, heads, head = x.shape
    if heads < size:
        wide = views.expand(
            r,
            views.reshape(r, x, tokens, batch, heads, 1, head),
            tokens,
            batch,
            heads,
            size // heads,
            head,
        )
        x = views.reshape(r, wide, tokens, batch, size, head)
        heads = size
    x = ops.packed(
        r,
        views.permute(
            r, views.reshape(r, x, tokens, batch, size, heads // size, head), 2, 0, 1, 3, 4
        ),
    )
    return views.reshape(r, exchanged(r, x, size), tokens * size, batch, heads // size, head)


def apart(r: Recorder, x: Tensor, size: int) -> Tensor:
    """(S, B, N·H / size) as (S / size, B, N·H)."""
    tokens, batch, width = x.shape
    x = ops.packed(r, views.reshape(r, x, size, tokens // size, batch, width))
    out = exchanged(r, x, size)
    return views.reshape(r, views.permute(r, out, 1, 2, 0, 3), tokens // size, batch, width * size)


def exchanged(r: Recorder, x: Tensor, size: int) -> Tensor:
    """All-to-all over the first dimension; what comes back is made contiguous first."""

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        return (sent(r, ops.packed(r, g), size),)

    return r.node("all_to_all", sent(r, x, size), (x,), back)


def sent(r: Recorder, x: Tensor, size: int) -> Tensor:
    r.comm("all_to_all", x.format.bytes(x.count), size, "cp")
    return r.tensor(x.shape, x.format, "all_to_all")


class UlyssesLayout(SequenceLayout):
    """DeepSpeed's context parallelism, which training alone runs (accelerate 1.15 accelerator.py,
    `disable_in_eval`)."""

    counted = True
    evaluates = False

    def __init__(self, place: int, size: int) -> None:
        self.place, self.size = place, size

    def has_last_token(self) -> bool:
        return self.place == self.size - 1

    def attend(
        self, run: Run, q: Tensor, k: Tensor, v: Tensor, module: Any, ctx: Context
    ) -> Tensor:
        return (around if ctx.training else call)(run, q, k, v, module, ctx)


def call(run: Run, q: Tensor, k: Tensor, v: Tensor, module: Any, ctx: Context) -> Tensor:
    return run(q, k, v, module, ctx)


def overlay(programs: Programs, program: Program) -> Programs:
    size, strategy = ranks(program), program.strategy
    if size == 1:
        return programs
    place = strategy.rank // strategy.size("tp") % size
    return programs.replace(sequences=UlyssesLayout(place, size))
