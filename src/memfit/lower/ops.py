"""Operations as torch runs them on CUDA: what each allocates, saves and holds for a moment, forward
and backward.

Orders and temporaries follow torch 2.13 (tools/autograd/derivatives.yaml,
torch/csrc/autograd/FunctionsManual.cpp); each was watched on the meta device. `back_*` functions
return one gradient per input, in input order.
"""

from __future__ import annotations

from memfit import kernels
from memfit.formats import BOOL, FP16, FP32, INT64, Format
from memfit.lower.recorder import Recorder
from memfit.lower.strides import contiguous, joined, normal, viewed
from memfit.lower.tensors import Grads, Node, Shape, Storage, Tensor
from memfit.tape import Part


def grad_part(node: Node, index: int) -> Part:
    """A gradient that goes straight to a parameter is one; all others pass by, and those added into
    one that is there."""
    target = node.inputs[index]
    return (
        "gradients"
        if isinstance(target, Tensor) and target.name and target.grad is None
        else "temporaries"
    )


def sole_part(r: Recorder, node: Node, index: int) -> Part:
    """A tied table's gradients are two, and their sum is a third."""
    target = node.inputs[index]
    return (
        "temporaries"
        if isinstance(target, Tensor) and target.name in r.shared
        else grad_part(node, index)
    )


# ------------------------------------------------------------------------------ element by element
def cast(r: Recorder, x: Tensor, format: Format) -> Tensor:
    """`x.to(dtype)`: the tensor itself where nothing changes."""
    if x.format is format:
        return x
    return r.node("to", laid(r.tensor(x.shape, format, "to"), x), (x,), back_cast, extra=x.format)


