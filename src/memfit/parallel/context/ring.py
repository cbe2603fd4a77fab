"""torch's ring attention: every rank has an early and a late chunk of each sequence, keys and
values go round, and results are merged in fp32.

Read from torch 2.13 torch/distributed/tensor/experimental/_context_parallel/_attention.py
(`_templated_ring_attention`, its backward, `_SDPAMerger`, rotaters), which accelerate and
torchtitan turn on; its load balancing and conversion to fp32 are as torch has them by default. A
`cat` that is sent is held until what came is waited for.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from memfit import kernels
from memfit.errors import InputError
from memfit.formats import BOOL, FP32, Format
from memfit.lower import ops, views
from memfit.lower.attention.sdpa import Call, arithmetic
from memfit.lower.context import Context
from memfit.lower.masks import met
from memfit.lower.programs import Programs
from memfit.lower.recorder import Recorder
from memfit.lower.sequence_layout import SequenceLayout
from memfit.lower.tensors import Grads, Node, Shape, Tensor
from memfit.program import Program
from memfit.strategy import Strategy


class Ring(NamedTuple):
    """This rank's place among those of a sequence; `gathers`: all keys and values come at once
    (`set_rotate_method("allgather")`)."""

    rank: int
    size: int
    gathers: bool


def ring(program: Program) -> Ring | None:
    """Where context parallelism is torch's."""
    strategy = program.strategy
    if (
        program.engine
        or strategy.size("cp") == 1
        or strategy.cp is None
        or strategy.cp.style == "ulysses"
    ):
        return None
    return Ring(
        strategy.rank // strategy.size("tp") % strategy.cp.size,
        strategy.cp.size,
        strategy.cp.style == "allgather",
    )


def batch(r: Recorder, strategy: Strategy, shape: Shape) -> tuple[Tensor, ...]:
    """A rank's part of tokens, labels, positions and shifted labels, and behind them the whole ones
    and the order they were taken in, which the context keeps until it is left
    (`_context_parallel_buffers`; transformers 5.23 trainer.py `_prepare_context_parallel_inputs`).
    """
    sequences, tokens = shape
    own = [ops.integers(r, shape, "gather") for _ in range(4)]
    whole = [ops.integers(r, (sequences, tokens * strategy.size("cp")), "inputs") for _ in range(3)]
    return (
        *own,
        *whole,
        *(ops.integers(r, (1, tokens * strategy.size("cp")), "inputs") for _ in range(2)),
    )


def flash(q: Tensor, k: Tensor, v: Tensor, flops: int, ctx: Context, place: Ring) -> Tensor:
    """`flops`: of the whole sequence's attention on one rank, causal. A selective checkpoint sees
    one attention, and keeps what comes of it."""
    r = ctx.r
    chosen, found = r.chosen("attention"), list[Tensor]()

    def result(which: int) -> Tensor:
        found.extend(() if found else merged(r, q, k, v, place))
        return found[which]

    out, lse = (r.put_out(partial(result, which), chosen) for which in (0, 1))
    r.compute(
        "flash_attention",
        flops * place.size,
        2 * (q.count + k.count) * q.format.block_bytes,
        q.format.math,
        kept=chosen,
    )
    return r.node(
        "ring_attention", out, (q, k, v), back_ring, (q, k, v, out.detach(), lse), (place, flops)
    )


def merged(r: Recorder, q: Tensor, k: Tensor, v: Tensor, place: Ring) -> tuple[Tensor, Tensor]:
    """A turn with each rank's keys: first the own ones, then half of the keys or half of the
    queries."""
    keys = [whole(r, one) for one in (k, v)]
    coming: Tensor | None = None
    sent: Tensor | None = None
    total: Tensor | None = None
    sums: Tensor | None = None
    out: Tensor | None = None
    for turn in range(place.size):
        if turn > 0:
            sent = None
            keys = [] if coming is None else [coming]
        if turn < place.size - 1:
            sent = r.tensor((2 * k.count,), k.format, "cat", "communication")
            coming = passed(r, sent, place, coming, turn)
        part = turn > place.rank
        former, out = out, results(r, q, half=part)
        del former
        block = r.tensor((q.shape[0], q.shape[1], rows(q, part), 1), FP32, "flash_attention")
        wide = r.tensor(out.shape, FP32, "to")
        wide.strides = out.strides
        if total is None or sums is None:
            total, sums = wide, block
        else:
            total, sums = together(r, total, wide, sums, block, part)
        del wide, block
    assert total is not None
    assert sums is not None
    final = r.tensor(total.shape, q.format, "to")
    final.strides = total.strides
    del total, keys, coming, sent, out
    return final, sums


