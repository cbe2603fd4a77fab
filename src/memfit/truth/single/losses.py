"""Benchmarks of losses that Liger's own kernels make (benchmark_cross_entropy.py,
benchmark_fused_linear_cross_entropy.py, benchmark_jsd.py, benchmark_fused_linear_jsd.py), and of
GRPO's in torch (benchmark_grpo_loss.py, 7812567)."""

from __future__ import annotations

from memfit.formats import BF16, FP32, INT64
from memfit.libraries.liger import kernels as liger
from memfit.libraries.liger.fused_loss import (
    Call,
    back_handed,
    chunk_rows,
    fused_linear_cross_entropy,
)
from memfit.lower import ops
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.truth.single.bench import Bench, Step, exp, lerp, log, summed, total

SCALAR_SINCE = (
    0,
    8,
)  # the script's own JSD in torch is written anew: rows are summed one by one, beta is free


def cross_entropy(bench: Bench) -> Step:
    rows, vocabulary = bench.shapes["B"] * bench.shapes["T"], bench.shapes["V"]
    x, labels = bench.tensor((rows, vocabulary), FP32, True), bench.tensor((rows,), INT64)

    def step() -> None:
        bench.backward(
            liger.cross_entropy(bench.r, x)
            if bench.liger
            else ops.cross_entropy(bench.r, x, labels),
            retain=False,
        )

    return step


def fused_linear(bench: Bench) -> Step:
    """Both modules hold a head of their own."""
    rows, width, vocabulary = bench.shapes["BT"], bench.shapes["H"], bench.shapes["V"]
    weight, _ = (
        bench.tensor((vocabulary, width), BF16, True),
        bench.tensor((vocabulary, width), BF16, True),
    )
    x, labels = bench.tensor((rows, width), BF16, True), bench.tensor((rows,), INT64)

    def step() -> None:
        if bench.liger:
            out = fused_linear_cross_entropy(Call(ctx=bench.ctx, hidden=x, weight=weight))
        else:
            out = ops.cross_entropy(
                bench.r, ops.linear(bench.r, x, weight, None, vocabulary), labels
            )
        bench.backward(out, retain=False)

    return step


# ----------------------------------------------------------------------- Jensen-Shannon divergence
def jsd(bench: Bench) -> Step:
    """Between log-probabilities, of which the first are made of a leaf that the graph keeps."""
    shapes, r = bench.shapes, bench.r
    rows = shapes["BT"] if "BT" in shapes else shapes["B"] * shapes["T"]
    vocabulary = shapes["vocab_size"] if "vocab_size" in shapes else shapes["V"]
    leaf = bench.tensor((rows, vocabulary), FP32, True)
    mine = ops.log_softmax(r, leaf)
    bench.kept.append(mine)
    target = bench.tensor((rows, vocabulary), FP32)
    newer = bench.version >= SCALAR_SINCE

    def step() -> None:
        if bench.liger:
            bench.backward(liger_jsd(r, mine))
        else:
            bench.backward(scalar_jsd(r, mine, target) if newer else torch_jsd(r, mine, target))

    return step


def liger_jsd(r: Recorder, x: Tensor) -> Tensor:
    """A loss for each value in fp32, and the gradient beside it, which is kept (ops/jsd.py
    jsd_forward, 8e2f3a4 and v0.8.0)."""
    losses = r.tensor(x.shape, FP32, "zeros")
    gradient = r.like(x, "liger_jsd")
    out = r.tensor((1,), FP32, "sum")
    del losses
    return r.node("liger_jsd", out, (x,), back_handed, (gradient,))


def divergence(r: Recorder, middle: Tensor, target: Tensor) -> Tensor:
    """`kl_div(log_target=True)`: exp(target) · (target − input) (aten/src/ATen/native/Loss.cpp
    kl_div)."""
    return ops.mul(r, exp(r, target), ops.sub(r, target, middle))


def torch_jsd(r: Recorder, p: Tensor, q: Tensor) -> Tensor:
    """The script's own until 0.7: half of both, one logarithm."""
    middle = ops.scale(r, ops.add(r, exp(r, p), exp(r, q)))
    logs = log(r, middle)
    return total(r, ops.add(r, total(r, divergence(r, logs, p)), total(r, divergence(r, logs, q))))


def scalar_jsd(r: Recorder, q: Tensor, p: Tensor) -> Tensor:
    """From 0.8: rows first, and the logarithm of the middle twice."""
    middle = lerp(r, exp(r, q), exp(r, p))
    first = summed(r, divergence(r, log(r, middle), p))
    return total(
        r,
        ops.add(r, ops.scale(r, first), ops.scale(r, summed(r, divergence(r, log(r, middle), q)))),
    )


