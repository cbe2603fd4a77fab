"""Megatron-core's GPT layer with Transformer Engine (megatron-core 0.16.1, TE 2.18): norm and product in one, fused SwiGLU and rotary
positions, cuDNN or FlashAttention, tokens before sequences, weights' gradients added into one fp32 buffer.

On one GPU, as pretrain_gpt.py runs it: no dropout, bf16 over fp32 copies. Left out: the loss mask (4 bytes a token), partial sums inside
TE's norms (a few MiB), and the attention mask that a data loader may bring (--create-attention-mask-in-dataloader).
"""

from __future__ import annotations

from collections.abc import Callable

from memfit.formats import BF16, BOOL, FP32, INT64
from memfit.lower import functional, ops, views
from memfit.lower.attention import sdpa
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.optimize import Spans
from memfit.lower.programs import Programs
from memfit.lower.recorder import Grads, Node, Recorder, Shape, Storage, Tensor
from memfit.model.modules import MLP, Attention, Block, Embedding, Layer, Linear, Model, Norm, Weight
from memfit.program import Program

TABLE = "rotary_pos_emb"
HOPPER = (9, 0)  # from here on TE prefers cuDNN to FlashAttention (dot_product_attention/utils.py get_attention_backend)
LARGE, SMALL = 2**25 + 2**10, 2**22  # TE's own cuBLAS workspace on Hopper and later, and before (cpp_extensions/gemm.py)


# ------------------------------------------------------------------------------------------------------------ kept for good
def buffers(program: Program) -> tuple[Weight, ...]:
    """Angles of every position in fp32 (models/common/embeddings/rotary_pos_embedding.py, whose results are cached)."""
    mixer = next(block.mixer for block in program.model.layers[0].blocks if isinstance(block.mixer, Attention))
    return (Weight(name=TABLE, shape=(program.job.reach, 1, 1, mixer.rotary), role="buffer", format="float32"),)


def kept(r: Recorder, program: Program, spans: Spans) -> list[Tensor | Storage | None]:
    """fp32 gradients of everything, in one buffer from the start, a span's share at a time here (core/distributed
    param_and_grad_buffer.py); what the products' backward returns in place of a gradient: a block for each shape of matrix, made once (TE
    module/base.py get_dummy_wgrad); and TE's workspace."""
    found: list[Tensor | Storage | None] = []
    for where, tensors in spans:
        r.mark("prepare", where)
        found.append(r.tensor((sum(one.count for one in tensors),), FP32, "main_grad", "gradients"))
    r.mark("prepare")
    found += [r.tensor(shape, BF16, "dummy_wgrad", "workspace") for shape in sorted(matrices(program.model))]
    found.append(r.scratch(LARGE if program.capability >= HOPPER else SMALL, "cublas"))
    return found


def matrices(model: Model) -> set[Shape]:
    """Shapes of the weights as Megatron joins them: queries, keys and values; gate and up."""
    found: set[Shape] = {(model.head.outputs, model.head.inputs)}
    for layer, _ in model.kinds:
        for block in layer.blocks:
            assert isinstance(block.mixer, (Attention, MLP))
            joined, last = parts_of(block.mixer)
            found |= {(sum(one.outputs for one in joined), joined[0].inputs), (last.outputs, last.inputs)}
    return found


def parts_of(mixer: Attention | MLP) -> tuple[tuple[Linear, ...], Linear]:
    """The layers that are one product after the norm, and the one at the end."""
    if isinstance(mixer, Attention):
        return mixer.project, mixer.out
    assert mixer.gate is not None
    return (mixer.gate, mixer.up), mixer.down


