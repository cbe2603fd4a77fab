"""SFTTrainer's own heads: hidden states to the loss, with a part of the logits at a time.

Fused (trl 1.15 and 1.16 kernels/chunked_logprob.py, trainer/utils.py `add_fused_lm_head`): one tile
of logits, made once more in backward, where the gradients are added up in fp32 and cast at the end.
Chunked (trl 1.4 to 1.14 trainer/sft_trainer.py `_chunked_cross_entropy_loss`): checkpoints of 256
tokens each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from memfit import kernels
from memfit.formats import BOOL, FP32, Format
from memfit.lazy_dataclass import dataclass
from memfit.libraries.trl.check import head_of
from memfit.lower import ops, views
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.moe.ops import rows_of
from memfit.lower.programs import Programs
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.model import Model
from memfit.program import Program

ROWS = 4096  # kernels/chunked_logprob.py TOKEN_CHUNK_SIZE
COLUMNS = 32768  # trainer/utils.py _CHUNKED_LOGPROB_CHUNK_SIZE
ADDS_WIDE = (
    2,
    8,
)  # torch: a product of 16-bit matrices is added to an fp32 one without fp32 copies (_MM_OUT_DTYPE)
CHUNK = 256  # trainer/sft_trainer.py _CHUNKED_LM_HEAD_CHUNK_SIZE
SORTS = (
    1,
    8,
)  # trl: from then on ignored tokens are sorted to the end; before, they were left out by a mask
NARROW = (1, 13)  # trl: until then the head's product was of fp32 copies
STATISTICS = 7  # of each token, while the forward runs


def overlay(programs: Programs, program: Program) -> Programs:
    """With the head that this version of TRL has."""
    head = HEADS.get(head_of(program.job))
    return (
        programs
        if head is None
        else programs.replace(
            losses={**programs.losses, "plain": head, "chunked": head}, own_head=True
        )
    )


@dataclass(slots=True, kw_only=True)
class Call:
    """Hidden states (T, D) times a weight (V, D), in the dtype `product`."""

    ctx: Context
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    product: Format

    def tile(self) -> Tensor:
        return self.ctx.r.tensor(
            (min(self.hidden.shape[0], ROWS), COLUMNS), self.product, "empty", "temporaries"
        )

    def cast(self, x: Tensor, rows: int) -> Tensor | None:
        """Rows of `x`, where its dtype is another."""
        if x.format is self.product:
            return None
        return self.ctx.r.tensor((rows, *x.shape[1:]), self.product, "to", "temporaries")

    def multiply(self, rows: int, columns: int) -> None:
        width, moved = self.hidden.shape[1], rows * columns
        moved += (rows + columns) * width
        self.ctx.r.compute(
            "linear",
            2 * rows * columns * width,
            moved * self.product.block_bytes,
            self.product.math,
        )

    def add(self, rows: int, columns: int) -> None:
        """A product of (rows, inner) and (inner, D) added to an fp32 matrix; its operands may have
        to be fp32, too."""
        r, inner, width = self.ctx.r, columns, self.hidden.shape[1]
        wide = self.product is FP32 or self.ctx.torch >= ADDS_WIDE
        copies = (
            ()
            if wide
            else (r.tensor((rows, inner), FP32, "float"), r.tensor((inner, width), FP32, "float"))
        )
        self.multiply(rows, columns)
        del copies


def pieces(total: int, size: int) -> Iterator[int]:
    return (min(size, total - first) for first in range(0, total, size))


def fused(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """Hidden states and labels of all tokens but each sequence's last (where labels come shifted,
    of its last rank) are copied by a mask; then one value a token, put back by it. A weight that
    tensor parallelism cut is gathered first."""
    r, name = ctx.r, model.head.name
    part, r.part, r.where = r.part, "activations", ""
    shape = (ctx.batch, ctx.tokens if ctx.shifted else ctx.tokens - 1)
    rows = (
        ctx.batch * (shape[1] - ctx.programs.sequences.has_last_token())
        if ctx.shifted
        else ctx.batch * shape[1]
    )
    mask = r.tensor(shape, BOOL, "ne")
    weight = ctx.matrices.full_weight(ctx, bound[f"{name}.weight"])
    chosen = picked(
        r, hidden if ctx.shifted else views.narrow(r, hidden, 1, ctx.tokens - 1), rows, mask
    )
    targets = ops.integers(r, (rows,), "index", "activations")
    call = Call(
        ctx=ctx,
        hidden=chosen,
        weight=weight,
        bias=bound.tensors.get(f"{name}.bias"),
        product=ctx.autocast or hidden.format,
    )
    logs, entropies, hits = log_probs(call, targets)
    del chosen, call, weight
    outputs = [scattered(r, one, shape, mask) for one in (logs, entropies, hits)]
    ctx.returned += outputs
    del logs, entropies, hits, outputs
    lost = ops.scale(r, ctx.returned[-3], "neg")
    total = r.tensor((1,), FP32, "sum")
    loss = ops.scale(r, r.node("sum", total, (lost,), back_sum, extra=shape), "div")
    r.part = part
    return loss


def picked(r: Recorder, x: Tensor, rows: int, mask: Tensor) -> Tensor:
    """`x[mask]`: its places are found first, one number a dimension and row."""
    places = ops.integers(r, (rows, len(mask.shape)), "nonzero", "temporaries")
    out = views.indexed(r, x, (rows, x.shape[-1]), mask)
    del places
    return out


def scattered(r: Recorder, x: Tensor, shape: tuple[int, ...], mask: Tensor) -> Tensor:
    """`x.new_zeros(mask.shape).masked_scatter(mask, x)`."""
    zeros = r.tensor(shape, x.format, "new_zeros", "temporaries")
    out = r.tensor(shape, x.format, "masked_scatter")
    del zeros
    return r.node("masked_scatter", out, (x,), back_scattered, (mask,), x.shape)


def back_scattered(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.tensor(node.extra, g.format, "masked_scatter"),)


def back_sum(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (Tensor(node.extra, g.format, g.storage),)


def log_probs(call: Call, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each token's log-probability and entropy, and whether it was the likeliest; kept are operands
    and two values a token."""
    r, shape, vocabulary = call.ctx.r, call.hidden.shape[:1], call.weight.shape[0]
    running = [r.tensor(shape, FP32, "zeros", "temporaries") for _ in range(STATISTICS)]
    tile = call.tile()
    rows: Tensor | None = None
    for count in pieces(shape[0], ROWS):
        rows = call.cast(call.hidden, count)
        for wide in pieces(vocabulary, COLUMNS):
            columns = call.cast(call.weight, wide)
            call.multiply(count, wide)
            del columns
    scale = r.tensor(shape, FP32, "log", "temporaries")
    normal = r.tensor(shape, FP32, "add")
    del scale
    logs = r.tensor(shape, FP32, "sub", "temporaries")
    ratio = r.tensor(shape, FP32, "div", "temporaries")
    entropies = r.tensor(shape, FP32, "sub")
    del ratio
    compared = [r.tensor(shape, BOOL, op, "temporaries") for op in ("ge", "gt")]
    hits = r.tensor(shape, BOOL, "bitwise_and", "temporaries")
    del compared, running, tile, rows
    inputs = (
        (call.hidden, call.weight) if call.bias is None else (call.hidden, call.weight, call.bias)
    )
    saved = (call.hidden, call.weight, call.bias, targets, normal, entropies)
    return (
        r.node("log_probs", logs, inputs, back_log_probs, saved, (call.ctx, call.product)),
        entropies,
        hits,
    )


