"""What each operation of a captured graph is in the small torch. Those that are not named here run
by the template that was captured with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from memfit.errors import InputError
from memfit.formats import COMPLEX64, FP32, Format
from memfit.lower import linears, ops, views
from memfit.lower.attention.sdpa import Call, sdpa
from memfit.lower.captured import templates
from memfit.lower.captured.run import Frame, Run, Step
from memfit.lower.moe import ops as moe
from memfit.lower.recorder import Recorder
from memfit.lower.strides import contiguous, normal
from memfit.lower.tensors import Grads, Node, Tensor

OPERATORS: dict[str, Run] = {}
FLOATS = frozenset({"model", "float32", "float64", "bfloat16", "float16"})


def operator(*names: str) -> Callable[[Run], Run]:
    def add(run: Run) -> Run:
        OPERATORS.update(dict.fromkeys(names, run))
        return run

    return add


def tensors(args: list[Tensor | None]) -> list[Tensor]:
    return [one for one in args if one is not None]


def format_of(step: Step, index: int, args: list[Tensor | None], frame: Frame) -> Format:
    """What the operands promote to; a fixed format where nothing of the model's dtype goes in.
    Autocast was captured with the weights' own dtype, so that most formats are fixed there."""
    spec = step.outs[index]
    fixed = frame.casts is not None and not step.follows
    if spec.format not in FLOATS or fixed:
        return frame.format(spec.format)
    wide = [
        one.format for one in tensors(args) if one.shape and one.format.math[:2] in ("fp", "bf")
    ]
    if spec.format != "model" or not wide:
        return frame.format(spec.format)
    return max(wide, key=lambda one: one.block_bytes)


def fresh(step: Step, args: list[Tensor | None], frame: Frame, index: int = 0) -> Tensor:
    spec = step.outs[index]
    name = step.op.name.partition(".")[0]
    out = frame.ctx.r.tensor(spec.shape, format_of(step, index, args, frame), name, spec.part)
    out.strides = spec.strides
    return out


# ------------------------------------------------------------------------------------------- views
def viewed(step: Step, x: Tensor, index: int = 0) -> Tensor:
    spec = step.outs[index]
    return views.seen(x, spec.shape, spec.strides)


