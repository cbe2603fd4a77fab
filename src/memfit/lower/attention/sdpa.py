"""torch's `scaled_dot_product_attention` on CUDA: which backend runs, and what each saves for
backward and allocates.

Queries are (B, N, S, H), keys and values (B, K, S, H), whatever the layout. `memfit.kernels` has
the facts about the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memfit import kernels
from memfit.errors import InputError
from memfit.formats import BOOL, FP32, INT64
from memfit.lazy_dataclass import dataclass
from memfit.lower import ops, views
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.strides import Shape, contiguous, kept, normal
from memfit.lower.tensors import Grads, Node, Tensor

DEFAULT = (
    "flash",
    "efficient",
    "math",
    "cudnn",
)  # torch.backends.cuda: all are enabled, the order is the choice's own


@dataclass(slots=True, kw_only=True)
class Call:
    """The arguments of one call. `mask` is boolean or additive; with `causal` there is none.
    `groups`: keys of fewer heads are told to be groups (`enable_gqa`); else they are broadcast,
    which the decomposition alone can do."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    dropout: float = 0.0
    groups: bool = True

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """Sequences, query heads, key heads, queries, keys, head size."""
        return (
            self.q.shape[0],
            self.q.shape[1],
            self.k.shape[1],
            self.q.shape[2],
            self.k.shape[2],
            self.q.shape[3],
        )

    @property
    def grouped(self) -> bool:
        return self.q.shape[1] != self.k.shape[1]


def sdpa(call: Call, ctx: Context) -> Tensor:
    """The result lies as its kernel leaves it. Autocast casts every float operand
    (ATen/autocast_mode.h lower_precision_fp)."""
    if ctx.autocast is not None:
        if call.mask is not None and call.mask.format is not BOOL:
            call.mask = ops.cast(ctx.r, call.mask, ctx.autocast)
        call.v, call.k, call.q = (
            ops.cast(ctx.r, one, ctx.autocast) for one in (call.v, call.k, call.q)
        )
    backend = chosen(call, ctx)
    return ctx.programs.sequences.sdpa(call, backend, ctx) or BACKENDS[backend](call, ctx)


def chosen(call: Call, ctx: Context) -> str:
    """The backend; one that the job forces must be able to run (torch: `No available kernel`)."""
    size = call.q.format.block_bytes
    _, _, _, queries, keys, head = call.sizes
    needs = ctx.r.grad and any(one.needs for one in (call.q, call.k, call.v))
    for allowed in asked(call, ctx):
        backend = kernels.sdpa_backend(
            element=size,
            half=size == 2,
            head=head,
            value_head=call.v.shape[-1],
            masked=call.mask is not None,
            causal=call.causal,
            query=queries,
            key=keys,
            grouped=call.grouped,
            training=needs,
            dropout=call.dropout,
            capability=ctx.capability,
            torch=ctx.torch,
            allowed=allowed,
        )
        if backend in allowed:
            return backend
    raise InputError.one(
        f"attention `{ctx.job.attention}` has no kernel for this job",
        where="job.attention",
        hint="use `sdpa`",
    )


def asked(call: Call, ctx: Context) -> tuple[tuple[str, ...], ...]:
    """What torch.nn.attention.sdpa_kernel leaves open under the job's option, or what the framework
    asks for, one after the other."""
    if not call.groups and call.grouped:  # heads that are broadcast: math alone takes them
        return () if ctx.job.attention in DEFAULT and ctx.job.attention != "math" else (("math",),)
    if ctx.job.attention in DEFAULT:
        return ((ctx.job.attention,),)
    return tuple((one,) for one in ctx.programs.kernels) or (DEFAULT,)


