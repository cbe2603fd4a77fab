"""From the last norm to the loss: logits by Megatron's own product, then its cross-entropy over a
vocabulary that may be split."""

from __future__ import annotations

from memfit.formats import BF16, BOOL, FP32, INT64
from memfit.libraries.megatron.ranks import of
from memfit.libraries.megatron.te import back_alike, head_product
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.model import Model


def logits(hidden: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    head = bound.linear(model.head)
    ctx.r.where = head.path
    return head_product(hidden, head.weight, head.outputs, ctx)


def plain(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """An fp32 copy of the logits that becomes the probabilities and, in backward, the gradient, in
    place; it is cast as it leaves (core/tensor_parallel/cross_entropy.py)."""
    r, ranks = ctx.r, of(ctx)
    part, r.part = r.part, "logits"
    scores = logits(hidden, model, bound, ctx)
    del hidden
    r.where = ""
    rows = scores.count // scores.shape[-1]
    targets = (
        r.tensor((rows,), INT64, "contiguous"),
        r.tensor((rows,), INT64, "sub"),
        r.tensor((rows,), BOOL, "or"),
    )
    wide = r.tensor(scores.shape, FP32, "float")
    each = r.node(
        "cross_entropy",
        r.tensor((rows,), FP32, "sub"),
        (scores,),
        back_cross_entropy,
        (wide, *targets[1:]),
        scores.shape,
    )
    if ranks.size > 1:  # the largest logits, those of the labels, the sums
        for _ in range(3):
            r.comm("all_reduce", rows * 4, ranks.size, ranks.name)
    del scores, targets, wide
    total = r.node("sum", r.tensor((1,), FP32, "sum"), (each,), back_alike, (), each.shape)
    r.part = part
    return total


def back_cross_entropy(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.tensor(node.extra, BF16, "to", "logits"),)


def fused(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """Transformer Engine's kernel (`--cross-entropy-fusion-impl te`): the gradient overwrites the
    logits in the forward already; beside them a loss a row and three numbers of its softmax, from
    every rank (TE 2.11 pytorch/triton/cross_entropy.py)."""
    r, ranks = ctx.r, of(ctx)
    part, r.part = r.part, "logits"
    scores = logits(hidden, model, bound, ctx)
    del hidden
    r.where = ""
    rows = scores.count // scores.shape[-1]
    targets = r.tensor((rows,), INT64, "contiguous")
    each, own = r.tensor((rows,), FP32, "zeros"), r.tensor((3 * rows,), FP32, "zeros")
    gathered = None
    if ranks.size > 1:
        gathered = r.tensor((3 * rows * ranks.size,), FP32, "zeros")
        r.comm("all_gather", 12 * rows * ranks.size, ranks.size, ranks.name)
    del own, gathered, targets
    each = r.node("cross_entropy", each, (scores,), back_fused, (scores.detach(),))
    del scores
    total = r.node("sum", r.tensor((1,), FP32, "sum"), (each,), back_alike, (), each.shape)
    r.part = part
    return total


def back_fused(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (node.saved[0].detach(),)
