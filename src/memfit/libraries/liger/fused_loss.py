"""Head and cross-entropy in one: Liger's fused linear loss makes the gradients in the forward, a
chunk of tokens at a time.

`ops/fused_linear_cross_entropy.py` of liger-kernel 0.4.2, 0.5.2, 0.7.0 and 0.8.5. How a chunk's
gradient reaches the weight's decides what is held: by `addmm` in place (0.5, 0.6, and 0.8.3 on), or
through a 16-bit and an fp32 matrix of the weight's size (0.6.2 .. 0.8.2).
"""

from __future__ import annotations

from memfit.formats import BOOL, FP32, Format
from memfit.lazy_dataclass import dataclass
from memfit.lower import head
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.linears import cast_weight
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.model import Model

NEWEST = (0, 8)
WIDENS_UNTIL = (0, 5)  # until then a chunk's logits are made fp32 and cast back
SCALES_UNTIL = (0, 6)  # until then their gradient is a scaled copy
SUMS_FROM = (
    0,
    6,
)  # from then until the newest, the weight's gradient takes a sum of two temporaries


def liger(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """LigerForCausalLMLoss: labels padded and shifted, then the fused loss
    (transformers/model/loss_utils.py)."""
    if (
        not ctx.training
    ):  # an evaluation gets its logits (transformers/model/llama.py lce_forward skip_logits)
        scores = head.logits(hidden, model, bound, ctx)
        ctx.returned.append(scores)
        return head.loss(scores, labels, model, ctx)
    r = ctx.r
    part, r.part = r.part, "logits"
    r.where = model.head.name
    padded, shifted = head.targets(labels, ctx)
    del padded
    bias = bound.tensors.get(f"{model.head.name}.bias")
    flat = hidden.view(ctx.batch * ctx.tokens, hidden.shape[-1])
    out = fused_linear_cross_entropy(
        Call(ctx=ctx, hidden=flat, weight=bound[f"{model.head.name}.weight"], bias=bias)
    )
    del shifted
    r.part = part
    return out


@dataclass(slots=True, kw_only=True)
class Call:
    """One call: hidden states (T, D) and a weight (V, D)."""

    ctx: Context
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None

    @property
    def version(self) -> tuple[int, int]:
        return self.ctx.job.version("liger-kernel")

    @property
    def product(self) -> Format:
        """Of matrix products: autocast's where it is on."""
        return self.ctx.autocast or self.hidden.format

    @property
    def straight(self) -> bool:
        """Products may be written into given tensors: operands are in the products' dtype already
        (_can_use_mm_out)."""
        return self.version >= NEWEST and self.hidden.format is self.weight.format is self.product

    @property
    def adds_in_place(self) -> bool:
        """The weight's gradient is added to by the product itself."""
        if self.version < SUMS_FROM:
            return True
        same = self.weight.format is self.product or self.weight.format is FP32
        return (
            self.version >= NEWEST
            and self.ctx.capability >= (8, 0)
            and same
            and self.product is not FP32
        )


def fused_linear_cross_entropy(call: Call) -> Tensor:
    """Keeps the gradients of the hidden states and, where it is trained, of the weight."""
    r, hidden, weight = call.ctx.r, call.hidden, call.weight
    to_hidden = r.tensor(hidden.shape, hidden.format, "liger_loss")
    makes = r.grad and hidden.needs
    to_weight = (
        r.tensor(weight.shape, weight.format, "liger_loss", "gradients")
        if makes and weight.needs
        else None
    )
    to_bias = (
        r.tensor(call.bias.shape, call.bias.format, "liger_loss", "gradients")
        if makes and call.bias is not None
        else None
    )
    losses, real = (
        r.tensor((hidden.shape[0],), FP32, "liger_loss"),
        r.tensor((hidden.shape[0],), BOOL, "ne"),
    )
    walk(call, makes, to_weight)
    out = r.tensor((1,), FP32, "sum")
    del losses, real
    inputs = (hidden, weight) if call.bias is None else (hidden, weight, call.bias)
    saved = (to_hidden, to_weight) if call.bias is None else (to_hidden, to_weight, to_bias)
    return r.node("liger_loss", out, inputs, back_handed, saved)


def back_handed(r: Recorder, node: Node, g: Tensor) -> Grads:
    """Gradients that the forward made, handed on."""
    return tuple(node.saved)


def walk(call: Call, makes: bool, to_weight: Tensor | None) -> None:
    """Chunk by chunk. Variables are those of the loop: until 0.8 the logits of a chunk and their
    gradient stay in theirs until the next chunk's are made; since then there is one block for all,
    or they are deleted."""
    r, version, tokens, vocabulary = (
        call.ctx.r,
        call.version,
        call.hidden.shape[0],
        call.weight.shape[0],
    )
    rows = chunk_rows(tokens, vocabulary, call.hidden.shape[1])
    block = (
        r.tensor((rows, vocabulary), call.product, "liger_loss")
        if call.straight and call.bias is None
        else None
    )
    scores: Tensor | None = None
    gradient: Tensor | None = None
    for first in range(0, tokens, rows):
        shape = (min(rows, tokens - first), vocabulary)
        scores = block if block is not None else chunk_logits(call, shape)
        if version < WIDENS_UNTIL:
            scores = r.tensor(shape, FP32, "to")
            scores = r.tensor(shape, call.product, "to")
        gradient = r.tensor(shape, call.product, "mul") if version < SCALES_UNTIL else scores
        if makes:
            chunk_gradients(call, shape[0], to_weight)
        if version >= NEWEST:
            scores = gradient = None
    del block, scores, gradient


def chunk_logits(call: Call, shape: tuple[int, int]) -> Tensor:
    """`_input_chunk @ weight.t()`; a transposed weight is a view, so autocast casts it every
    time."""
    r = call.ctx.r
    casts = [
        r.tensor(one, call.product, "to")
        for one, format in operands(call, shape[0])
        if format is not call.product
    ]
    multiply(call, shape[0])
    scores = r.tensor(shape, call.product, "linear")
    del casts
    return scores if call.bias is None else r.tensor(shape, call.product, "add")


def operands(call: Call, piece: int) -> tuple[tuple[tuple[int, ...], Format], ...]:
    return ((piece, call.hidden.shape[1]), call.hidden.format), (
        call.weight.shape,
        call.weight.format,
    )


def chunk_gradients(call: Call, piece: int, to_weight: Tensor | None) -> None:
    """The chunk's rows of the hidden states' gradient, and its share of the weight's."""
    r, width = call.ctx.r, call.hidden.shape[1]
    if not call.straight:
        cast = cast_weight(call.weight, call.ctx)
        rows = r.tensor((piece, width), call.product, "linear")
        del cast, rows
    multiply(call, piece)
    if to_weight is None:
        return
    multiply(call, piece)
    inputs = (
        r.tensor((piece, width), call.product, "to")
        if call.hidden.format is not call.product
        else None
    )
    if not call.adds_in_place:
        update = r.tensor(to_weight.shape, call.product, "linear")
        wide = r.tensor(to_weight.shape, FP32, "float") if call.product is not FP32 else update
        del update, wide
    del inputs


def multiply(call: Call, piece: int) -> None:
    format, count = call.product, call.weight.count
    call.ctx.r.compute(
        "linear",
        2 * piece * count,
        (piece * sum(call.weight.shape) + count) * format.block_bytes,
        format.math,
    )


def chunk_rows(tokens: int, vocabulary: int, width: int) -> int:
    """Tokens of a chunk: the next power of two of tokens over ⌈V / D⌉, and no more than there
    are."""
    rows = -(-tokens // -(-vocabulary // width))
    return min(tokens, 1 << (rows - 1).bit_length())