def additive(r: Recorder, mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A boolean mask becomes one of the query's dtype (attention.cpp convert_boolean_attn_mask)."""
    if mask is None or mask.format is not BOOL:
        return mask
    return r.tensor(mask.shape, like.format, "mask")


# ------------------------------------------------------------------------------------------- flash
def flash(call: Call, ctx: Context) -> Tensor:
    """Keeps q, k, v, the output, one fp32 number a row and the random state. Heads that are no
    multiple of 8 are padded first, the output is cut again (attention.cpp pad_last_dim;
    flash_attn/flash_api.cpp)."""
    r = ctx.r
    head = call.q.shape[-1]
    q, k, v = (padded(r, one) for one in (call.q, call.k, call.v))
    batch, heads, groups, queries, keys, _ = call.sizes
    chosen = r.chosen("attention")
    out = r.put_out(lambda: r.like(q, "flash_attention"), chosen)
    lse = r.put_out(lambda: r.tensor((batch, heads, queries), FP32, "flash_attention"), chosen)
    state = tuple(
        r.put_out(partial(r.tensor, (size,), INT64, "flash_attention"), chosen) for size in (2, 1)
    )
    if call.dropout == 0.0 and not (
        chosen and r.replaying
    ):  # a single query's heads are folded into its group's length
        folded = (groups, heads // groups) if queries == 1 and heads != groups else (heads, queries)
        held = [
            r.scratch(size, "flash_attention")
            for size in kernels.flash_split_buffers(
                batch, *folded, keys, q.shape[-1], ctx.program.processors
            )
        ]
        del held
    flops = arithmetic(call)
    traffic(r, "flash_attention", call, flops, chosen)
    out = r.node(
        "flash_attention",
        out,
        (q, k, v),
        back_flash,
        (q, k, v, out.detach(), lse, state),
        (call.sizes, flops, q.shape[-1]),
    )
    return views.narrow(r, out, 3, head)


def padded(r: Recorder, x: Tensor, wide: int = 0) -> Tensor:
    """`constant_pad_nd` of the last dimension to `wide`, or to a multiple of 8; the gradient is a
    copy of a part of the padded one."""
    wide = wide or kernels.up(x.shape[-1], 8)
    if wide == x.shape[-1]:
        return x
    out = r.tensor((*x.shape[:-1], wide), x.format, "pad")
    return r.node("pad", out, (x,), back_padded, extra=x.shape)


def back_padded(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.tensor(node.extra, g.format, "clone"),)


def back_flash(r: Recorder, node: Node, g: Tensor) -> Grads:
    """dq, dk, dv beside softmax_d, an fp32 dq and, for grouped heads, dk and dv of every query
    head; the output and its gradient are copied where they do not lie by tokens
    (attention_backward.cu _flash_attention_backward)."""
    q, k, v, out, *_ = node.saved
    copies = [
        r.like(one, "contiguous")
        for one in (g, out)
        if views.permuted(one, (0, 2, 1, 3)).strides is not None
    ]
    (batch, heads, groups, queries, keys, _), flops, head = node.extra
    held = kernels.flash_backward(
        batch, heads, groups, queries, keys, head, element=q.format.block_bytes
    )
    grads = [r.like(one, "flash_attention") for one in (q, k, v)]
    scratch = [
        r.scratch(size, "flash_attention")
        for size in (held.softmax_d, held.dq_accum, held.dk_expanded, held.dv_expanded)
    ]
    r.compute(
        "flash_attention_backward",
        flops * 5 // 2,
        2 * (q.count * 2 + k.count + v.count) * q.format.block_bytes,
        q.format.math,
    )
    del scratch, copies
    return grads


# --------------------------------------------------------------------------------------- efficient
def efficient(call: Call, ctx: Context) -> Tensor:
    """CUTLASS memory-efficient attention: keeps q, k, v, the mask of its own making, the output and
    a row sum rounded to 32 (aten/src/ATen/native/transformers/cuda/attention.cu)."""
    r = ctx.r
    q, k, v = call.q, call.k, call.v
    mask = aligned(r, additive(r, call.mask, q))
    batch, heads, _, queries, keys, head = call.sizes
    value = v.shape[-1]
    chosen, needs = r.chosen("attention"), r.grad and (q.needs or k.needs or v.needs)
    out = r.put_out(
        lambda: by_tokens(r, (batch, heads, queries, value), q, "efficient_attention"), chosen
    )
    rows = kernels.efficient_lse(batch, heads, queries) // FP32.block_bytes if needs else 0
    lse = r.put_out(lambda: r.tensor((rows,), FP32, "efficient_attention", "activations"), chosen)
    if not (chosen and r.replaying):
        held = r.scratch(
            kernels.efficient_accumulator(batch, heads, queries, head, value, q.format.block_bytes),
            "efficient_attention",
        )
        del held
    flops = arithmetic(call)
    traffic(r, "efficient_attention", call, flops, chosen)
    sizes = (batch, heads, queries, keys, head, value)
    learned = (call.mask,) if call.mask is not None and call.mask.needs else ()
    return r.node(
        "efficient_attention",
        out,
        (q, k, v, *learned),
        back_efficient,
        (q, k, v, out.detach(), lse, mask),
        (sizes, flops, ctx.capability),
    )


def aligned(r: Recorder, mask: Tensor | None) -> Tensor | None:
    """Rows that are no multiple of 8 long lie in a padded copy (attention.cpp pad_bias)."""
    if mask is None or mask.shape[-1] % 8 == 0:
        return mask
    return r.tensor((*mask.shape[:-1], kernels.up(mask.shape[-1], 8)), mask.format, "pad")


def by_tokens(r: Recorder, shape: Shape, like: Tensor, op: str) -> Tensor:
    """(B, N, S, H) that always lies as (B, S, N, H)."""
    out = r.tensor(shape, like.format, op)
    _, heads, queries, head = shape
    out.strides = normal(shape, (heads * queries * head, head, heads * head, 1))
    return out


def back_efficient(r: Recorder, node: Node, g: Tensor) -> Grads:
    """dq, dk, dv beside row sums and the tiles' workspace; that of a learned bias has rows of a
    multiple of 16 (attention_backward.cu, torch 2.13), and is summed where it was broadcast."""
    q, k, v, *_, mask = node.saved
    sizes, flops, capability = node.extra
    grads = [by_tokens(r, one.shape, one, "efficient_attention") for one in (q, k, v)]
    batch, heads, queries, keys, head, value_head = sizes
    bias = None
    if len(node.inputs) > 3:
        shape = (batch, heads, queries, kernels.up(keys, 16))
        bias = r.tensor(shape, mask.format, "efficient_attention")
    size = kernels.efficient_backward(
        batch, heads, queries, keys, head, value_head, q.format.block_bytes, capability
    )
    held = r.scratch(size, "efficient_attention")
    r.compute(
        "efficient_attention_backward",
        flops * 5 // 2,
        2 * (q.count * 2 + k.count + v.count) * q.format.block_bytes,
        q.format.math,
    )
    del held
    return grads if bias is None else [*grads, narrowed(r, bias, (*mask.shape[:-1], keys))]


def narrowed(r: Recorder, bias: Tensor, shape: Shape) -> Tensor:
    """The gradient of a bias in the bias's own shape."""
    if bias.shape[:-1] != shape[:-1]:
        return r.tensor(shape, bias.format, "sum")
    out = Tensor(shape, bias.format, bias.storage)
    out.strides = normal(shape, contiguous(bias.shape))
    return out


# ------------------------------------------------------------------------------------------- cuDNN
def cudnn(call: Call, ctx: Context) -> Tensor:
    """Keeps q, k, v, the mask, the output, one fp32 number a row and two scalars of random state
    (ATen/native/cudnn/MHA.cpp)."""
    r = ctx.r
    q, k, v = call.q, call.k, call.v
    mask = additive(r, call.mask, q)
    batch, heads, _, queries, _, head = call.sizes
    needs = r.grad and (q.needs or k.needs or v.needs)
    chosen = r.chosen("attention")
    out = r.put_out(lambda: like_queries(r, q, v.shape[-1], "cudnn_attention"), chosen)
    lse = (
        r.put_out(lambda: r.tensor((batch, heads, queries, 1), FP32, "cudnn_attention"), chosen)
        if needs
        else None
    )
    state = tuple(
        r.put_out(lambda: r.tensor((1,), INT64, "cudnn_attention"), chosen) for _ in range(2)
    )
    flops = arithmetic(call)
    traffic(r, "cudnn_attention", call, flops, chosen)
    saved = (q, k, v, out.detach(), lse, state, mask)
    return r.node(
        "cudnn_attention", out, (q, k, v), back_cudnn, saved, ((batch, heads, queries, head), flops)
    )


def like_queries(r: Recorder, q: Tensor, size: int, op: str) -> Tensor:
    """A result that lies as the queries do, with heads of the values' size."""
    if size == q.shape[-1]:
        return r.like(q, op)
    out = r.tensor((*q.shape[:-1], size), q.format, op)
    out.strides = (
        None
        if q.strides is None
        else normal(out.shape, kept(out.shape, q.strides) or contiguous(out.shape))
    )
    return out


def back_cudnn(r: Recorder, node: Node, g: Tensor) -> Grads:
    """A gradient that does not lie as the output does is copied so (MHA.cpp
    permute_to_matching_layout)."""
    q, k, v, out, *_ = node.saved
    sizes, flops = node.extra
    copy = r.like(out, "contiguous") if views.lying(g) != views.lying(out) else None
    grads = [r.like(one, "cudnn_attention") for one in (q, k, v)]
    held = r.scratch(kernels.cudnn_backward(*sizes), "cudnn_attention")
    r.compute(
        "cudnn_attention_backward",
        flops * 5 // 2,
        2 * (q.count * 2 + k.count + v.count) * q.format.block_bytes,
        q.format.math,
    )
    del held, copy
    return grads


# -------------------------------------------------------------------------------------------- math
def math(call: Call, ctx: Context) -> Tensor:
    """The decomposition of last resort: 16-bit inputs become fp32, q and k are scaled, scores and
    probabilities exist whole (attention.cpp _scaled_dot_product_attention_math)."""
    r = ctx.r
    result = call.q.format
    mask = additive(r, call.mask, call.q)
    q, k, v = (ops.cast(r, one, FP32) for one in (call.q, call.k, call.v))
    scaled = ops.scale(r, q)
    if call.causal:
        mask = triangle(r, (q.shape[2], k.shape[2]))
    if call.groups:
        k, v = repeated(r, k, q.shape[1]), repeated(r, v, q.shape[1])
    scores = views.matmul(r, scaled, ops.scale(r, views.transpose(r, k, 2, 3)))
    if mask is not None:
        scores = ops.add(r, scores, mask) if r.watched else ops.add_in_place(r, scores, mask)
    probabilities = safe_softmax(r, scores)
    del scores
    probabilities = ops.dropout(r, probabilities, call.dropout)
    beside = ops.cast(
        r, probabilities.detach(), result
    )  # returned with it, and made first: compilers go through a call from the right
    out = views.matmul(r, probabilities, v)
    cast = ops.cast(r, out, result)
    del out, probabilities, beside
    return cast


def triangle(r: Recorder, square: Shape) -> Tensor:
    """ones → tril → an additive mask in fp32."""
    ones = r.tensor(square, BOOL, "ones")
    lower = r.tensor(square, BOOL, "tril")
    del ones
    return r.tensor(square, FP32, "causal") if lower is not None else lower


def safe_softmax(r: Recorder, scores: Tensor) -> Tensor:
    """softmax, beside a byte a score and one a row that tell where nothing is attended to
    (attention.cpp _safe_softmax)."""
    out = r.tensor(scores.shape, FP32, "softmax")
    blank = (
        r.tensor(scores.shape, BOOL, "isneginf", "workspace"),
        r.tensor((*scores.shape[:-1], 1), BOOL, "all", "workspace"),
    )
    del blank
    return r.node("softmax", out, (scores,), ops.back_like, (out.detach(),), scores.shape)


def repeated(r: Recorder, x: Tensor, heads: int) -> Tensor:
    """The heads of a group become copies; nothing where there are no groups."""
    if x.shape[1] == heads:
        return x
    out = r.tensor((x.shape[0], heads, *x.shape[2:]), x.format, "repeat_kv")
    return r.node("repeat_kv", out, (x,), back_repeated, extra=x.shape)


def back_repeated(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.tensor(node.extra, g.format, "repeat_kv"),)


# -------------------------------------------------------------------------------------------- cost
def arithmetic(call: Call) -> int:
    """Two products of queries by keys; a causal kernel skips half of the pairs."""
    batch, heads, _, queries, keys, head = call.sizes
    return (
        2 * batch * heads * queries * keys * (head + call.v.shape[-1]) // (2 if call.causal else 1)
    )


def traffic(r: Recorder, op: str, call: Call, flops: int, kept: bool) -> None:
    moved = (call.q.count * 2 + call.k.count + call.v.count) * call.q.format.block_bytes
    r.compute(op, flops, moved, call.q.format.math, kept=kept)


Backend = Callable[[Call, Context], Tensor]
BACKENDS: dict[str, Backend] = {
    "flash": flash,
    "efficient": efficient,
    "cudnn": cudnn,
    "math": math,
}
