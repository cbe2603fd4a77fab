"""From the last hidden state to the loss: plain cross-entropy as each version computes it, in chunks, or fused with the head."""

from __future__ import annotations

from collections.abc import Callable

from memfit.formats import FP32
from memfit.lower import head, ops
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.recorder import Grads, Node, Recorder, Tensor
from memfit.model.modules import Model

CHUNKS = 8  # torchtune 0.6 modules/loss/cross_entropy_loss.py num_output_chunks


def plain(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """fp32 logits of all tokens (transformers 5.23 loss/loss_utils.py ForCausalLMLoss)."""
    scores = head.logits(hidden, model, bound, ctx)
    del hidden
    return head.loss(scores, labels, model, ctx)


def chunked(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """Head and cross-entropy over an eighth of the tokens at a time; every piece keeps its fp32 log-probabilities
    (torchtune 0.6 modules/loss/cross_entropy_loss.py, modules/transformer.py chunked_output)."""
    r = ctx.r
    part, r.part = r.part, "logits"
    tokens, width = ctx.batch * ctx.tokens, hidden.shape[-1]
    rows = -(-tokens // CHUNKS)
    pieces = [min(rows, tokens - first) for first in range(0, tokens, rows)]
    total = None
    chunks = [head.logits(one, model, bound, ctx) for one in ops.split(r, hidden, tuple((piece, width) for piece in pieces))]
    del hidden
    while chunks:
        wide = ops.cast(r, chunks.pop(0), FP32)
        loss = ops.cross_entropy(r, wide, labels)
        del wide
        total = loss if total is None else ops.add(r, total, loss)
    r.part = part
    assert total is not None
    return total


def liger(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """Head, softmax and both gradients in the forward, a chunk of tokens at a time; only the gradients are kept
    (Liger-Kernel 0.6 ops/fused_linear_cross_entropy.py)."""
    r = ctx.r
    weight = bound[f"{model.head.name}.weight"]
    tokens, width, vocabulary = ctx.batch * ctx.tokens, hidden.shape[-1], model.vocab
    to_hidden = r.tensor(hidden.shape, hidden.format, "liger_loss") if r.grad else None
    to_weight = r.tensor(weight.shape, weight.format, "liger_loss", "gradients") if r.grad and weight.needs else None
    losses = r.tensor((tokens,), FP32, "liger_loss")
    rows = chunk_rows(tokens, vocabulary, width)
    for first in range(0, tokens, rows):
        piece = min(rows, tokens - first)
        scores = r.tensor((piece, vocabulary), hidden.format, "liger_loss", "logits")
        r.compute("linear", 2 * piece * width * vocabulary, (piece * (width + vocabulary) + weight.count) * 2, hidden.format.math)
        product = r.tensor((piece, width), hidden.format, "liger_loss") if to_hidden is not None else None
        del product
        update = r.tensor(weight.shape, weight.format, "liger_loss") if to_weight is not None else None
        del update, scores
    out = r.tensor((1,), FP32, "sum")
    del losses
    return r.node("liger_loss", out, (hidden, weight), back_liger, (to_hidden, to_weight))


def back_liger(r: Recorder, node: Node, g: Tensor) -> Grads:
    """The gradients made in the forward, handed on."""
    return node.saved


def chunk_rows(tokens: int, vocabulary: int, width: int) -> int:
    """Tokens of a chunk: the next power of two of tokens over ⌈V / D⌉."""
    rows = -(-tokens // -(-vocabulary // width))
    return 1 << (rows - 1).bit_length()


Loss = Callable[[Tensor, Tensor, Model, Bound, Context], Tensor]
LOSSES: dict[str, Loss] = {"plain": plain, "chunked": chunked, "liger": liger}
