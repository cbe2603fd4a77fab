"""Megatron-core's GPT layer with Transformer Engine (megatron-core 0.16.1, TE 2.18): norm and
product in one, fused SwiGLU and rotary positions, cuDNN or FlashAttention, tokens before sequences,
weights' gradients added into one fp32 buffer.

On one GPU, as pretrain_gpt.py runs it: no dropout, bf16 over fp32 copies. Left out: the loss mask
(4 bytes a token), partial sums inside TE's norms (a few MiB), and the attention mask that a data
loader may bring (--create-attention-mask-in-dataloader).
"""

from __future__ import annotations

from collections.abc import Mapping

from memfit.formats import BF16, BOOL
from memfit.libraries.megatron import loss
from memfit.libraries.megatron.attention import HOPPER, attention
from memfit.libraries.megatron.latent import latent
from memfit.libraries.megatron.moe import mixture
from memfit.libraries.megatron.ranks import of, scattered, tensor_parallel
from memfit.libraries.megatron.recompute import again, asked
from memfit.libraries.megatron.te import entered, product, rms_norm, swiglu
from memfit.lower import ops, views
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.programs import Order, Programs
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Shape, Storage, Tensor
from memfit.model.model import Model
from memfit.model.modules import MLP, Attention, Block, Embedding, Latent, Layer, MoE, Weight
from memfit.program import Program

TABLE = "rotary_pos_emb"
LARGE, SMALL = (
    2**25 + 2**10,
    2**22,
)  # TE's own cuBLAS workspace on Hopper and later, and before (cpp_extensions/gemm.py),
STREAMS = 4  # and one more for each stream of grouped products (common/util/multi_stream.cpp)


# ----------------------------------------------------------------------------------- kept for good
def buffers(program: Program) -> tuple[Weight, ...]:
    """Angles of every position in fp32 (models/common/embeddings/rotary_pos_embedding.py, whose
    results are cached)."""
    found = [
        block.mixer
        for block in program.model.layers[0].blocks
        if isinstance(block.mixer, Attention)
    ]
    return tuple(
        Weight(
            name=TABLE, shape=(program.job.reach, 1, 1, one.rotary), role="buffer", format="float32"
        )
        for one in found
    )


def layer_buffers(program: Program) -> tuple[Weight, ...]:
    """Latent attention has tables of its own in each layer: angles in fp32, sines and cosines
    (yarn_rotary_pos_embedding.py)."""
    found = [
        block.mixer for block in program.model.layers[0].blocks if isinstance(block.mixer, Latent)
    ]
    return tuple(
        Weight(
            name=f"{TABLE}.{name}",
            shape=(program.job.reach, 1, 1, one.rope),
            role="buffer",
            format=format,
        )
        for one in found
        for name, format in (("angles", "float32"), ("cos_cached", ""), ("sin_cached", ""))
    )


def kept(r: Recorder, program: Program) -> list[Tensor | Storage | None]:
    """TE's workspaces, and what the head's product gathers into (core/utils.py
    GlobalMemoryBuffer)."""
    r.mark("prepare")
    streams = 1 + (STREAMS if program.model.mixtures else 0)
    size = LARGE if program.capability >= HOPPER else SMALL
    found: list[Tensor | Storage | None] = [r.scratch(size, "cublas") for _ in range(streams)]
    if tensor_parallel(program).sequence and not program.model.headless:
        tokens = program.job.reach // program.strategy.size("cp")
        found.append(
            r.tensor((tokens, program.job.batch, program.model.width), BF16, "mpu", "communication")
        )
    return found


def passed(program: Program, tokens: int) -> Shape:
    """(S, B, D), of which each rank of sequence parallelism has a part."""
    return (tokens // tensor_parallel(program).parts, program.job.batch, program.model.width)


# -------------------------------------------------------------------------------------- the layers
def start(ids: Tensor, model: Model, bound: Bound, ctx: Context) -> Tensor:
    """Embeddings, turned to (S, B, D); for one sequence that is no copy
    (language_model_embedding.py)."""
    r, ranks, token = ctx.r, of(ctx), model.embed[0]
    assert isinstance(token, Embedding)
    ctx.positions = ops.integers(r, (ctx.batch, ctx.tokens), "inputs")
    r.where = token.name
    mask = None
    if ranks.size > 1:
        mask, ids = (
            r.tensor(ids.shape, BOOL, "or"),
            ops.integers(r, ids.shape, "sub", "activations"),
        )
    x = ops.embedding(r, ids, bound[f"{token.name}.weight"])
    if mask is not None:
        x = r.node("index_put", x.view(*x.shape), (x,), back_masked, (mask,))
    x = ops.packed(r, views.transpose(r, x, 0, 1))
    if ranks.sequence:
        return scattered(r, x, ranks)
    if ranks.size > 1:
        ranks.add_up(r, x)
    return x


def back_masked(r: Recorder, node: Node, g: Tensor) -> Grads:
    """Tokens of other ranks' rows are zeroed in place; the gradient is copied for it
    (core/tensor_parallel/layers.py VocabParallelEmbedding)."""
    return (r.like(g, "clone"),)


def layer(x: Tensor, layer: Layer, bound: Bound, ctx: Context) -> Tensor:
    """residual + attention, residual + feed-forward (transformer_layer.py,
    fused_bias_dropout.py)."""
    for block in layer.blocks:
        out = RUNS[type(block.mixer)](x, block, bound, ctx)
        ctx.r.where = bound.prefix
        x = ops.add(ctx.r, x, out)
        del out
    return x


def feed_forward(x: Tensor, block: Block, bound: Bound, ctx: Context) -> Tensor:
    """linear_fc1 with its norm, SwiGLU, linear_fc2 (mlp.py)."""
    mixer = block.mixer
    assert isinstance(mixer, MLP)

    def run(x: Tensor) -> Tensor:
        return product(
            swiglu(entered(x, block, bound, ctx), bound.path(mixer.name), ctx.r),
            mixer.down,
            bound,
            ctx,
        )

    return again(ctx.r, run, x) if asked(ctx, "mlp") else run(x)


RUNS: Mapping[type, Order] = {Attention: attention, Latent: latent, MLP: feed_forward, MoE: mixture}
PROGRAMS = Programs(
    norms={"llama": rms_norm},
    attention={},
    mlps={},
    moes={},
    orders={},
    losses={"plain": loss.plain, "te": loss.fused},
    layer=layer,
    start=start,
    buffers=buffers,
    layer_buffers=layer_buffers,
    kept=kept,
    passed=passed,
    reentrant=True,
)
