"""From the last hidden state to the loss: plain cross-entropy as each version computes it, in
chunks, or fused with the head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memfit.formats import BOOL, FP32
from memfit.lower import head, ops, versions, views
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.lifetimes import Scope, Value, scoped
from memfit.lower.tensors import Tensor
from memfit.model.model import Model

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


@scoped
def selected(
    own: Scope, hidden: Value, labels: Value, model: Model, bound: Bound, ctx: Context
) -> Value:
    """Logits in their own dtype. A mask selects those of padded batches: in the trace all but the
    last column (transformers 5.23 modeling_qwen2_audio.py `shift_attention_mask`)."""
    if ctx.job.packing:
        return own(versions.narrow, hidden, labels, model, bound, ctx)
    r, rows = ctx.r, ctx.batch * (ctx.tokens - 2)
    scores = own(head.logits, hidden, model, bound, ctx)
    own.lend(ctx.returned, scores)
    part, r.part = r.part, "logits"
    shape = (ctx.batch, ctx.tokens - 1)
    real = own(r.tensor, shape, BOOL, "ne", "activations")
    cut = own(ops.cut, r, scores, (*shape, scores.shape[-1]))
    own.assign(cut, head.whole, cut.last, ctx)
    chosen = own(views.indexed, r, cut, (rows, scores.shape[-1]), real)
    own.drop(real)
    targets = own(ops.integers, r, (rows,), "index")
    read = FP32 if ctx.autocast is not None else None
    loss = own(partial(ops.cross_entropy, read=read), r, chosen, targets)
    r.part = part
    return loss


Loss = Callable[[Tensor, Tensor, Model, Bound, Context], Tensor]
LOSSES: dict[str, Loss] = {
    "plain": plain,
    "chunked": chunked,
}