def rows(q: Tensor, half: bool) -> int:
    return q.shape[2] // 2 if half else q.shape[2]


def results(r: Recorder, q: Tensor, *, half: bool) -> Tensor:
    """Of all queries, or of the late half, lying as the queries do."""
    return r.like(views.narrow(r, q.detach(), 2, q.shape[2] // 2) if half else q, "flash_attention")


def together(
    r: Recorder, total: Tensor, wide: Tensor, sums: Tensor, block: Tensor, part: bool
) -> tuple[Tensor, Tensor]:
    """out - sigmoid(lse' - lse) · (out - out'); lse - logsigmoid(lse - lse'); where the late half
    alone was told, both are put together anew."""
    share = r.tensor(block.shape, FP32, "sigmoid")
    apart = r.tensor(wide.shape, FP32, "sub")
    scaled = r.tensor(wide.shape, FP32, "mul")
    del share, apart
    better = r.tensor(wide.shape, FP32, "sub")
    better.strides = wide.strides
    del scaled
    sum = r.tensor(block.shape, FP32, "sub")
    if not part:
        return better, sum
    sums = r.tensor(sums.shape, FP32, "cat")
    return r.tensor(total.shape, FP32, "cat"), sums


def whole(r: Recorder, x: Tensor) -> Tensor:
    """`contiguous()`."""
    return r.tensor(x.shape, x.format, "clone")


def passed(r: Recorder, sent: Tensor, place: Ring, before: Tensor | None, turn: int) -> Tensor:
    """What comes from the rank before: one exchange for each turn, or all ranks' at once."""
    if place.gathers:
        if before is not None:
            return before
        r.comm("all_gather", sent.format.bytes(sent.count) * place.size, place.size, "cp")
        return r.tensor((place.size * sent.count,), sent.format, "all_gather", "communication")
    return rotated(r, sent, place)


def rotated(r: Recorder, sent: Tensor, place: Ring) -> Tensor:
    r.comm("all_to_all", sent.format.bytes(sent.count), place.size, "cp")
    return r.tensor(sent.shape, sent.format, "all_to_all", "communication")


def back_ring(r: Recorder, node: Node, g: Tensor) -> Grads:
    """fp32 gradients of keys and values go round too, each rank adding its own."""
    q, k, v, out, _ = node.saved
    place, flops = node.extra
    query = r.tensor(q.shape, FP32, "zeros_like")
    summed = [r.tensor(one.shape, FP32, "zeros_like") for one in (k, v)]
    keys = [whole(r, one) for one in (k, v)]
    coming: Tensor | None = None
    sent: Tensor | None = None
    own: list[Tensor] = []
    going: Tensor | None = None  # of gradients,
    leaving: Tensor | None = None  # and what was sent
    for turn in range(place.size):
        held, keys = keys, keys if turn == 0 else [] if coming is None else [coming]
        if turn < place.size - 1:
            sent = r.tensor((2 * k.count,), k.format, "cat", "communication")
            coming = passed(r, sent, place, coming, turn)
        late = turn > place.rank
        lse = (
            r.tensor((q.shape[0], q.shape[1], rows(q, True)), FP32, "contiguous") if late else None
        )
        del held
        own = kernel(r, (q, k, g, out), own, late=late, early=0 < turn <= place.rank)
        if turn > 0:
            leaving = None
            assert going is not None
            summed = [going] if late else [r.tensor(one.shape, FP32, "cat") for one in (k, v)]
        flat = [r.tensor(one.shape, FP32, "flatten") for one in (k, v)] if turn == 0 else []
        leaving = r.tensor((2 * k.count,), FP32, "cat", "communication")
        del flat
        going = rotated(r, leaving, place)
        query = r.tensor(q.shape, FP32, "cat") if late else query
        del lse
    last = r.tensor(q.shape, q.format, "to")
    del query
    both = r.tensor((2 * k.count,), k.format, "to")
    r.compute(
        "flash_attention_backward",
        flops * place.size * 5 // 2,
        2 * (q.count + k.count) * q.format.block_bytes,
        q.format.math,
    )
    del leaving, going, own, sent, coming, keys, summed
    return last, both.view(*k.shape), both.view(*v.shape)


def kernel(
    r: Recorder,
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    before: list[Tensor],
    *,
    late: bool,
    early: bool,
) -> list[Tensor]:
    """One turn's gradients: of the late half of the queries, of the early half of the keys, or of
    all. Those of the turn before go when they are there."""
    q, k, g, out = given
    batch, heads, queries, head = q.shape
    queries, keys = rows(q, late), k.shape[2] // 2 if early else k.shape[2]
    format: Format = q.format
    made = [r.tensor((batch, heads, queries, head), format, "flash_attention")]
    made += [r.tensor((batch, k.shape[1], keys, head), format, "flash_attention") for _ in range(2)]
    copies = [
        r.tensor((batch, heads, queries, head), format, "contiguous")
        for one in (g, out)
        if apart(one, late)
    ]
    sizes = kernels.flash_backward(
        batch, heads, k.shape[1], queries, keys, head, element=format.block_bytes
    )
    scratch = [
        r.scratch(size, "flash_attention")
        for size in (sizes.softmax_d, sizes.dq_accum, sizes.dk_expanded, sizes.dv_expanded)
    ]
    del scratch, copies
    before.clear()
    return made


def apart(one: Tensor, half: bool) -> bool:
    """Whether the kernel copies it: what does not lie by tokens, as half of several sequences'
    tokens do not."""
    return (half and one.shape[0] > 1) or views.permuted(one, (0, 2, 1, 3)).strides is not None


def unseen(ctx: Context, place: Ring) -> Tensor | None:
    """An early and a late chunk of a sequence look like two sequences, unless they adjoin: a mask
    is made of what tokens belong together, which accelerate's hook then keeps from attention
    (transformers 5.23 masking_utils.py find_packed_sequence_indices; accelerate 1.15
    big_modeling.py _attach_context_parallel_hooks)."""
    if place.rank == place.size - 1:
        return None
    r, square = ctx.r, (ctx.batch, 1, ctx.tokens, ctx.tokens)
    alike = r.tensor(square, BOOL, "eq")
    some = met(r, alike, square)
    del alike
    causal = r.tensor(square, BOOL, "le")
    both = r.tensor(square, BOOL, "and")
    del some, causal
    return both


class RingLayout(SequenceLayout):
    """torch's context parallelism."""

    masked = False

    def __init__(self, place: Ring) -> None:
        self.place = place

    def has_last_token(self) -> bool:
        """The first rank has the late chunk."""
        return self.place.rank == 0

    def sdpa(self, call: Call, backend: str, ctx: Context) -> Tensor | None:
        if backend != "flash":
            message = "not supported yet: ring attention by another kernel than flash"
            raise InputError.one(
                message,
                where="use cp",
                hint="use a 16-bit `--precision` and heads of at most 256 values",
            )
        return flash(call.q, call.k, call.v, arithmetic(call), ctx, self.place)

    def unseen_mask(self, ctx: Context) -> Tensor | None:
        return unseen(ctx, self.place)

    def batch(self, r: Recorder, program: Program, shape: Shape) -> tuple[Tensor, ...] | None:
        return batch(r, program.strategy, shape)


def overlay(programs: Programs, program: Program) -> Programs:
    place = ring(program)
    return programs if place is None else programs.replace(sequences=RingLayout(place))


__all__ = ["overlay", "ring"]
