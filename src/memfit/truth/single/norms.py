"""Benchmarks of norms and rotary positions (benchmark/scripts/benchmark_rms_norm.py, _layer_norm,
_rope, _llama4_rope, _fused_add_rms_norm)."""

from __future__ import annotations

from memfit.formats import BF16, FP32, INT64
from memfit.libraries.liger import kernels as liger
from memfit.lower import norms, ops, views
from memfit.lower.attention.rotary import half_turned, with_tables
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.modules import Norm
from memfit.truth.single.bench import Bench, Step

# Figures carry the version before the one that has the code (each came with the change), so a
# version stands for the code after it.
AGGREGATES_SINCE = (0, 3)  # e1e9d2e, in 0.4.0
ATOMIC = (0, 6)  # 6a2c491, in 0.6.1 to 0.6.3: ops/layer_norm.py adds into one row of zeros


def rms_norm(bench: Bench) -> Step:
    """Both modules' fp32 weights exist; the one that is not used stays idle."""
    rows, width = bench.shapes["M"], bench.shapes["H"]
    weight, _ = bench.tensor((width,), FP32, True), bench.tensor((width,), FP32, True)
    x, g = bench.tensor((rows, width), BF16, True), bench.tensor((rows, width), BF16)

    def step() -> None:
        if bench.liger and bench.version < AGGREGATES_SINCE:
            out = rms_norm_by_rows(bench.r, x, weight)
        elif bench.liger:
            out = liger.rms_norm(bench.r, x, weight, bench.processors)
        else:
            out = norms.llama(
                x, Norm(name="norm", width=width), bench.bound(norm=weight), bench.ctx
            )
        bench.backward(out, g)

    return step


