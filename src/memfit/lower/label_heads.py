"""From the last hidden state to labels, and to their loss: of sequences, of tokens, or of the two
ends of an answer (transformers 5.23 modeling_layers.py, loss/loss_utils.py)."""

from __future__ import annotations

from collections.abc import Callable

from memfit.formats import BOOL, FP32, INT32, Format
from memfit.lower import head, ops, views
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.lifetimes import Scope, Value, scoped
from memfit.lower.programs import Programs
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Dim, Grads, Node, Tensor
from memfit.model.label_heads import SEQUENCE, SPAN, TOKENS
from memfit.model.model import Model
from memfit.program import Program

Scores = Callable[[Tensor, Model, Bound, Context], Tensor]


def programs(own: Programs, model: Model) -> Programs:
    """With a head of labels in place of the vocabulary's."""
    assert model.labelled is not None
    loss, scores = HEADS[model.labelled.task]
    return own.replace(losses={"plain": loss}, batch=batch, scores=scores)


def batch(r: Recorder, program: Program, size: Dim, tokens: int) -> tuple[Tensor, ...]:
    """Token ids, labels where there is a loss, and with padding which tokens are real; of an
    answer, where it ends comes last."""
    model, job = program.model, program.job
    assert model.labelled is not None
    task, shape = model.labelled.task, (size, Dim(tokens, "S"))
    found = [ops.integers(r, shape, "inputs")]
    if job.training:
        of_each = shape if task == TOKENS else (size,)
        one_number = task == SEQUENCE and model.head.outputs == 1
        found.append(
            r.tensor(of_each, FP32, "inputs", "inputs")
            if one_number
            else ops.integers(r, of_each, "inputs")
        )
        if not job.packing:
            found.append(ops.integers(r, shape, "inputs"))
        if task == SPAN:
            found.append(ops.integers(r, (size,), "inputs"))
    return tuple(found)


# -------------------------------------------------------------------------------------- sequences
@scoped
def of_sequences(own: Scope, hidden: Value, model: Model, bound: Bound, ctx: Context) -> Value:
    """Labels of every token, and of them those of the last one that is no padding."""
    r, shape = ctx.r, (ctx.batch, ctx.tokens)
    assert model.labelled is not None
    if rate := ctx.dropout(model.labelled.dropout):
        own.assign(hidden, ops.dropout, r, hidden, rate)
    scores = own(head.logits, hidden, model, bound, ctx)
    real = own(r.tensor, shape, BOOL, "ne", "temporaries")
    own.assign(real, r.tensor, shape, INT32, "to", "temporaries")
    places = own(r.tensor, (ctx.tokens,), INT32, "arange", "temporaries")
    products = own(r.tensor, shape, INT32, "mul", "temporaries")
    last = own(ops.integers, r, (ctx.batch,), "argmax", "activations")
    own.drop(products)
    out = own(views.indexed, r, scores, (ctx.batch, scores.shape[-1]), last)
    own.lend(ctx.returned, out)
    own.drop(real, places)
    return out


@scoped
def sequence_loss(
    own: Scope, hidden: Value, labels: Value, model: Model, bound: Bound, ctx: Context
) -> Value:
    """Cross-entropy, or of one label the squared error (loss_utils.py
    ForSequenceClassificationLoss)."""
    pooled = own(of_sequences, hidden, model, bound, ctx)
    if model.head.outputs == 1:
        return own(squared_error, ctx.r, pooled, labels, ctx)
    return own(ops.cross_entropy, ctx.r, pooled, labels, "logits", read_by(ctx))


def squared_error(r: Recorder, scores: Tensor, labels: Tensor, ctx: Context) -> Tensor:
    """The mean over a batch, in the wider dtype; autocast runs it in fp32."""
    wide = ops.cast(r, scores, FP32) if ctx.autocast is not None else scores
    out = r.tensor((1,), FP32, "mse_loss", "activations")
    return r.node("mse_loss", out, (wide,), back_squared_error, (wide, labels), wide.shape)


def back_squared_error(r: Recorder, node: Node, g: Tensor) -> Grads:
    wide = r.tensor(node.extra, FP32, "mse_loss", "logits")
    return (ops.reduced(r, node, 0, wide, node.extra, node.saved[0].format),)


def read_by(ctx: Context) -> Format | None:
    """What autocast makes of log-probabilities for the loss."""
    return None if ctx.autocast is None else FP32


# ----------------------------------------------------------------------------------------- tokens
@scoped
def of_tokens(own: Scope, hidden: Value, model: Model, bound: Bound, ctx: Context) -> Value:
    assert model.labelled is not None
    rate = ctx.dropout(model.labelled.dropout)
    if rate:
        own.assign(hidden, ops.dropout, ctx.r, hidden, rate)
    out = own(head.logits, hidden, model, bound, ctx)
    own.lend(ctx.returned, out)
    return out


@scoped
def token_loss(
    own: Scope, hidden: Value, labels: Value, model: Model, bound: Bound, ctx: Context
) -> Value:
    """Cross-entropy of all tokens (loss_utils.py ForTokenClassification)."""
    assert model.labelled is not None
    scores = own(of_tokens, hidden, model, bound, ctx)
    rows = own(Tensor.view, scores, ctx.batch * ctx.tokens, scores.shape[-1])
    if model.labelled.wide:
        own.assign(rows, ops.cast, ctx.r, rows, FP32)
    return own(ops.cross_entropy, ctx.r, rows, labels, "logits", read_by(ctx))


# ------------------------------------------------------------------------------------------- spans
@scoped
def of_spans(own: Scope, hidden: Value, model: Model, bound: Bound, ctx: Context) -> Value:
    """For every token whether an answer begins or ends there."""
    r, shape = ctx.r, (ctx.batch, ctx.tokens)
    scores = own(head.logits, hidden, model, bound, ctx)
    parts = own.several(columns, r, scores)
    for part in parts[:2]:
        own.assign(part, contiguous, r, part, shape)
    own.lend(ctx.returned, *parts[:2])
    return parts[0]


def columns(r: Recorder, x: Tensor) -> list[Tensor]:
    return views.split(r, x, -1, *(1 for _ in range(x.shape[-1])))


def contiguous(r: Recorder, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """One of several columns that lie side by side."""
    out = r.tensor(shape, x.format, "contiguous", "logits")
    return r.node("contiguous", out, (x,), views.back_reshape, extra=x.shape)


@scoped
def span_loss(
    own: Scope, hidden: Value, labels: Value, model: Model, bound: Bound, ctx: Context
) -> Value:
    """The mean of two cross-entropies over the tokens of a sequence (loss_utils.py
    ForQuestionAnsweringLoss)."""
    r, read = ctx.r, read_by(ctx)
    own(of_spans, hidden, model, bound, ctx)
    targets = [own(ops.integers, r, (ctx.batch,), "clamp", "activations") for _ in range(2)]
    starts, ends = (own.value(one) for one in ctx.returned[-2:])
    losses = [
        own(ops.cross_entropy, r, some, target, "logits", read)
        for some, target in zip((starts, ends), targets, strict=True)
    ]
    total = own(ops.add, r, *losses)
    return own(ops.scale, r, total, "div")


Loss = Callable[[Tensor, Tensor, Model, Bound, Context], Tensor]
HEADS: dict[str, tuple[Loss, Scores]] = {
    SEQUENCE: (sequence_loss, of_sequences),
    TOKENS: (token_loss, of_tokens),
    SPAN: (span_loss, of_spans),
}