def back_log_probs(r: Recorder, node: Node, g: Tensor) -> Grads:
    """Tile by tile once more; each becomes the gradient of its logits."""
    ctx, product = node.extra
    call = Call(
        ctx=ctx, hidden=node.saved[0], weight=node.saved[1], bias=node.saved[2], product=product
    )
    hidden, weight = node.inputs[:2]
    vocabulary, total = call.weight.shape[0], call.hidden.shape[0]
    wanted = [(call.hidden, hidden, 0), (call.weight, weight, 1)] + (
        [(call.bias, node.inputs[2], 2)] if call.bias is not None else []
    )
    sums = [
        None
        if needed is None
        else r.tensor(
            one.shape,
            FP32,
            "zeros",
            ops.sole_part(r, node, at) if one.format is FP32 else "temporaries",
        )
        for one, needed, at in wanted
    ]
    tile = call.tile()
    rows = columns = None
    for count in pieces(total, ROWS):
        rows = call.cast(call.hidden, count)
        for wide in pieces(vocabulary, COLUMNS):
            columns = call.cast(call.weight, wide)
            call.multiply(count, wide)
            if sums[0] is not None:
                call.add(count, wide)
            if sums[1] is not None:
                call.add(wide, count)
    found = [
        made
        if made is None or made.format is one.format
        else r.tensor(one.shape, one.format, "to", ops.sole_part(r, node, at))
        for made, (one, _, at) in zip(sums, wanted, strict=True)
    ]
    del sums, tile, rows, columns
    return found