def rms_norm_by_rows(r: Recorder, x: Tensor, weight: Tensor) -> Tensor:
    """The weight's gradient is kept for every row, in the weight's dtype, and summed by torch
    (ops/rms_norm.py rms_norm_backward, v0.2.1)."""
    out = r.like(x, "liger_rms_norm")
    rows = r.tensor((x.count // x.shape[-1],), FP32, "liger_rms_norm")
    return r.node("liger_rms_norm", out, (x, weight), back_by_rows, (x, weight, rows))


def back_by_rows(r: Recorder, node: Node, g: Tensor) -> Grads:
    x, weight, _ = node.saved
    every = r.tensor(x.shape, weight.format, "liger_rms_norm")
    return g.detach(), ops.over_rows(r, every, weight.shape, ops.grad_part(node, 1))


def layer_norm(bench: Bench) -> Step:
    """Liger's of mid-2025 adds up the weights' gradients with atomics; before and after, each
    processor has a row of them."""
    rows, width = bench.shapes["M"], bench.shapes["N"]
    weight, bias = bench.tensor((width,), FP32, True), bench.tensor((width,), FP32, True)
    bench.tensor((width,), FP32, True), bench.tensor((width,), FP32, True)
    x, g = bench.tensor((rows, width), FP32, True), bench.tensor((rows, width), FP32)

    processors = 1 if bench.version == ATOMIC else bench.processors

    def step() -> None:
        out = (
            liger.layer_norm(bench.r, x, weight, bias, processors)
            if bench.liger
            else ops.layer_norm(bench.r, x, weight, bias)
        )
        bench.backward(out, g)

    return step


# ---------------------------------------------------------------------------- a sum, then its norm
def fused_add_rms_norm(bench: Bench) -> Step:
    """x and a residual are added; the sum and its norm are both returned and both get a gradient.
    Three modules exist: one fused, one written out, one with Liger's norm in it."""
    rows, width, r = bench.shapes["M"], bench.shapes["H"], bench.r
    fused, plain, around, inner = (bench.tensor((width,), FP32, True) for _ in range(4))
    x, residual, g_norm, g_sum = (bench.tensor((rows, width), bench.dtype) for _ in range(4))
    for one in (x, residual):
        one.needs = True
        one.grad = bench.tensor(
            one.shape, one.format
        )  # each has its own from the first call on: two hold what the kernel hands back

    def step() -> None:
        if bench.provider == "liger_fused_add_rms_norm":
            out, both = added_norm(r, x, residual, fused, bench.processors)
        else:
            wide = ops.add(r, ops.cast(r, x, FP32), ops.cast(r, residual, FP32))
            if bench.provider == "huggingface":
                hidden = norms.unit(r, wide, ops.mean(r, ops.square(r, wide)))
            else:
                hidden = liger.rms_norm(r, wide, inner, bench.processors, in_place=False)
            out = ops.mul(
                r,
                plain if bench.provider == "huggingface" else around,
                ops.cast(r, hidden, x.format),
            )
            both = ops.cast(r, wide, x.format)
            del wide, hidden
        r.backward(out, g_norm, (both, g_sum))

    return step


def added_norm(
    r: Recorder, x: Tensor, residual: Tensor, weight: Tensor, processors: int
) -> tuple[Tensor, Tensor]:
    """Keeps the sum and one fp32 number a row (ops/fused_add_rms_norm.py, v0.7.0)."""
    out, both = (
        r.tensor(x.shape, x.format, "liger_add_norm"),
        r.tensor(x.shape, x.format, "liger_add_norm"),
    )
    rows = r.tensor((x.count // x.shape[-1],), FP32, "liger_add_norm")
    r.node(
        "liger_add_norm",
        out,
        (x, residual, weight),
        back_added_norm,
        (both.detach(), weight, rows),
        processors,
    )
    node = out.node
    assert node is not None
    node.outputs = 2
    both.node, both.needs, both.slot = node, True, 1
    return out, both


def back_added_norm(r: Recorder, node: Node, given: dict[int, Tensor]) -> Grads:
    """One gradient for both summands; the weight's by each processor first
    (fused_add_rms_norm_backward; `in_place` is off)."""
    both, weight, _ = node.saved
    partial = r.tensor((node.extra, both.shape[-1]), FP32, "liger_add_norm")
    to_x = r.tensor(both.shape, both.format, "liger_add_norm")
    return to_x, to_x.detach(), liger.summed(r, node, 2, partial, weight)


# ------------------------------------------------------------------------------------------ rotary
def rope(bench: Bench) -> Step:
    """`torch.autograd.grad`: gradients are returned and dropped, not gathered."""
    shapes, r = bench.shapes, bench.r
    tokens = shapes.get("seq_len") or shapes["T"]
    head = (shapes.get("hidden_size") or shapes["H"]) // shapes["num_q_heads"]
    heads = shapes["num_q_heads"], shapes["num_kv_heads"]
    given = [
        views.permuted(bench.tensor((1, tokens, count, head), BF16), (0, 2, 1, 3))
        for count in heads
    ]
    gradients = [
        views.permuted(bench.tensor((1, tokens, count, head), BF16), (0, 2, 1, 3))
        for count in heads
    ]
    bench.tensor((1, tokens), INT64)
    cos, sin = bench.tensor((1, tokens, head), BF16), bench.tensor((1, tokens, head), BF16)
    for one in given:
        one.needs = True

    def step() -> None:
        q, k = given
        turned = (
            liger.rope(r, q, k, cos, sin)
            if bench.liger
            else (
                with_tables(r, q, cos, sin, half_turned),
                with_tables(r, k, cos, sin, half_turned),
            )
        )
        root = r.node("outputs", turned[0].detach(), turned, lambda r, node, g: tuple(gradients))
        bench.backward(root, gradients[0])
        q.grad = k.grad = None

    return step


def llama4_rope(bench: Bench) -> Step:
    """Complex tables, made of transposed angles (transformers modeling_llama4.py
    Llama4TextRotaryEmbedding, apply_rotary_emb)."""
    shapes, r = bench.shapes, bench.r
    tokens = shapes.get("seq_len") or shapes["T"]
    head = (shapes.get("hidden_size") or shapes["H"]) // shapes["num_q_heads"]
    heads = shapes["num_q_heads"], shapes["num_kv_heads"]
    given = [bench.tensor((1, tokens, count, head), BF16, True) for count in heads]
    gradients = [bench.tensor((1, tokens, count, head), BF16) for count in heads]
    bench.tensor((1, tokens), INT64), bench.tensor((head // 2,), FP32)
    bench.tensor((1, tokens, head // 2, 2), FP32)

    def step() -> None:
        if bench.liger:
            halves(r, (tokens, head // 2))  # in place, forward and backward alike
            halves(r, (tokens, head // 2))
            return
        wide = [ops.cast(r, one, FP32) for one in given]
        turned = [
            r.node("complex_mul", r.like(one, "complex_mul"), (one,), back_complex) for one in wide
        ]
        outs = [ops.cast(r, one, BF16) for one in turned]
        del wide, turned
        root = r.node("outputs", outs[0].detach(), tuple(outs), lambda r, node, g: tuple(gradients))
        bench.backward(root, gradients[0])
        for one in given:
            one.grad = None

    return step


def back_complex(r: Recorder, node: Node, g: Tensor) -> Grads:
    """Times the conjugate of a table that is small."""
    return (r.like(g, node.op),)


def halves(r: Recorder, shape: tuple[int, int]) -> None:
    """Real and imaginary parts in 16 bits: the cast keeps the order of the transposed angles, so
    that `.contiguous()` copies once more, one part after the other (ops/llama4_rope.py
    _cast_and_contiguous, 10b6cde)."""
    real = r.tensor(shape, BF16, "to")
    real = r.tensor(shape, BF16, "contiguous")
    imaginary = r.tensor(shape, BF16, "to")
    imaginary = r.tensor(shape, BF16, "contiguous")
    del real, imaginary