# --------------------------------------------------------------------------------------------------------------- the layers
def start(ids: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """Embeddings, turned to (S, B, D); for one sequence that is no copy (language_model_embedding.py)."""
    token = model.embed[0]
    assert isinstance(token, Embedding)
    ctx.positions = ops.integers(ctx.r, (ctx.batch, ctx.tokens), "inputs")
    ctx.r.where = token.name
    x = ops.embedding(ctx.r, ids, bound[f"{token.name}.weight"])
    return ops.packed(ctx.r, views.transpose(ctx.r, x, 0, 1))


def layer(x: Tensor, layer: Layer, bound: Bound, ctx: Context) -> Tensor:
    """residual + attention, residual + feed-forward (transformer_layer.py, fused_bias_dropout.py)."""
    for block in layer.blocks:
        out = (attention if isinstance(block.mixer, Attention) else feed_forward)(x, block, bound, ctx)
        ctx.r.where = bound.prefix
        x = ops.add(ctx.r, x, out)
        del out
    return x


def rms_norm(x: Tensor, module: Norm, bound: Bound, ctx: Context) -> Tensor:
    """TENorm: keeps its input and an fp32 number a row."""
    return functional.fused_rms_norm(ctx.r, x, bound[f"{module.name}.weight"], ctx.program.processors)


def feed_forward(x: Tensor, block: Block, bound: Bound, ctx: Context) -> Tensor:
    """linear_fc1 with its norm, SwiGLU, linear_fc2 (mlp.py)."""
    mixer = block.mixer
    assert isinstance(mixer, MLP)
    return product(swiglu(entered(x, block, bound, ctx), bound.path(mixer.name), ctx.r), mixer.down, bound, ctx)


def attention(x: Tensor, block: Block, bound: Bound, ctx: Context) -> Tensor:
    """linear_qkv with its norm, a group's queries beside its key and value; rotary positions; linear_proj (attention.py SelfAttention).

    The variable `value` is a view of all three, so that they stay until attention returns."""
    mixer, r = block.mixer, ctx.r
    assert isinstance(mixer, Attention)
    n, groups, size = mixer.heads, mixer.kv_heads, mixer.head
    qkv = entered(x, block, bound, ctx)
    r.where = bound.path(mixer.name)
    qkv = views.reshape(r, qkv, *qkv.shape[:2], groups, (n // groups + 2) * size)
    q, k, v = views.split(r, qkv, 3, n // groups * size, size, size)
    del qkv
    q = views.reshape(r, q, *q.shape[:2], n, size)
    if mixer.q_norm is not None and mixer.k_norm is not None:
        q, k = rms_norm(q, mixer.q_norm, bound, ctx), rms_norm(k, mixer.k_norm, bound, ctx)
    q, k = turned(q, r), turned(k, r)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return core(q, k, v, ctx)

    out = again(r, run, q, k, v) if ctx.training and ctx.job.checkpointing == "selective" else run(q, k, v)
    return product(views.reshape(r, out, *out.shape[:2], n * size), mixer.out, bound, ctx)


def core(q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
    """TE's DotProductAttention of (S, B, heads, H): a value that lies otherwise than the key is copied (utils.py get_qkv_layout);
    FlashAttention wants sequences first (backends.py)."""
    r, chosen = ctx.r, ctx.job.attention
    first = chosen == "flash-attn-2" or (chosen == "sdpa" and ctx.capability < HOPPER)
    q, k, v = (ops.packed(r, one) for one in (q, k, v))
    if first:
        q, k, v = (ops.packed(r, views.transpose(r, one, 0, 1)) for one in (q, k, v))
    order = (0, 2, 1, 3) if first else (1, 2, 0, 3)
    q, k, v = (views.permute(r, one, *order) for one in (q, k, v))
    call = sdpa.Call(q=q, k=k, v=v, mask=None, causal=True)
    out = sdpa.flash(call, ctx) if first else sdpa.cudnn(call, ctx)
    return ops.packed(r, views.permute(r, out, 2, 0, 1, 3))


def again(r: Recorder, run: Callable[[Tensor, Tensor, Tensor], Tensor], *given: Tensor) -> Tensor:
    """Selective recomputation of the core of attention: its arguments are kept as they are, the value as a view of all that was
    projected (attention.py _checkpointed_attention_forward, tensor_parallel/random.py CheckpointFunction)."""
    if not r.grad:
        return run(*given)
    r.grad = False
    out = run(*given).detach()
    r.grad = True

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        fresh = [one.detach() for one in node.saved]
        for one in fresh:
            one.needs = True
        part, r.part = r.part, "activations"
        result = run(*fresh)
        r.part = part
        r.backward(result, g)
        return [one.grad for one in fresh]

    return r.node("checkpoint", out, given, back, given)


# ------------------------------------------------------------------------------------------------------ Transformer Engine
def entered(x: Tensor, block: Block, bound: Bound, ctx: Context) -> Tensor:
    """LayerNormLinear: keeps its input, the normed one, and an fp32 number a row (module/layernorm_linear.py)."""
    assert block.norm is not None
    assert isinstance(block.mixer, (Attention, MLP))
    r, layers = ctx.r, [bound.linear(one) for one in parts_of(block.mixer)[0]]
    r.where = layers[0].path
    weight, outputs = bound[f"{block.norm.name}.weight"], sum(one.outputs for one in layers)
    normed, rows = r.like(x, "layernorm_linear"), r.tensor(x.shape[:-1], FP32, "layernorm_linear")
    out = r.tensor((*x.shape[:-1], outputs), x.format, "layernorm_linear")
    flops = cost(r, x, outputs)
    biases = [one.bias for one in layers if one.bias is not None]
    inputs = (x, weight, *biases, *(one.weight for one in layers))
    saved = (x, normed, rows, *(one.weight for one in layers))
    return r.node("layernorm_linear", out, inputs, back_entered, saved, (tuple(one.shape for one in biases), flops))


def back_entered(r: Recorder, node: Node, g: Tensor) -> Grads:
    """The normed input's gradient, the matrix's into the fp32 buffer, then the input's and the norm's own."""
    x, *_ = node.saved
    biases, flops = node.extra
    sums = [r.tensor(one, g.format, "layernorm_linear") for one in biases]
    inner = r.tensor(x.shape, g.format, "layernorm_linear")
    r.compute("layernorm_linear", 2 * flops, 2 * (g.count + x.count) * g.format.block_bytes, g.format.math)
    to_x, to_norm = r.tensor(x.shape, g.format, "layernorm_linear"), r.tensor(x.shape[-1:], g.format, "layernorm_linear")
    del inner
    return [to_x, to_norm, *sums, *(None for _ in node.inputs[2 + len(sums) :])]


def product(x: Tensor, linear: Linear, bound: Bound, ctx: Context) -> Tensor:
    """TE's Linear: keeps its input (module/linear.py)."""
    layer = bound.linear(linear)
    ctx.r.where = layer.path
    return fused(ctx.r, x, layer.weight, layer.outputs, "te_linear")


def fused(r: Recorder, x: Tensor, weight: Tensor, outputs: int, op: str) -> Tensor:
    """A product whose matrix gets its gradient in the fp32 buffer."""
    x = ops.packed(r, x)
    out = r.tensor((*x.shape[:-1], outputs), x.format, op)
    return r.node(op, out, (x, weight), back_fused, (x, weight), cost(r, x, outputs, op))


def back_fused(r: Recorder, node: Node, g: Tensor) -> Grads:
    x, _ = node.saved
    r.compute(node.op, 2 * node.extra, 2 * (g.count + x.count) * g.format.block_bytes, g.format.math)
    return [r.tensor(x.shape, g.format, node.op), None]


def cost(r: Recorder, x: Tensor, outputs: int, op: str = "te_linear") -> int:
    flops = 2 * x.count * outputs
    rows = x.count // x.shape[-1]
    r.compute(op, flops, (x.count + rows * outputs + x.shape[-1] * outputs) * x.format.block_bytes, x.format.math)
    return flops


def swiglu(x: Tensor, where: str, r: Recorder) -> Tensor:
    """silu(x₁)·x₂, compiled: keeps its input (fusions/fused_bias_swiglu.py SwiGLUFunction)."""
    r.where = where
    return r.node("swiglu", r.tensor((*x.shape[:-1], x.shape[-1] // 2), x.format, "swiglu"), (x,), back_alike, (x,), x.shape)


def turned(x: Tensor, r: Recorder) -> Tensor:
    """Fused rotary positions keep the angles alone (TE attention/rope.py FusedRoPEFunc)."""
    return r.node("rope", r.tensor(x.shape, x.format, "rope"), (x,), back_alike, (), x.shape)


def back_alike(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.tensor(node.extra, g.format, node.op),)


# --------------------------------------------------------------------------------------------------------------------- loss
def plain(hidden: Tensor, labels: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """Logits by torch's own product, then an fp32 copy that becomes the probabilities and, in backward, the gradient, in place; it is cast
    as it leaves (tensor_parallel/layers.py, cross_entropy.py)."""
    r = ctx.r
    part, r.part = r.part, "logits"
    head = bound.linear(model.head)
    r.where = head.path
    scores = fused(r, hidden, head.weight, head.outputs, "linear")
    del hidden
    r.where = ""
    rows = scores.count // scores.shape[-1]
    targets = r.tensor((rows,), INT64, "contiguous"), r.tensor((rows,), INT64, "sub"), r.tensor((rows,), BOOL, "or")
    wide = r.tensor(scores.shape, FP32, "float")
    each = r.node("cross_entropy", r.tensor((rows,), FP32, "sub"), (scores,), back_cross_entropy, (wide, *targets[1:]), scores.shape)
    del scores, targets, wide
    total = r.node("sum", r.tensor((1,), FP32, "sum"), (each,), back_alike, (), each.shape)
    r.part = part
    return total


def back_cross_entropy(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.tensor(node.extra, BF16, "to", "logits"),)


PROGRAMS = Programs(
    norms={"llama": rms_norm}, attention={}, mlps={}, moes={}, orders={}, losses={"plain": plain}, layer=layer,
    start=start, buffers=buffers, kept=kept, reentrant=True,
)  # fmt: skip