@operator(
    "view",
    "_unsafe_view",
    "unsqueeze",
    "squeeze.dim",
    "squeeze",
    "alias",
    "squeeze.dims",
)
def view(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    """Of the same shape, it lies as its source does, whose layout a kernel may choose."""
    x = tensors(args)[0]
    same = step.outs[0].shape == x.shape
    out = views.seen(x, x.shape, x.strides) if same else viewed(step, x)
    return (frame.ctx.r.node("view", out, (x,), views.back_reshape, extra=x.shape),)


@operator("view_as_real", "view_as_complex")
def parts(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    """Complex numbers as two real ones each, or the other way round; so is the gradient."""
    x = tensors(args)[0]
    out = viewed(step, x)
    pairs = step.op.name == "view_as_complex"
    out.format = COMPLEX64 if pairs else FP32
    return (frame.ctx.r.node("view", out, (x,), views.back_parts, extra=(x.shape, x.format)),)


@operator("transpose.int", "t", "permute", "numpy_T", "mT")
def permute(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    x = tensors(args)[0]
    order = list(range(len(x.shape)))
    if step.op.name == "permute":
        order = [dim % len(order) for dim in step.op.attrs["dims"]]
    else:
        a, b = step.op.attrs.get("dim0", 0), step.op.attrs.get("dim1", 1)
        order[a], order[b] = order[b], order[a]
    back = tuple(order.index(dim) for dim in range(len(order)))
    return (
        frame.ctx.r.node(
            "permute", views.permuted(x, tuple(order)), (x,), views.back_permute, extra=back
        ),
    )


@operator("expand")
def expand(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    x = tensors(args)[0]
    out = viewed(step, x)
    if out.shape == x.shape:
        return (frame.ctx.r.node("view", out, (x,), views.back_reshape, extra=x.shape),)
    return (frame.ctx.r.node("expand", out, (x,), views.back_expand, extra=x.shape),)


@operator("slice.Tensor", "select.int", "narrow")
def piece(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    x = tensors(args)[0]
    op = "select" if step.op.name.startswith("select") else "slice"
    return (frame.ctx.r.node(op, viewed(step, x), (x,), views.back_piece, extra=x.shape),)


@operator("split.Tensor", "split_with_sizes", "chunk", "unbind.int")
def split(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    x = tensors(args)[0]
    r = frame.ctx.r
    outs = [viewed(step, x, index) for index in range(len(step.outs))]
    if not (r.grad and x.needs):
        return tuple(outs)
    shapes = tuple(one.shape for one in outs)
    r.node("split", outs[0], (x,), ops.back_split, extra=(x.shape, shapes))
    node = outs[0].node
    assert node is not None
    node.outputs = len(outs)
    for slot, out in enumerate(outs):
        out.node, out.needs, out.slot = node, True, slot
    return tuple(outs)


# ------------------------------------------------------------------------------ element by element
@operator("_to_copy")
def cast(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    if args[0] is None:  # from the host
        return (fresh(step, args, frame),)
    x = tensors(args)[0]
    spec = step.outs[0]
    format = frame.format(spec.format)
    if step.op.attrs.get("autocast") and isinstance(step.op.inputs[0], str):
        return (linears.cast_weight(x, frame.ctx),) if format is frame.casts else (x,)
    if spec.format == "model" and not step.op.attrs.get("autocast"):
        like = None if step.like is None else frame.env.get(step.like)
        if like is not None:
            format = like.format
        elif frame.casts is None:
            format = frame.ctx.format
    if x.format is format:
        return (x,)
    return (ops.cast(frame.ctx.r, x, format),)


@operator("add.Tensor", "sub.Tensor", "rsub.Scalar", "add.Scalar", "sub.Scalar")
def add(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    r, given = frame.ctx.r, tensors(args)
    if len(given) == 1 or len(args) == 1:
        x = given[0]
        out = fresh(step, args, frame)
        op = step.op.name.partition(".")[0]
        return (r.node(op, out, (x,), ops.back_through),)
    a, b = given
    if step.op.name.startswith("sub") and a.needs | b.needs:
        return (ops.sub(r, a, b),)
    if a.needs or b.needs:
        out = fresh(step, args, frame)
        extra = ((a.shape, a.format), (b.shape, b.format))
        return (r.node("add", out, (a, b), ops.back_add, extra=extra),)
    return (fresh(step, args, frame),)


@operator("add_.Tensor")
def add_in_place(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    given = tensors(args)
    if len(given) == 1:
        x = given[0]
        return (frame.ctx.r.node("add", x.view(*x.shape), (x,), ops.back_through),)
    return (ops.add_in_place(frame.ctx.r, given[0], given[1]),)


@operator("mul.Tensor", "mul.Scalar", "div.Scalar", "neg", "div.Tensor")
def mul(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    r, given = frame.ctx.r, tensors(args)
    op = step.op.name.partition(".")[0]
    if len(given) == 1:
        x = given[0]
        return (
            r.node(
                "scale" if op != "neg" else op,
                fresh(step, args, frame),
                (x,),
                ops.back_like,
                extra=x.shape,
            ),
        )
    a, b = given
    if op == "div":
        if not b.needs:
            extra = ((a.shape, a.format), (b.shape, b.format))
            return (
                r.node("div", fresh(step, args, frame), (a, b), back_quotient, (None, b), extra),
            )
        return (moe.ratio(r, a, b),)
    out = fresh(step, args, frame)
    saved = (a if b.needs else None, b if a.needs else None)
    extra = ((a.shape, a.format), (b.shape, b.format))
    return (r.node("mul", out, (a, b), ops.back_mul, saved, extra),)


def back_quotient(r: Recorder, node: Node, g: Tensor) -> Grads:
    out = r.like(g, "div")
    return [ops.reduced(r, node, 0, out, *node.extra[0]), None]


@operator("pow.Tensor_Scalar")
def power(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    x = tensors(args)[0]
    return (frame.ctx.r.node("pow", fresh(step, args, frame), (x,), ops.back_power, (x,)),)


@operator("mean.dim")
def mean(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    x = tensors(args)[0]
    return (frame.ctx.r.node("mean", fresh(step, args, frame), (x,), ops.back_like, extra=x.shape),)


@operator("rsqrt")
def rsqrt(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    x = tensors(args)[0]
    out = fresh(step, args, frame)
    return (frame.ctx.r.node("rsqrt", out, (x,), ops.back_rsqrt, (out.detach(),)),)


def pointwise(
    step: Step, args: list[Tensor | None], frame: Frame, *, result: bool
) -> tuple[Tensor, ...]:
    x = tensors(args)[0]
    out = fresh(step, args, frame)
    op = step.op.name
    saved = out.detach() if result else x
    return (frame.ctx.r.node(op, out, (x,), ops.back_like, (saved,), x.shape),)


for _name in ("silu", "gelu", "softplus"):
    OPERATORS[_name] = partial(pointwise, result=False)
for _name in ("sigmoid", "tanh", "relu", "exp"):
    OPERATORS[_name] = partial(pointwise, result=True)


@operator("clone")
def clone(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    """`.contiguous()` among them, which copies nothing that lies so: results of attention, whose
    layout the kernel chooses."""
    x = tensors(args)[0]
    if step.packs and x.strides is None:  # captured with another kernel, or one sequence
        return view(step, args, frame)
    return (frame.ctx.r.node("clone", fresh(step, args, frame), (x,), ops.back_through),)


@operator("cat")
def cat(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    parts = tuple(tensors(args))
    out = fresh(step, args, frame)
    extra = tuple((one.shape, one.format) for one in parts)
    return (frame.ctx.r.node("cat", out, parts, ops.back_cat, extra=extra),)


@operator("stack")
def stack(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    """Its backward hands on views of the gradient (torch 2.13 FunctionsManual.cpp
    stack_tensors_backward: `unbind`)."""
    parts = tuple(tensors(args))
    out = fresh(step, args, frame)
    dim = step.op.attrs.get("dim", 0) % len(out.shape)
    return (frame.ctx.r.node("stack", out, parts, back_stack, extra=(dim, parts[0].format)),)


def back_stack(r: Recorder, node: Node, g: Tensor) -> Grads:
    dim, format = node.extra
    strides = contiguous(g.shape) if g.strides is None else g.strides
    shape, lying = (one[:dim] + one[dim + 1 :] for one in (g.shape, strides))

    def part() -> Tensor:
        found = views.seen(g, shape, normal(shape, lying))
        found.node, found.needs = None, False
        return found if format is g.format else ops.cast(r, found, format)

    return [None if one is None else part() for one in node.inputs]


@operator("_softmax")
def softmax(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    x = tensors(args)[0]
    out = fresh(step, args, frame)
    return (frame.ctx.r.node("softmax", out, (x,), ops.back_softmax, (out.detach(),), x.format),)


@operator("sum.dim_IntList")
def total(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    x = tensors(args)[0]
    dims = step.op.attrs.get("dim", [0])
    if len(dims) != 1:
        return other(step, args, frame)
    dim = dims[0] % len(x.shape)
    out = fresh(step, args, frame)
    return (frame.ctx.r.node("sum", out, (x,), moe.back_total, extra=(x.shape, dim, x.format)),)


@operator("copy_")
def copied(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    """`x[...] = y`. Into a part of a tensor, whose whole is the third operand, autograd writes a
    node for the whole (torch/csrc/autograd/functions/tensor.cpp CopySlices, torch 2.13)."""
    r = frame.ctx.r
    given = tensors(args)
    if len(given) < 3:
        x, y = (given[0], given[-1])
        out = x.view(*x.shape)
        out.node, out.needs = None, False
        extra = (y.shape, y.format)
        return (r.node("copy", out, (y,), back_copied, extra=extra),)
    part, y, whole = given
    base = whole.view(*whole.shape)
    base.node, base.needs = None, False
    sizes = (part.shape, (y.shape, y.format))
    base = r.node("copy_slices", base, (whole, y), back_slices, extra=sizes)
    return views.seen(part, part.shape, part.strides), base


def back_copied(r: Recorder, node: Node, g: Tensor) -> Grads:
    return [ops.reduced(r, node, 0, g, *node.extra)]


def back_slices(r: Recorder, node: Node, g: Tensor) -> Grads:
    """The whole gradient is copied, its part once more; the part that was overwritten gets
    zeros."""
    shape, source = node.extra
    whole = r.tensor(g.shape, g.format, "copy_slices")
    part = r.tensor(shape, g.format, "clone")
    if node.inputs[0] is not None:
        zeros = r.tensor(shape, g.format, "zeros_like")
        del zeros
    to_source = ops.reduced(r, node, 1, part, *source) if node.inputs[1] is not None else None
    return [whole if node.inputs[0] is not None else None, to_source]


# ------------------------------------------------------------------------- products and attention
@operator("linear")
def linear(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    weight = str(step.op.inputs[1])[1:]
    x = args[0]
    assert x is not None
    module = frame.linears.get(weight.removesuffix(".weight"))
    if module is None:
        found = args[1]
        assert found is not None
        return (
            linears.plain(x, found, args[2] if len(args) > 2 else None, found.shape[0], frame.ctx),
        )
    args.clear()
    return (linears.linear(x, frame.bound.linear(module), frame.ctx),)


@operator("_grouped_mm")
def grouped(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    x, weight, ends = tensors(args)
    return (moe.grouped(frame.ctx.r, x, weight, ends, transposed=True),)


@operator("sdpa")
def attention(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    q, k, v, *rest = args
    assert q is not None
    assert k is not None
    assert v is not None
    attrs = step.op.attrs
    call = Call(
        q=q,
        k=k,
        v=v,
        mask=rest[0] if rest else None,
        causal=attrs["causal"],
        dropout=frame.rate(attrs["p"]),
        groups=attrs["gqa"],
    )
    return (sdpa(call, frame.ctx),)


# ---------------------------------------------------------------------------------------- the rest
@operator("embedding")
def embedding(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    weight, ids = tensors(args)
    return (ops.embedding(frame.ctx.r, ids, weight),)


@operator("index.Tensor")
def index(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    given = tensors(args)
    if len(given) == 2 and given[0].needs and len(given[1].shape) == 1:
        return (moe.rows_of(frame.ctx.r, given[0], given[1]),)
    return other(step, args, frame)


def other(step: Step, args: list[Tensor | None], frame: Frame) -> tuple[Tensor, ...]:
    """By its template; without one, an operation that no gradient passes through."""
    needs = [one is not None and one.needs for one in args]
    name = step.op.name
    template = step.op.templates.get(templates.mask_of(needs))
    if template is None and name.startswith(templates.OWN):  # its backward makes all gradients
        template = step.op.templates[max(step.op.templates, key=lambda mask: mask.count("1"))]
    if frame.ctx.r.grad and any(needs) and template is None:
        raise InputError.one(
            f"the captured graph does not know the gradient of `{name}` for these inputs",
            where=frame.ctx.r.where,
            hint="use `--by trace`",
        )
    return templates.run(step, args, frame, template or step.op.templates.get(""), fresh)


def nothing(*_: Any) -> None:
    """Keeps the type of an operator that makes nothing."""


__all__ = ["FP32", "OPERATORS", "other"]