def fused_linear_jsd(bench: Bench) -> Step:
    """Two heads, of which Liger trains the student's alone; torch's module trains both."""
    shapes = bench.shapes
    rows, width, vocabulary = shapes["BT"], shapes["H"], shapes["V"]
    student, teacher = (bench.tensor((vocabulary, width), BF16, True) for _ in range(2))
    x, beside = bench.tensor((rows, width), BF16, True), bench.tensor((rows, width), BF16)

    def step() -> None:
        out = (
            fused_jsd(bench.r, x, student)
            if bench.liger
            else two_heads(bench.r, (x, beside), (student, teacher))
        )
        bench.backward(out, retain=False)

    return step


def two_heads(r: Recorder, inputs: tuple[Tensor, Tensor], heads: tuple[Tensor, Tensor]) -> Tensor:
    """benchmark_fused_linear_jsd.py TorchLMHeadJSD and TorchJSD (ff6650b): names there hold what is
    held here."""
    logits = [
        ops.linear(r, x, head, None, head.shape[0]) for x, head in zip(inputs, heads, strict=True)
    ]
    probabilities = [ops.log_softmax(r, ops.scale(r, one)) for one in logits]
    q, p = (ops.cast(r, one, FP32) for one in probabilities)
    middle = lerp(r, exp(r, p), exp(r, q))
    first = total(r, divergence(r, log(r, middle), p))
    out = ops.cast(
        r,
        ops.add(r, ops.scale(r, first), ops.scale(r, total(r, divergence(r, log(r, middle), q)))),
        BF16,
    )
    del logits, probabilities, p, q, middle
    return out


def fused_jsd(r: Recorder, x: Tensor, weight: Tensor) -> Tensor:
    """Chunks of tokens; a loss for each value in fp32 (ops/fused_linear_jsd.py
    fused_linear_jsd_forward, ff6650b)."""
    (rows, width), vocabulary = x.shape, weight.shape[0]
    to_weight = r.tensor(weight.shape, weight.format, "zeros")
    to_x = r.tensor(x.shape, x.format, "zeros")
    losses = r.tensor((rows, vocabulary), FP32, "zeros")
    size = chunk_rows(rows, vocabulary, width)
    student: Tensor | None = None
    teacher: Tensor | None = None
    mine: Tensor | None = None
    other: Tensor | None = None
    for first in range(0, rows, size):
        shape = (min(size, rows - first), vocabulary)
        student, teacher = r.tensor(shape, x.format, "linear"), None
        teacher = r.tensor(shape, x.format, "linear")
        student = r.tensor(shape, x.format, "div")
        teacher = r.tensor(shape, x.format, "div")
        mine = r.tensor(shape, x.format, "log_softmax")
        other = r.tensor(shape, x.format, "log_softmax")
        product = r.tensor(shape, x.format, "softmax")
        product = r.tensor(shape, x.format, "mul")
        product = r.tensor(shape, x.format, "sub")
        student = r.tensor(shape, x.format, "div")
        del product
        piece = r.tensor((shape[0], width), x.format, "linear")
        del piece
    out = r.tensor((1,), x.format, "sum")
    del losses, student, teacher, mine, other
    return r.node("liger_jsd", out, (x, weight), back_handed, (to_x, to_weight))


# -------------------------------------------------------------------------------------------- GRPO
def grpo(bench: Bench) -> Step:
    """GRPO beside a reference model (TorchLMHeadGRPO): logits and log-probabilities of both are
    names until the loss is there."""
    shapes, r = bench.shapes, bench.r
    vocabulary, width = shapes["V"], shapes["H"]
    weight, *_ = (
        bench.tensor((vocabulary, width), BF16, True) for _ in range(4)
    )  # a head and the reference's, in either module
    x = bench.tensor((shapes["B"], shapes["T"], width), BF16, True)
    bench.tensor(x.shape[:2], INT64)
    beside, mask = bench.tensor(x.shape, BF16), bench.tensor(x.shape[:2], FP32)

    def step() -> None:
        logits = ops.linear(r, x, weight, None, vocabulary)
        logs = ops.log_softmax(r, ops.cast(r, logits, FP32))
        mine = taken(r, logs, x.shape[:2])
        reference = r.tensor((*beside.shape[:2], vocabulary), BF16, "linear")
        wide = r.tensor(reference.shape, FP32, "to")
        other = r.tensor(reference.shape, FP32, "log_softmax")
        del wide
        each = exp(r, ops.sub(r, r.tensor(x.shape[:2], FP32, "gather"), mine))
        loss = total(r, ops.mul(r, ops.add(r, each, mine), mask))
        del logits, logs, reference, other
        bench.backward(loss, retain=False)

    return step


def taken(r: Recorder, logs: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`gather(-1, labels)`: the gradient is put into zeros of the whole size (derivatives.yaml
    gather)."""
    index = r.tensor(shape, INT64, "where")
    return r.node(
        "gather", r.tensor(shape, logs.format, "gather"), (logs,), back_taken, (index,), logs.shape
    )


def back_taken(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.tensor(node.extra, g.format, "scatter_add"),)