# ------------------------------------------------------------------------------------------ chunks
def chunked(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """The tokens that count in rows, then a checkpoint for every 256 of them."""
    r, version = ctx.r, ctx.job.version("trl")
    part, r.part, r.where = r.part, "activations", ""
    tokens, width = ctx.tokens if ctx.shifted else ctx.tokens - 1, hidden.shape[-1]
    rows = ctx.batch * tokens
    weight = ctx.matrices.full_weight(ctx, bound[f"{model.head.name}.weight"])
    flat = views.reshape(
        r, hidden if ctx.shifted else views.narrow(r, hidden, 1, tokens), rows, width
    )
    targets = labels if ctx.shifted else ops.integers(r, (rows,), "clone", "activations")
    valid = r.tensor((rows,), BOOL, "ne")
    if version >= SORTS:
        keys = r.tensor((rows,), BOOL, "to")
        order = ops.integers(r, (rows,), "sort", "activations")
        scratch = r.scratch(kernels.sort_buffers(1, rows, 1), "sort")
        del keys, scratch
        flat = rows_of(r, flat, order)
        del order
    else:
        flat = picked(r, flat, rows, valid)
    targets = ops.integers(r, (rows,), "index", "activations")
    total = r.tensor((1,), FP32, "zeros")
    if rows > CHUNK:
        r.shared.add(f"{model.head.name}.weight")  # every chunk has a gradient for it
    run = partial(chunk, targets=targets, model=model, bound=bound, weight=weight, ctx=ctx)
    for count in pieces(rows, CHUNK):
        one = views.narrow(r, flat, 0, count)
        total = ops.add(r, total, r.checkpoint(run, one))
    r.part = part
    return ops.scale(r, total, "div")


def chunk(
    x: Tensor, *, targets: Tensor, model: Model, bound: Bound, weight: Tensor, ctx: Context
) -> Tensor:
    """The loss of some tokens; accuracy and entropy beside it are counted with what they would save
    for a backward."""
    r, name, version, part = ctx.r, model.head.name, ctx.job.version("trl"), ctx.r.part
    kind = x.format if version >= NARROW else FP32
    product = ctx.autocast or kind
    given, factor = (ops.cast(r, ops.cast(r, one, kind), product) for one in (x, weight))
    r.part = "logits"
    scores = ops.linear(r, given, factor, None, weight.shape[0])
    del given, factor
    if version >= NARROW:
        scores = ops.cast(r, scores, FP32)
    if f"{name}.bias" in bound.tensors:
        scores = ops.add(r, scores, ops.cast(r, bound[f"{name}.bias"], FP32))
    if model.config.get("logit_scale") not in (None, 1.0):
        scores = ops.scale(r, scores)
    if model.softcap:
        scores = ops.scale(r, ops.activation(r, ops.scale(r, scores), "tanh"))
    logs = ops.log_softmax(r, ops.cast(r, scores, FP32))  # under autocast, which does that
    loss = ops.nll_loss(r, logs, targets)
    entropy(r, logs, version >= SORTS)
    r.part = part
    return loss


def entropy(r: Recorder, logs: Tensor, counted: bool) -> None:
    """`-(logs.exp() * logs).sum(-1)`, times which tokens count."""
    raised = r.like(logs, "exp")
    raised = r.node("exp", raised, (logs,), ops.back_like, (raised.detach(),), logs.shape)
    found = ops.mul(r, raised, logs)
    del raised
    found = r.node(
        "sum", r.tensor(logs.shape[:1], FP32, "sum"), (found,), back_sum, extra=logs.shape
    )
    if counted:
        found = r.node(
            "mul",
            r.like(found, "mul"),
            (found,),
            ops.back_like,
            (r.tensor(logs.shape[:1], BOOL, "ne"),),
            found.shape,
        )


Head = Callable[[Tensor, Tensor, Model, Bound, Context], Tensor]
HEADS: dict[str, Head] = {"fused": fused, "chunked": chunked}
