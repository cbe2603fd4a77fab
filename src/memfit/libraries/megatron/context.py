"""Context parallelism around Transformer Engine's attention: every rank has two pieces of each
sequence, one from either end (TE 2.11 pytorch/attention/dot_product_attention/context_parallel.py).

What the all-to-all's results are put in order in is made on a stream of TE's own, and so lies in
another pool. Left out: sequence lengths on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from memfit.formats import FP32
from memfit.libraries.megatron.ranks import Ranks, bytes_of
from memfit.lower import ops
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Shape, Tensor

STREAM = 2  # TE's cp_stream
Core: TypeAlias = "Callable[[Tensor, Tensor, Tensor], Tensor]"


def around(run: Core, ctx: Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over the whole sequence for (S/ranks, B, heads, H)."""
    cp = ctx.program.strategy.cp
    if cp is None or cp.size == 1:
        return run(q, k, v)
    q, k, v = (ops.packed(ctx.r, one) for one in (q, k, v))
    ranks = Ranks(size=cp.size, name="cp")
    if cp.style == "ulysses":
        return inside(ctx.r, run, ranks, q, k, v)
    return (
        ring(ctx, run, ranks, q, k, v) if cp.style == "ring" else gathered(ctx, run, ranks, q, k, v)
    )


# -------------------------------------------------------------------------------------- all-to-all
def inside(r: Recorder, run: Core, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads are exchanged for tokens before the kernel and back behind it; kept are the exchanged
    ones and the kernel's own result (AttnFuncWithCPAndQKVOA2A)."""
    fresh = exchanged(r, ranks, [q, k, v], True)
    for one in fresh:
        one.needs = q.needs
    result = run(*fresh)
    out = exchanged(r, ranks, [result], False)[0]

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        result, *fresh = node.saved
        whole = exchanged(r, ranks, [g], True)[0]
        r.backward(result, whole)
        del whole, result
        return exchanged(r, ranks, [one.grad for one in fresh if one.grad is not None], False)

    return r.node("all_to_all", out, (q, k, v), back, (result, *fresh))


def exchanged(r: Recorder, ranks: Ranks, given: list[Tensor], whole: bool) -> list[Tensor]:
    """All-to-all of each: a copy in the order of the ranks, what arrives, and that in the order of
    the tokens. What is sent stays until all are through (flash_attn_a2a_communicate). `whole`: to
    all tokens of some heads."""
    sent: list[Tensor] = []
    arrived: list[Tensor] = []
    done: list[Tensor] = []
    for index in range(len(given) + 2):
        if 0 < index < len(given) + 1:
            arrived.append(ranks.exchange(r, sent[index - 1]))
        if index < len(given):
            sent.append(
                r.tensor(given[index].shape, given[index].format, "contiguous", "communication")
            )
        if index > 1:
            one = arrived[index - 2]
            shape = turned(one.shape, ranks.size, whole)
            done.append(
                Tensor(
                    shape,
                    one.format,
                    r.scratch(one.format.bytes(one.count), "index_select", r.part, STREAM),
                )
            )
            arrived[index - 2] = one = done[-1]
            del one
    return done


def turned(shape: Shape, size: int, whole: bool) -> Shape:
    tokens, batch, heads, head = shape
    return (
        (tokens * size, batch, heads // size, head)
        if whole
        else (tokens // size, batch, heads * size, head)
    )


# -------------------------------------------------------------------------------------------- ring
def ring(ctx: Context, run: Core, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys and values pass from rank to rank, into a new buffer at every step, and all of them stay
    until the end, as do the results of the steps: of all queries where the keys are earlier, else
    of half of them. They are added up in fp32 (AttnFuncWithCPAndKVP2P)."""
    r = ctx.r
    number = ctx.program.strategy.rank // ctx.program.strategy.size("tp") % ranks.size
    buffers = [r.tensor((2, *k.shape), k.format, "cat", "communication")]
    steps: list[Tensor] = []
    for index in range(ranks.size):
        if index + 1 < ranks.size:
            buffers.append(r.like(buffers[-1], "empty", "communication"))
            r.comm("send_recv", bytes_of(buffers[-1]), ranks.size, ranks.name)
        half = index > number
        steps.append(without_graph(r, run, part(q, half), k, v))
    wide = r.tensor(q.shape, FP32, "mul")
    out = r.like(q, "to")
    lse = r.tensor((q.shape[1], q.shape[2], q.shape[0]), FP32, "clone")
    kv = buffers[-1]
    del wide, steps, buffers

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        """Two buffers of keys, values and their gradients; at every step the three gradients of the
        kernel, added to what is there."""
        q, kv, *_ = node.saved
        travel = [r.tensor((2, *kv.shape), kv.format, "empty", "communication") for _ in range(2)]
        total = r.like(q, "empty")
        for _ in range(ranks.size):
            r.comm("send_recv", 2 * bytes_of(kv), ranks.size, ranks.name)
            made = r.like(q, "ring"), r.like(kv, "ring")
            del made
        to_k, to_v = (r.tensor(kv.shape[1:], kv.format, "contiguous") for _ in range(2))
        del travel
        return [total, to_k, to_v]

    return r.node("ring", out, (q, k, v), back, (q, kv, out.detach(), lse))


def part(x: Tensor, half: bool) -> Tensor:
    return Tensor((x.shape[0] // 2, *x.shape[1:]), x.format, x.storage) if half else x.detach()


def without_graph(r: Recorder, run: Core, *given: Tensor) -> Tensor:
    grad, r.grad = r.grad, False
    out = run(*(one.detach() for one in given))
    r.grad = grad
    return out.detach()


# -------------------------------------------------------------------------------------- all-gather
def gathered(ctx: Context, run: Core, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All keys and values on every rank, gathered and put in order, for as long as the kernels run
    on the two pieces; backward gathers them again and scatters their gradients
    (AttnFuncWithCPAndKVAllGather)."""
    r = ctx.r

    keys = [r.like(ranks.gather(r, one), "index_select", "communication") for one in (k, v)]
    pieces = [without_graph(r, run, part(q, True), *keys) for _ in range(2)]
    out = r.like(q, "empty")
    lse = r.tensor((q.shape[1], q.shape[2], q.shape[0]), FP32, "lse")
    del keys, pieces
    saved = (q.detach(), k.detach(), v.detach(), out.detach(), lse)

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        q, k, v, *_ = node.saved
        keys = [r.like(ranks.gather(r, one), "index_select", "communication") for one in (k, v)]
        to_q, sums = r.like(q, "empty"), [r.like(one, "zeros", "communication") for one in keys]
        for _ in range(2):
            made = (
                r.tensor((q.shape[0] // 2, *q.shape[1:]), q.format, "ring"),
                *(r.like(one, "ring") for one in keys),
            )
            del made
        ordered = [r.like(one, "index_select", "communication") for one in sums]
        del sums, keys
        return [to_q, *(ranks.scatter(r, one) for one in ordered)]

    return r.node("all_gather", out, (q, k, v), back, saved)