def back_cast(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (laid(r.tensor(g.shape, node.extra, "to", sole_part(r, node, 0)), g),)


def laid(out: Tensor, *operands: Tensor) -> Tensor:
    """An element-by-element result lies as its operands do (TensorIterator)."""
    for one in operands:
        if one.strides is not None:
            out.strides = joined(out.shape, *((one.shape, one.strides) for one in operands))
            break
    return out


def scale(r: Recorder, x: Tensor, op: str = "scale") -> Tensor:
    """Times a number, or negated: nothing is saved."""
    out = r.like(x, op)
    return r.node(op, out, (x,), back_like, extra=x.shape)


def back_like(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (
        r.like(g, node.op) if g.shape == node.extra else r.tensor(node.extra, g.format, node.op),
    )


def add_scalar(r: Recorder, x: Tensor) -> Tensor:
    out = r.like(x, "add")
    return r.node("add", out, (x,), back_through)


def back_through(r: Recorder, node: Node, g: Tensor) -> Grads:
    return tuple(g.view(*g.shape) if target is not None else None for target in node.inputs)


def add(r: Recorder, a: Tensor, b: Tensor) -> Tensor:
    """a + b, promoted; `b` may be broadcast. The gradient goes to both as it is, summed where it
    was broadcast."""
    out = laid(r.tensor(wider(a, b), promoted(a, b), "add"), a, b)
    return r.node("add", out, (a, b), back_add, extra=((a.shape, a.format), (b.shape, b.format)))


def add_in_place(r: Recorder, a: Tensor, b: Tensor) -> Tensor:
    """`a += b`."""
    return r.node(
        "add", a.view(*a.shape), (a, b), back_add, extra=((a.shape, a.format), (b.shape, b.format))
    )


def back_add(r: Recorder, node: Node, g: Tensor) -> Grads:
    return [
        reduced(r, node, index, g, *node.extra[index]) if target is not None else None
        for index, target in enumerate(node.inputs)
    ]


def sub(r: Recorder, a: Tensor, b: Tensor) -> Tensor:
    """a − b, `b` broadcast; its gradient is negated at full size, and made before `a`'s."""
    out = laid(r.tensor(a.shape, promoted(a, b), "sub"), a, b)
    return r.node("sub", out, (a, b), back_sub, extra=((a.shape, a.format), (b.shape, b.format)))


def back_sub(r: Recorder, node: Node, g: Tensor) -> Grads:
    negated = r.like(g, "neg") if node.inputs[1] is not None else None
    to_a = reduced(r, node, 0, g, *node.extra[0]) if node.inputs[0] is not None else None
    return [to_a, None if negated is None else reduced(r, node, 1, negated, *node.extra[1])]


def reduced(r: Recorder, node: Node, index: int, g: Tensor, shape: Shape, format: Format) -> Tensor:
    """The engine's validate_outputs: a gradient is summed to its input's shape and cast to its
    dtype."""
    wanted = 1
    for size in shape:
        wanted *= size
    if wanted != g.count:
        g = over_rows(r, g, shape, grad_part(node, index))
    if format is not g.format:
        return laid(r.tensor(shape, format, "to", grad_part(node, index)), g)
    return g.view(*shape)


def over_rows(r: Recorder, g: Tensor, shape: Shape, part: Part) -> Tensor:
    """A sum; where whole leading dimensions go, blocks of threads may share a column, and put their
    parts by (aten/src/ATen/native/cuda/Reduce.cuh)."""
    out = r.tensor(shape, g.format, "sum", part)
    if g.strides is None and g.shape[len(g.shape) - len(shape) :] == shape:
        held = [r.scratch(size, "partial_sums") for size in r.sums(g.count // out.count, out.count)]
        del held
    return out


def wider(a: Tensor, b: Tensor) -> Shape:
    """The shape of a result where the smaller operand is broadcast; of as many values, that with
    more dimensions (one token)."""
    return a.shape if (a.count, len(a.shape)) >= (b.count, len(b.shape)) else b.shape


def promoted(a: Tensor, b: Tensor) -> Format:
    return a.format if a.format.block_bytes >= b.format.block_bytes else b.format


def mul(r: Recorder, a: Tensor, b: Tensor, op: str = "mul") -> Tensor:
    """a · b, promoted; the smaller one is broadcast."""
    out = laid(r.tensor(wider(a, b), promoted(a, b), op), a, b)
    saved = (a if b.needs else None, b if a.needs else None)
    return r.node(op, out, (a, b), back_mul, saved, ((a.shape, a.format), (b.shape, b.format)))


def back_mul(r: Recorder, node: Node, g: Tensor) -> Grads:
    """`other` first, then `self`, both at full size; then the engine sums what was broadcast."""
    a, b = node.saved
    to_b = (
        laid(r.tensor(g.shape, g.format, node.op, product_part(node, 1, g)), g, a)
        if a is not None
        else None
    )
    to_a = (
        laid(r.tensor(g.shape, g.format, node.op, product_part(node, 0, g)), g, b)
        if b is not None
        else None
    )
    del a, b
    spent(node)
    if to_a is not None:
        to_a = reduced(r, node, 0, to_a, *node.extra[0])
    if to_b is not None:
        to_b = reduced(r, node, 1, to_b, *node.extra[1])
    return [to_a, to_b]


def spent(node: Node) -> None:
    """What a checkpoint or a hook brought back goes when the formula has run; what a node saved
    itself goes after the engine has summed and cast the result (torch/csrc/autograd/engine.cpp
    validate_outputs, then release_variables)."""
    if node.frame is not None or node.packed:
        node.saved = ()


def product_part(node: Node, index: int, g: Tensor) -> Part:
    return grad_part(node, index) if node.extra[index][0] == g.shape else "temporaries"


def square(r: Recorder, x: Tensor) -> Tensor:
    """`x.pow(2)`."""
    out = r.like(x, "pow")
    return r.node("pow", out, (x,), back_power, (x,))


def back_power(r: Recorder, node: Node, g: Tensor) -> Grads:
    """grad · (n · x^(n-1)): both inner results live until the expression ends (FunctionsManual.cpp
    pow_backward)."""
    power = r.like(node.saved[0], "pow")
    product = r.like(power, "pow")
    result = r.like(power, "pow")
    del power, product
    return (result,)


def mean(r: Recorder, x: Tensor) -> Tensor:
    """Over the last dimension, kept."""
    out = r.tensor((*x.shape[:-1], 1), x.format, "mean")
    return r.node("mean", out, (x,), back_like, extra=x.shape)


def rsqrt(r: Recorder, x: Tensor) -> Tensor:
    out = r.like(x, "rsqrt")
    return r.node("rsqrt", out, (x,), back_rsqrt, (out.detach(),))


def back_rsqrt(r: Recorder, node: Node, g: Tensor) -> Grads:
    cube = r.like(g, "rsqrt")
    product = r.like(g, "rsqrt")
    result = r.like(g, "rsqrt")
    del cube, product
    return (result,)


def activation(r: Recorder, x: Tensor, op: str) -> Tensor:
    """silu, gelu, gelu_tanh, relu, tanh: one kernel each; relu and tanh keep their output, the
    others their input."""
    out = r.like(x, op)
    saved = out.detach() if op in ("relu", "tanh", "sigmoid") else x
    return r.node(op, out, (x,), back_like, (saved,), x.shape)


def dropout(r: Recorder, x: Tensor, p: float) -> Tensor:
    """CUDA's fused dropout keeps a byte mask (aten/src/ATen/native/cuda/Dropout.cu); p = 1 is a
    product with a zero (aten/src/ATen/native/Dropout.cpp _dropout_impl); p = 0, as outside of
    training, is nothing."""
    if p == 0.0:
        return x
    if p == 1.0:
        zero = r.tensor((1,), x.format, "zeros")
        return r.node("dropout", r.like(x, "dropout"), (x,), back_like, (zero,), x.shape)
    out = r.like(x, "dropout")
    mask = laid(r.tensor(x.shape, BOOL, "dropout"), x)
    return r.node("dropout", out, (x,), back_like, (mask,), x.shape)


def clone(r: Recorder, x: Tensor, op: str = "clone") -> Tensor:
    """A copy, `.contiguous()` of a transposed view among them; the gradient goes through as
    it is."""
    out = r.like(x, op)
    return r.node(op, out, (x,), back_through)


# ------------------------------------------------------------------------------------ cut and join
def cat(r: Recorder, parts: tuple[Tensor, ...], shape: Shape) -> Tensor:
    """In the widest dtype. Gradients of the parts are views of the whole's."""
    format = parts[0].format
    for part in parts[1:]:
        format = promoted(Tensor(shape, format, None), part)
    out = r.tensor(shape, format, "cat")
    return r.node(
        "cat", out, parts, back_cat, extra=tuple((part.shape, part.format) for part in parts)
    )


def back_cat(r: Recorder, node: Node, g: Tensor) -> Grads:
    return [
        piece(r, g, *extra) if target is not None else None
        for extra, target in zip(node.extra, node.inputs, strict=True)
    ]


def piece(r: Recorder, g: Tensor, shape: Shape, format: Format) -> Tensor:
    """A part of a gradient, in the dtype of what it belongs to."""
    part = Tensor(shape, g.format, g.storage)
    part.strides, part.base = (
        normal(shape, contiguous(g.shape) if g.strides is None else g.strides),
        g.base or g.detach(),
    )
    return part if format is g.format else laid(r.tensor(shape, format, "to"), part)


def cut(r: Recorder, x: Tensor, shape: Shape) -> Tensor:
    """`x[..., a:b]`: a view, whose backward fills a tensor of the whole size."""
    out = Tensor(shape, x.format, x.storage)
    return r.node("slice", out, (x,), back_like, extra=x.shape)


def split(r: Recorder, x: Tensor, shapes: tuple[Shape, ...]) -> list[Tensor]:
    """`split`, `chunk`, `unbind`: views; the backward joins the gradients, zeros where one is
    missing."""
    outs = [Tensor(shape, x.format, x.storage) for shape in shapes]
    strides = contiguous(x.shape) if x.strides is None else x.strides
    dim = next(
        (
            dim
            for dim, (part, whole) in enumerate(zip(shapes[0], x.shape, strict=True))
            if part != whole
        ),
        0,
    )
    begin = x.offset
    for out in outs:
        out.strides, out.offset = normal(out.shape, strides), begin
        begin += strides[dim] * out.shape[dim]
    if not (r.grad and x.needs):
        return outs
    r.node("split", outs[0], (x,), back_split, extra=(x.shape, shapes))
    assert outs[0].node is not None
    outs[0].node.outputs = len(outs)
    for slot, out in enumerate(outs):
        out.node, out.needs, out.slot = outs[0].node, True, slot
    return outs


def back_split(r: Recorder, node: Node, given: dict[int, Tensor] | Tensor) -> Grads:
    shape, shapes = node.extra
    if isinstance(given, Tensor):  # all of it was one piece
        given = {0: given}
    if not given:
        return (None,)
    some = next(iter(given.values()))
    zeros = [
        r.tensor(part, some.format, "zeros")
        for slot, part in enumerate(shapes)
        if slot not in given
    ]
    whole = r.tensor(shape, some.format, "cat")
    del zeros
    return (whole,)


# ------------------------------------------------------------------------------------------ matmul
def linear(r: Recorder, x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """`F.linear`: x and W are kept for each other's gradient; the bias keeps nothing."""
    x = packed(r, x)
    shape = (*x.shape[:-1], outputs)
    chosen = r.frame is not None and r.chosen("mm" if bias is None else "addmm")
    out = (
        r.put_out(lambda: r.tensor(shape, x.format, "linear"), chosen)
        if chosen
        else r.tensor(shape, x.format, "linear")
    )
    rows = x.count // x.shape[-1]
    moved = (x.count + out.count + weight.count) * x.format.block_bytes
    r.compute("linear", 2 * rows * x.shape[-1] * outputs, moved, x.format.math, kept=chosen)
    inputs = (x, weight) if bias is None else (x, weight, bias)
    saved = (x if weight.needs else None, weight if x.needs else None)
    back = back_linear if bias is None else back_addmm
    return r.node(
        "linear",
        out,
        inputs,
        back,
        saved,
        (x.shape, weight.shape, 2 * rows * x.shape[-1] * outputs),
    )


def back_linear(r: Recorder, node: Node, g: Tensor) -> Grads:
    """mm: the weight's gradient first, then the input's."""
    x, weight = node.saved
    g = rows(r, g)
    to_weight = product(r, node, 1, node.extra[1], g) if x is not None else None
    to_x = product(r, node, 0, node.extra[0], g) if weight is not None else None
    return [unfolded(to_x), turned(to_weight)]


def back_addmm(r: Recorder, node: Node, g: Tensor) -> Grads:
    """addmm: the input's gradient first, then the weight's, then the bias's."""
    x, weight = node.saved
    g = rows(r, g)
    to_x = product(r, node, 0, node.extra[0], g) if weight is not None else None
    to_weight = product(r, node, 1, node.extra[1], g) if x is not None else None
    del x, weight
    spent(node)
    to_bias = (
        over_rows(r, g, (g.shape[-1],), grad_part(node, 2)) if node.inputs[2] is not None else None
    )
    return [unfolded(to_x), turned(to_weight), to_bias]


def packed(r: Recorder, x: Tensor) -> Tensor:
    """`x.contiguous()`."""
    if x.strides is None:
        return x
    return r.node("contiguous", r.tensor(x.shape, x.format, "contiguous"), (x,), back_through)


def rows(r: Recorder, g: Tensor) -> Tensor:
    """A gradient seen as a matrix: a copy where it does not lie so."""
    if g.strides is None or viewed(g.shape, g.strides, (g.count // g.shape[-1], g.shape[-1]))[0]:
        return g
    return r.tensor(g.shape, g.format, "contiguous")


def unfolded(gradient: Tensor | None) -> Tensor | None:
    """The gradient of an input with more than two dimensions is a view of the matrix that the
    product made, and holds it: nothing is added into it in place."""
    if gradient is not None and len(gradient.shape) > 2:
        gradient.base = gradient.detach()
    return gradient


def turned(gradient: Tensor | None) -> Tensor | None:
    """A weight's gradient is made as the transpose of its transpose: a view, so that a tied table's
    second gradient is added out of place (torch/csrc/autograd/FunctionsManual.cpp mm_mat2_grad)."""
    if gradient is not None:
        gradient.base = gradient.detach()
    return gradient


def product(r: Recorder, node: Node, index: int, shape: Shape, g: Tensor) -> Tensor:
    out = r.tensor(shape, g.format, "linear", sole_part(r, node, index))
    r.compute("linear", node.extra[2], (g.count + out.count) * g.format.block_bytes, g.format.math)
    return out


def matmul(
    r: Recorder, a: Tensor, b: Tensor, shape: Shape, copies: tuple[bool, bool] = (False, False)
) -> Tensor:
    """Batched a @ b. `copies`: the operand is an expanded or oddly strided view that is made
    contiguous first; what is kept is then the copy."""
    a = clone(r, a) if copies[0] else a
    b = clone(r, b) if copies[1] else b
    out = r.tensor(shape, a.format, "matmul")
    flops = 2 * out.count * a.shape[-1]
    r.compute(
        "matmul", flops, (a.count + b.count + out.count) * a.format.block_bytes, a.format.math
    )
    return r.node(
        "matmul",
        out,
        (a, b),
        back_matmul,
        (a if b.needs else None, b if a.needs else None),
        (a.shape, b.shape, flops),
    )


def back_matmul(r: Recorder, node: Node, g: Tensor) -> Grads:
    """bmm: `mat2` first, then `self`."""
    a, b = node.saved
    to_b = product(r, node, 1, node.extra[1], g) if a is not None else None
    to_a = product(r, node, 0, node.extra[0], g) if b is not None else None
    return [to_a, to_b]


def softmax(r: Recorder, x: Tensor, format: Format) -> Tensor:
    """`softmax(dtype=…)`: on CUDA an fp16 input is read as it is and written in fp32 by one kernel;
    bf16 goes through a cast (aten/src/ATen/native/SoftMax.cpp softmax: half_to_float is for Half on
    CUDA alone)."""
    if not (x.format is FP16 and format is FP32):
        x = cast(r, x, format)
    out = r.tensor(x.shape, format, "softmax")
    return r.node("softmax", out, (x,), back_softmax, (out.detach(),), x.format)


def back_softmax(r: Recorder, node: Node, g: Tensor) -> Grads:
    """In the dtype of the input."""
    return (laid(r.tensor(g.shape, node.extra, "softmax"), g),)


# ------------------------------------------------------------------------------- tables and tokens
def embedding(r: Recorder, ids: Tensor, weight: Tensor, rows: int = 0) -> Tensor:
    """`rows`: those of the gradient, where they are not the weight's own."""
    out = r.tensor((*ids.shape, weight.shape[-1]), weight.format, "embedding")
    return r.node(
        "embedding",
        out,
        (weight,),
        back_embedding,
        (ids,),
        ((rows or weight.shape[0], weight.shape[-1]), ids.count),
    )


def back_embedding(r: Recorder, node: Node, g: Tensor) -> Grads:
    """A dense gradient of the whole table; above 3072 tokens the ids are sorted first, and rows are
    summed in fp32 pieces (aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu)."""
    shape, tokens = node.extra
    out = r.tensor(shape, g.format, "embedding", sole_part(r, node, 0))
    scratch = kernels.embedding_backward(tokens, shape[0], shape[1])
    held = [
        r.scratch(size, "embedding")
        for size in (scratch.indices, max(scratch.sorting, scratch.summing))
    ]
    del held
    return (out,)


def layer_norm(
    r: Recorder,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    on: tuple[int, tuple[int, int]] = (108, (2, 13)),
) -> Tensor:
    """torch's own: mean and 1/σ in fp32 per row (aten/src/ATen/native/cuda/layer_norm_kernel.cu).
    What it reads is made contiguous for the kernel, and its result is. `on`: how many processors,
    which torch."""
    held = in_order(r, x)
    out = r.tensor(x.shape, x.format, "layer_norm")
    rows = (*x.shape[:-1], 1)
    stats = (r.tensor(rows, FP32, "layer_norm"), r.tensor(rows, FP32, "layer_norm"))
    del held
    inputs = tuple(one for one in (x, weight, bias) if one is not None)
    return r.node(
        "layer_norm",
        out,
        inputs,
        back_layer_norm,
        (x, weight, bias, *stats),
        (x.shape, x.shape[-1], on),
    )


def in_order(r: Recorder, x: Tensor) -> Storage | None:
    """The contiguous copy that a kernel makes for itself, where a tensor lies otherwise."""
    if x.strides is None:
        return None
    return r.scratch(x.count * x.format.block_bytes, "contiguous_input")


def back_layer_norm(r: Recorder, node: Node, g: Tensor) -> Grads:
    """Many short rows: the sums of both weights' gradients are made in parts, which stay until the
    kernel returns."""
    shape, width, on = node.extra
    grads: list[Tensor | None] = [
        r.tensor(shape, g.format, "layer_norm") if node.inputs[0] is not None else None
    ]
    for index in range(1, len(node.inputs)):
        needed = node.inputs[index] is not None
        grads.append(
            r.tensor((width,), g.format, "layer_norm", grad_part(node, index)) if needed else None
        )
    partial = kernels.norm_backward(g.count // width, width, g.format.block_bytes, *on)
    copies = [in_order(r, one) for one in (g, node.saved[0])]
    held = [r.scratch(partial, "layer_norm") for one in node.inputs[1:] if one is not None]
    del held, copies
    return grads


def cross_entropy(
    r: Recorder, logits: Tensor, labels: Tensor, part: Part = "logits", read: Format | None = None
) -> Tensor:
    """log_softmax (kept), then nll: two scalars; backward holds both and the gradient
    (aten/src/ATen/native/cuda/Loss.cu). `read`: what autocast makes of the log-probabilities for
    nll_loss; log_softmax is told its dtype and left alone (native/LossNLL.cpp cross_entropy_loss).
    """
    return nll_loss(r, log_softmax(r, logits, part), labels, read)


def log_softmax(r: Recorder, logits: Tensor, part: Part = "logits") -> Tensor:
    logs = r.tensor(logits.shape, logits.format, "log_softmax", part)
    return r.node("log_softmax", logs, (logits,), back_loss, (logs.detach(),), logits.shape)


def nll_loss(r: Recorder, logs: Tensor, labels: Tensor, read: Format | None = None) -> Tensor:
    logs = logs if read is None else cast(r, logs, read)
    total = r.tensor((1,), logs.format, "nll_loss", "activations")
    out = r.tensor((1,), logs.format, "nll_loss", "activations")
    return r.node("nll_loss", out, (logs,), back_loss, (logs.detach(), labels, total), logs.shape)


def back_loss(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.tensor(node.extra, g.format, node.op, "logits"),)


def integers(r: Recorder, shape: Shape, op: str, part: Part = "inputs") -> Tensor:
    return r.tensor(shape, INT64, op, part)
