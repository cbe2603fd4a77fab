"""torchtitan's own modules (0.3.0): torch's RMSNorm, rotary positions in fp32, SDPA that prefers
cuDNN, a head in chunks that each run a backward of their own, and checkpoints that keep every other
product.

One GPU, so nothing is sharded, and weights have the job's precision.
"""

from __future__ import annotations

from memfit.formats import FP32
from memfit.libraries.torchtitan.experts import experts
from memfit.lower import functional, head, ops, views
from memfit.lower.attention import sdpa
from memfit.lower.attention.rotary import half_turned, with_tables
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.layers import ORDERS, choices
from memfit.lower.linears import linear
from memfit.lower.mlp import MLPS
from memfit.lower.programs import Programs
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.model import Model
from memfit.model.modules import Attention, Embedding, Norm, Weight
from memfit.program import Program

CACHE = "rope.cache"
OWN_BACKWARD = (0, 3)  # the version since which each chunk of the loss runs a backward of its own
CHUNKS = 8  # components/loss.py ChunkedLossWrapper.Config
HALVES = frozenset({"qwen3", "qwen3_moe"})  # families whose halves make the pairs that turn
KERNELS = (
    "cudnn",
    "flash",
    "math",
)  # in this order (models/common/attention.py ScaledDotProductAttention)


def layer_buffers(program: Program) -> tuple[Weight, ...]:
    """A table in each layer, as long as the job's sequences: complex numbers, or cosines and sines
    that stand twice (models/common/rope.py, decoder.py update_from_config)."""
    mixer = next(
        block.mixer
        for block in program.model.layers[0].blocks
        if isinstance(block.mixer, Attention)
    )
    width = 2 * mixer.head if program.model.family in HALVES else mixer.head
    return (Weight(name=CACHE, shape=(program.job.reach, width), role="buffer", format="float32"),)


