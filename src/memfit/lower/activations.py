"""Activation functions by the names of transformers' ACT2FN: those of one kernel, and those written
out in several operations.

Expressions follow transformers 5.23 activations.py, what autograd keeps follows torch 2.13
(tools/autograd/derivatives.yaml). Python frees a temporary as soon as the operation that used it
returns: its last use (`lifetimes`).
"""

from __future__ import annotations

from collections.abc import Callable

from memfit.formats import BOOL, FP32
from memfit.lower import ops
from memfit.lower.context import Context
from memfit.lower.lifetimes import Scope, Value, scoped
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor

Run = Callable[[Tensor, Context], Tensor]


@scoped
def activate(own: Scope, x: Value, name: str, ctx: Context) -> Value:
    return own(ACTIVATIONS[name], x, ctx)


def kernel(op: str) -> Run:
    """One kernel that keeps its input, or its output."""
    return lambda x, ctx: ops.activation(ctx.r, x, op)


def linear(x: Tensor, ctx: Context) -> Tensor:
    return x


@scoped
def gelu_new(own: Scope, x: Value, ctx: Context) -> Value:
    """0.5 x · (1 + tanh(c (x + 0.044715 x³)))."""
    r = ctx.r
    half = own(ops.scale, r, x)
    cube = own(power, x, ctx)
    scaled = own(ops.scale, r, cube.last)
    total = own(ops.add, r, x, scaled.last)
    inner = own(ops.scale, r, total.last)
    return own(halved, r, half, inner.last, "tanh")


@scoped
def halved(own: Scope, r: Recorder, half: Value, inner: Value, op: str) -> Value:
    """half · (1 + op(inner))."""
    curve = own(erf, r, inner.last) if op == "erf" else own(ops.activation, r, inner.last, op)
    above = own(ops.add_scalar, r, curve.last)
    return own(ops.mul, r, half, above.last)


@scoped
def gelu_fast(own: Scope, x: Value, ctx: Context) -> Value:
    """0.5 x · (1 + tanh(c x · (1 + 0.044715 x · x)))."""
    r = ctx.r
    half = own(ops.scale, r, x)
    inner = own(fast_inner, r, x)
    return own(halved, r, half, inner.last, "tanh")


@scoped
def fast_inner(own: Scope, r: Recorder, x: Value) -> Value:
    left = own(ops.scale, r, x)
    scaled = own(ops.scale, r, x)
    square = own(ops.mul, r, scaled.last, x)
    above = own(ops.add_scalar, r, square.last)
    return own(ops.mul, r, left.last, above.last)


@scoped
def gelu_python(own: Scope, x: Value, ctx: Context) -> Value:
    """0.5 x · (1 + erf(x / √2))."""
    half = own(ops.scale, ctx.r, x)
    inner = own(ops.scale, ctx.r, x)
    return own(halved, ctx.r, half, inner.last, "erf")


@scoped
def quick_gelu(own: Scope, x: Value, ctx: Context) -> Value:
    """x · σ(1.702 x)."""
    scaled = own(ops.scale, ctx.r, x)
    curve = own(ops.activation, ctx.r, scaled.last, "sigmoid")
    return own(ops.mul, ctx.r, x, curve.last)


@scoped
def gelu_10(own: Scope, x: Value, ctx: Context) -> Value:
    """gelu, then clipped."""
    curve = own(ops.activation, ctx.r, x, "gelu")
    return own(clamp, ctx.r, curve.last)


@scoped
def relu2(own: Scope, x: Value, ctx: Context) -> Value:
    """relu, squared; autocast squares in fp32. The variable `relu_applied` holds the first."""
    relu = own(ops.activation, ctx.r, x, "relu")
    return own(power, relu, ctx)


@scoped
def laplace(own: Scope, x: Value, ctx: Context) -> Value:
    """0.5 (1 + erf((x − μ) / (σ √2)))."""
    r = ctx.r
    above = own(ops.add_scalar, r, x)
    scaled = own(ops.scale, r, above.last)
    curve = own(erf, r, scaled)
    total = own(ops.add_scalar, r, curve.last)
    return own(ops.scale, r, total.last)


@scoped
def sqrtsoftplus(own: Scope, x: Value, ctx: Context) -> Value:
    r = ctx.r
    wide = own(ops.cast, r, x, FP32) if ctx.autocast else x
    soft = own(ops.activation, r, wide.last if ctx.autocast else x, "softplus")
    return own(sqrt, r, soft)


def sqrt(r: Recorder, x: Tensor) -> Tensor:
    out = r.like(x, "sqrt")
    return r.node("sqrt", out, (x,), back_sqrt, (out.detach(),))


def back_sqrt(r: Recorder, node: Node, g: Tensor) -> Grads:
    """grad / (2 · result)."""
    double = r.like(g, "sqrt")
    result = r.like(g, "sqrt")
    del double
    return (result,)


@scoped
def power(own: Scope, x: Value, ctx: Context) -> Value:
    """`pow`, which autocast runs in fp32."""
    if not ctx.autocast:
        return own(ops.square, ctx.r, x)
    wide = own(ops.cast, ctx.r, x, FP32)
    return own(ops.square, ctx.r, wide.last)


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
    name: kernel(op)
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
