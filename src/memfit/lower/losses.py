"""From the last hidden state to the loss: plain cross-entropy as each version computes it, in
chunks, or fused with the head."""

from __future__ import annotations

from collections.abc import Callable

from memfit.formats import BOOL, FP32
from memfit.lower import head, ops, versions, views
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.lifetimes import Scope, Value, scoped
from memfit.lower.tensors import Tensor
from memfit.model.modules import Model

CHUNKS = 8  # torchtune 0.6 modules/loss/cross_entropy_loss.py num_output_chunks


@scoped
def plain(
    own: Scope, hidden: Value, labels: Value, model: Model, bound: Bound, ctx: Context
) -> Value:
    """fp32 logits of all tokens (transformers 5.23 loss/loss_utils.py ForCausalLMLoss)."""
    scores = own(head.logits, hidden, model, bound, ctx)
    own.lend(ctx.returned, scores)
    return own(head.loss, scores, labels, model, ctx)


def chunked(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """Head and cross-entropy over an eighth of the tokens at a time; every piece keeps its fp32
    log-probabilities (torchtune 0.6 modules/loss/cross_entropy_loss.py, modules/transformer.py
    chunked_output)."""
    r = ctx.r
    part, r.part = r.part, "logits"
    tokens, width = ctx.batch * ctx.tokens, hidden.shape[-1]
    rows = -(-tokens // CHUNKS)
    pieces = [min(rows, tokens - first) for first in range(0, tokens, rows)]
    total = None
    rows_of_all = views.reshape(r, hidden, tokens, width)
    del hidden
    chunks = [
        head.logits(one, model, bound, ctx) for one in views.split(r, rows_of_all, 0, *pieces)
    ]
    del rows_of_all
    while chunks:
        wide = ops.cast(r, chunks.pop(0), FP32)
        loss = ops.cross_entropy(r, wide, labels)
        del wide
        total = loss if total is None else ops.add(r, total, loss)
    r.part = part
    assert total is not None
    return total


def selected(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """Logits in their own dtype, of padded batches those that a mask selects, whose last column is
    padding, as in the trace (transformers 5.23 modeling_qwen2_audio.py `shift_attention_mask`)."""
    if ctx.job.packing:
        return versions.narrow(hidden, labels, model, bound, ctx)
    r, rows = ctx.r, ctx.batch * (ctx.tokens - 2)
    scores = head.logits(hidden, model, bound, ctx)
    ctx.returned.append(scores)
    part, r.part = r.part, "logits"
    real = r.tensor((ctx.batch, ctx.tokens - 1), BOOL, "ne", "activations")
    cut = head.whole(ops.cut(r, scores, (*real.shape, scores.shape[-1])), ctx)
    chosen = views.indexed(r, cut, (rows, scores.shape[-1]), real)
    del real
    targets = ops.integers(r, (rows,), "index")
    loss = ops.cross_entropy(r, chosen, targets, read=FP32 if ctx.autocast is not None else None)
    r.part = part
    return loss


Loss = Callable[[Tensor, Tensor, Model, Bound, Context], Tensor]
LOSSES: dict[str, Loss] = {
    "plain": plain,
    "chunked": chunked,
}