def start(ids: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """Embeddings; each token comes with its position (hf_datasets/text_datasets.py)."""
    token = model.embed[0]
    assert isinstance(token, Embedding)
    ctx.positions = ops.integers(ctx.r, (ctx.batch, ctx.tokens), "inputs")
    ctx.r.where = token.name
    weight = bound[f"{token.name}.weight"]
    return ctx.matrices.embedding(ids, weight, token, ctx)


def rms_norm(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    """torch.nn.RMSNorm (models/common/nn_modules.py)."""
    return functional.rms_norm(x, bound[f"{module.name}.weight"], ctx)


# --------------------------------------------------------------------------------------- attention
def attention(x: Tensor, module: Attention, bound: Bound, ctx: Context) -> Tensor:
    """Three projections, norms of queries and keys where the family has them, the rotation
    (models/common/attention.py GQAttention)."""
    r, norms = ctx.r, (module.q_norm, module.k_norm, None)
    flat = [linear(x, bound.linear(one), ctx) for one in module.project]
    r.where = bound.path(module.name)
    q, k, v = (
        views.reshape(r, one, ctx.batch, ctx.tokens, one.shape[2] // module.head, module.head)
        for one in flat
    )
    del flat
    q, k = (
        one if norm is None else rms_norm(one, norm, bound, ctx)
        for one, norm in zip((q, k), norms, strict=False)
    )
    q, k = turned(q, k, bound, ctx)
    r.where = bound.path(module.name)
    call = sdpa.Call(
        q=views.transpose(r, q, 1, 2),
        k=views.transpose(r, k, 1, 2),
        v=views.transpose(r, v, 1, 2),
        mask=None,
        causal=True,
    )
    return linear(views.merged(r, sdpa.sdpa(call, ctx)), bound.linear(module.out), ctx)


def turned(q: Tensor, k: Tensor, bound: Bound, ctx: Context) -> tuple[Tensor, Tensor]:
    """In fp32, with the rows of the table that the positions name; both are cast back at the end
    (models/common/rope.py)."""
    r, cache = ctx.r, bound[CACHE]
    rows = r.tensor((ctx.batch, ctx.tokens, 1, cache.shape[1]), FP32, "gather")
    wide = ops.cast(r, q, FP32), ops.cast(r, k, FP32)
    if ctx.program.model.family in HALVES:
        cos, sin = (views.narrow(r, rows, 3, q.shape[3]) for _ in range(2))
        out = tuple(with_tables(r, one, cos, sin, half_turned) for one in wide)
    else:
        out = tuple(complex_product(r, one, rows) for one in wide)
    return ops.cast(r, out[0], q.format), ops.cast(r, out[1], k.format)


def complex_product(r: Recorder, x: Tensor, table: Tensor) -> Tensor:
    """Pairs of values times complex numbers."""
    return r.node("mul", r.like(x, "mul"), (x,), back_complex, (table,))


def back_complex(r: Recorder, node: Node, g: Tensor) -> Grads:
    """Times the conjugate, which is made for it (ATen/ConjugateFallback.cpp)."""
    conjugate = r.like(node.saved[0], "conj")
    grads = (r.like(g, "mul"),)
    del conjugate
    return grads


# -------------------------------------------------------------------------------------------- loss
def plain(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """Cross-entropy of fp32 logits beside those of the model (components/loss.py
    cross_entropy_loss). Until 2024-06-12 the model made them fp32 itself, and the loop's `pred`
    held them until the next forward was over (train.py at f6d9de752; commit e29b6b4d4 deletes it).
    """
    scores = head.logits(hidden, model, bound, ctx)
    del hidden
    if not ctx.job.keep_outputs:
        return cross_entropy(scores, labels, ctx)
    part, ctx.r.part = ctx.r.part, "logits"
    wide = ops.cast(ctx.r, scores, FP32)
    ctx.r.part = part
    ctx.returned.append(wide)
    del scores
    return cross_entropy(wide, labels, ctx)


def cross_entropy(scores: Tensor, labels: Tensor, ctx: Context) -> Tensor:
    r = ctx.r
    part, r.part = r.part, "logits"
    wide = scores if scores.format == FP32 else ops.cast(r, scores, FP32)
    loss = ops.scale(
        r,
        ctx.matrices.cross_entropy(
            ctx, wide.view(wide.count // wide.shape[-1], wide.shape[-1]), labels
        ),
    )
    r.part = part
    return loss


def chunked(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """Head, loss and backward over an eighth of each sequence at a time; the gradients are gathered
    in fp32 and handed on, cast, when the graph of the layers runs (components/loss.py
    ChunkedLossWrapper)."""
    if ctx.job.version("torchtitan") < OWN_BACKWARD:
        return in_turn(hidden, labels, model, bound, ctx)
    r = ctx.r
    part, r.part = r.part, "logits"
    size = -(-ctx.tokens // CHUNKS)
    sizes = [min(size, ctx.tokens - first) for first in range(0, ctx.tokens, size)]
    pieces = [
        ops.packed(r, views.narrow(r, hidden, 1, one)).detach()
        if len(sizes) > 1
        else hidden.detach()
        for one in sizes
    ]
    gathered = r.tensor(hidden.shape, FP32, "zeros") if hidden.needs else None
    total = r.tensor((1,), FP32, "loss")
    for piece in pieces:
        piece.needs = hidden.needs
        scores = head.logits(piece, model, bound, ctx)
        loss = cross_entropy(scores, labels, ctx)
        total = r.tensor((1,), FP32, "loss")
        if gathered is not None:
            r.thread = "backward"
            r.backward(loss, r.like(loss, "ones_like"))
            r.thread, r.where = "forward", ""
            assert piece.grad is not None
            wide = ops.cast(r, piece.grad, FP32)
            piece.grad = None
            del wide
    if gathered is not None:
        total = r.node(
            "loss", total, (hidden,), back_given, (ops.cast(r, gathered, hidden.format),)
        )
    r.part = part
    return total


def in_turn(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """The older loss in chunks: of all logits, an eighth after the other, in one graph, which keeps
    the probabilities of each (commit e23bb707, components/loss.py chunked_cross_entropy_loss)."""
    r = ctx.r
    part, r.part = r.part, "logits"
    scores = head.logits(hidden, model, bound, ctx)
    size = -(-ctx.tokens // CHUNKS)
    pieces = views.split(
        r, scores, 1, *(min(size, ctx.tokens - first) for first in range(0, ctx.tokens, size))
    )
    del hidden, scores
    total = r.tensor((1,), FP32, "loss")
    while pieces:
        piece = pieces.pop(0)
        flat = views.reshape(r, piece, piece.count // piece.shape[-1], piece.shape[-1])
        wide = ops.cast(r, flat, FP32)
        del flat
        total = ops.add(r, total, ops.cross_entropy(r, wide, labels))
        del wide
    r.part = part
    return ops.scale(r, total)


def back_given(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (node.saved[0],)


PROGRAMS = Programs(
    norms={"llama": rms_norm},
    attention={"llama": attention, "qwen3": attention},
    mlps={"gated": MLPS["gated"]},
    moes={"qwen3_moe": experts},
    orders={"pre": ORDERS["pre"]},
    losses={"plain": plain, "chunked": chunked},
    start=start,
    layer_buffers=layer_buffers,
    kernels=KERNELS,
    choices=choices,
    whole=True,
)
