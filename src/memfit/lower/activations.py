"""Activation functions by the names of transformers' ACT2FN: those of one kernel, and those written
out in several operations.

Expressions follow transformers 5.23 activations.py, what autograd keeps follows torch 2.13
(tools/autograd/derivatives.yaml). Python frees a temporary as soon as the operation that used it
returns, and so does the order of statements here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memfit.formats import BOOL, FP32
from memfit.lower import ops
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor

Run = Callable[[Tensor, Context], Tensor]


def activate(x: Tensor, name: str, ctx: Context) -> Tensor:
    return ACTIVATIONS[name](x, ctx)


def kernel(x: Tensor, ctx: Context, *, op: str) -> Tensor:
    """One kernel that keeps its input, or its output."""
    return ops.activation(ctx.r, x, op)


def linear(x: Tensor, ctx: Context) -> Tensor:
    return x


def gelu_new(x: Tensor, ctx: Context) -> Tensor:
    """0.5 x · (1 + tanh(c (x + 0.044715 x³)))."""
    r = ctx.r
    half = ops.scale(r, x)
    return ops.mul(
        r,
        half,
        ops.add_scalar(
            r, ops.activation(r, ops.scale(r, ops.add(r, x, ops.scale(r, power(x, ctx)))), "tanh")
        ),
    )


def gelu_fast(x: Tensor, ctx: Context) -> Tensor:
    """0.5 x · (1 + tanh(c x · (1 + 0.044715 x · x)))."""
    r = ctx.r
    half = ops.scale(r, x)
    return ops.mul(r, half, ops.add_scalar(r, ops.activation(r, fast_inner(r, x), "tanh")))


def fast_inner(r: Recorder, x: Tensor) -> Tensor:
    return ops.mul(r, ops.scale(r, x), ops.add_scalar(r, ops.mul(r, ops.scale(r, x), x)))


def gelu_python(x: Tensor, ctx: Context) -> Tensor:
    """0.5 x · (1 + erf(x / √2))."""
    r = ctx.r
    half = ops.scale(r, x)
    return ops.mul(r, half, ops.add_scalar(r, erf(r, ops.scale(r, x))))


def quick_gelu(x: Tensor, ctx: Context) -> Tensor:
    """x · σ(1.702 x)."""
    return ops.mul(ctx.r, x, ops.activation(ctx.r, ops.scale(ctx.r, x), "sigmoid"))


def gelu_10(x: Tensor, ctx: Context) -> Tensor:
    """gelu, then clipped."""
    return clamp(ctx.r, ops.activation(ctx.r, x, "gelu"))


def relu2(x: Tensor, ctx: Context) -> Tensor:
    """relu, squared; autocast squares in fp32. The variable `relu_applied` holds the first."""
    relu = ops.activation(ctx.r, x, "relu")
    return power(relu, ctx)


def laplace(x: Tensor, ctx: Context) -> Tensor:
    """0.5 (1 + erf((x − μ) / (σ √2)))."""
    r = ctx.r
    x = ops.scale(r, ops.add_scalar(r, x))
    return ops.scale(r, ops.add_scalar(r, erf(r, x)))


def sqrtsoftplus(x: Tensor, ctx: Context) -> Tensor:
    r = ctx.r
    soft = ops.activation(r, ops.cast(r, x, FP32) if ctx.autocast else x, "softplus")
    out = r.like(soft, "sqrt")
    return r.node("sqrt", out, (soft,), back_sqrt, (out.detach(),))


def back_sqrt(r: Recorder, node: Node, g: Tensor) -> Grads:
    """grad / (2 · result)."""
    double = r.like(g, "sqrt")
    result = r.like(g, "sqrt")
    del double
    return (result,)


def power(x: Tensor, ctx: Context) -> Tensor:
    """`pow`, which autocast runs in fp32."""
    return ops.square(ctx.r, ops.cast(ctx.r, x, FP32) if ctx.autocast else x)


def erf(r: Recorder, x: Tensor) -> Tensor:
    out = r.like(x, "erf")
    return r.node("erf", out, (x,), back_erf, (x,))


def back_erf(r: Recorder, node: Node, g: Tensor) -> Grads:
    """2/√π · exp(−(x²)) · grad, whose four inner results live until the expression ends."""
    inner = [r.like(node.saved[0], "erf") for _ in ("pow", "neg", "exp", "mul")]
    result = r.like(g, "erf")
    del inner
    return (result,)


def clamp(r: Recorder, x: Tensor, bounds: int = 2) -> Tensor:
    """Between two numbers, or held to one; also MPT's and OLMo's clipped projections."""
    return r.node("clamp", r.like(x, "clamp"), (x,), back_clamp, (x,), bounds)


def back_clamp(r: Recorder, node: Node, g: Tensor) -> Grads:
    """where((x ≥ low) and (x ≤ high), grad, 0); two masks are joined in place (FunctionsManual.cpp
    clamp_backward)."""
    x = node.saved[0]
    masks = [ops.laid(r.tensor(x.shape, BOOL, "clamp"), x) for _ in range(node.extra)]
    result = ops.laid(r.tensor(x.shape, g.format, "clamp"), masks[0], g)
    del masks
    return (result,)


def bloom_gelu(x: Tensor, ctx: Context) -> Tensor:
    """A function of its own that keeps its input and does the rest again (transformers 5.23
    modeling_bloom.py GeLUFunction)."""
    r = ctx.r
    half = r.like(x, "bloom_gelu")
    tanh = inner_tanh(r, x)
    above = r.like(x, "bloom_gelu")
    del tanh
    out = r.like(x, "bloom_gelu")
    del half, above
    return r.node("bloom_gelu", out, (x,), back_bloom_gelu, (x,))


def inner_tanh(r: Recorder, x: Tensor) -> Tensor:
    """tanh(0.79788456 x · (1 + 0.044715 x · x))."""
    scaled = r.like(x, "bloom_gelu")
    value = r.like(x, "bloom_gelu")
    for _ in ("mul", "add"):
        value = r.like(x, "bloom_gelu")
    product = r.like(x, "bloom_gelu")
    del scaled, value
    return r.like(product, "bloom_gelu")


def back_bloom_gelu(r: Recorder, node: Node, g: Tensor) -> Grads:
    """ff = 0.5 x · ((1 − t·t) · (a + b x · x)) + 0.5 (1 + t), times grad (bloom_gelu_back)."""
    x = node.saved[0]
    tanh = inner_tanh(r, x)
    half = r.like(x, "bloom_gelu")
    slope = r.like(tanh, "bloom_gelu")
    slope = r.like(tanh, "bloom_gelu")
    value = r.like(x, "bloom_gelu")
    for _ in ("mul", "add"):
        value = r.like(x, "bloom_gelu")
    product = r.like(x, "bloom_gelu")
    del slope, value
    first = r.like(x, "bloom_gelu")
    del half, product
    second = r.like(tanh, "bloom_gelu")
    second = r.like(tanh, "bloom_gelu")
    total = r.like(x, "bloom_gelu")
    del first, second
    return (r.like(total, "bloom_gelu"),)


ACTIVATIONS: dict[str, Run] = {
    name: partial(kernel, op=op)
    for name, op in {
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "hardswish": "hardswish",
        "leaky_relu": "leaky_relu",
        "mish": "mish",
        "relu": "relu",
        "relu6": "relu6",
        "sigmoid": "sigmoid",
        "silu": "silu",
        "swish": "silu",
        "tanh": "tanh",
    }.items()
}
ACTIVATIONS |= {
    "bloom_gelu": bloom_gelu,
    "gelu_10": gelu_10,
    "gelu_accurate": gelu_new,
    "gelu_fast": gelu_fast,
    "gelu_new": gelu_new,
    "gelu_python": gelu_python,
    "gelu_python_tanh": gelu_new,
    "laplace": laplace,
    "linear": linear,
    "quick_gelu": quick_gelu,
    "relu2": relu2,
    "sqrtsoftplus": sqrtsoftplus,
}
