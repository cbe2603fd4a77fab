"""Stacked experts: every choice of a token is a row, rows are sorted by expert, and two grouped
products run over them (transformers 5.23 integrations/moe.py grouped_mm_experts_forward, its
default), or, while decoding on a GPU, every row takes a copy of its expert's matrices
(batched_mm_experts_forward)."""

from __future__ import annotations

from collections.abc import Callable

from memfit.formats import FP32, INT32
from memfit.lower import ops as plain
from memfit.lower import views
from memfit.lower.activations import activate
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.moe import ops, stored
from memfit.lower.recorder import Recorder
from memfit.lower.stacks import Replaced
from memfit.lower.stored import is_stored
from memfit.lower.tensors import Tensor
from memfit.model.modules import MoE

Gate = Callable[[Tensor, MoE, Context], Tensor]


def gate(gate_up: Tensor, module: MoE, ctx: Context) -> Tensor:
    """act(gate) · up, cut from one tensor (_default_apply_gate)."""
    half = gate_up.shape[-1] // 2
    gate, up = views.split(ctx.r, gate_up, -1, half, half)
    return plain.mul(ctx.r, activate(gate, module.activation, ctx), up)


def run(
    x: Tensor, weights: Tensor, places: Tensor, module: MoE, bound: Bound, ctx: Context, gated: Gate
) -> Tensor:
    """The experts' output for the rows of x, (T, D); `weights` and `places` are (T, active)."""
    ctx.r.where = bound.path(f"{module.name}.{module.experts_name}")
    if module.format == "mxfp4":
        return stored.mxfp4(x, weights, places, module, bound, ctx)
    return (decoding if ctx.decoding else sorted_rows)(
        x, weights, places, module, bound, ctx, gated
    )


def sorted_rows(
    x: Tensor, weights: Tensor, places: Tensor, module: MoE, bound: Bound, ctx: Context, gated: Gate
) -> Tensor:
    r, rows, per_token = ctx.r, places.count, places.shape[-1]
    name = f"{module.name}.{module.experts_name}"
    spread = module.local > 0
    stacks = Replaced((f"{name}.down_proj", f"{name}.gate_up_proj"), bound, ctx)
    weights = views.reshape(r, weights, rows)
    ids, order = ops.sort(r, places.view(rows))
    selected = ops.rows_of(r, x, r.like(order, "floor_divide"))
    scale = ops.rows_of(r, weights, order)
    counted = r.tensor((rows,), INT32, "to")
    counts = r.tensor((module.held,), INT32, "histc")
    ends = r.tensor((module.held,), INT32, "cumsum")
    others = ops.flags(r, (rows, 1), "ge") if spread else None
    selected = without(r, selected, others, ops.blanked)
    biases = bias(r, bound, f"{name}.gate_up_proj_bias", ids)
    out = grouped(ctx, selected, stacks[f"{name}.gate_up_proj"], ends, biases, module)
    out = without(r, out, others, ops.masked)
    out = gated(out, module, ctx)
    biases = bias(r, bound, f"{name}.down_proj_bias", ids)
    out = grouped(ctx, out, stacks[f"{name}.down_proj"], ends, biases, module)
    out = without(r, out, others, ops.masked)
    weighted = plain.mul(r, out, views.reshape(r, scale, rows, 1))
    back = r.like(order, "empty_like")
    numbers = r.like(order, "arange")
    del numbers
    weighted = ops.rows_of(r, weighted, back)
    final = added_up(
        views.reshape(r, weighted, rows // per_token, per_token, weighted.shape[-1]), ctx
    )
    del counted, counts, ends, biases
    return plain.cast(r, final, x.format)


def without(
    r: Recorder,
    x: Tensor,
    others: Tensor | None,
    fill: Callable[[Recorder, Tensor, Tensor], Tensor],
) -> Tensor:
    """Where experts are spread, zeros in rows that are other ranks', of which an all-to-all leaves
    none."""
    return x if others is None else fill(r, x, others)


def bias(r: Recorder, bound: Bound, name: str, ids: Tensor) -> Tensor | None:
    """Each row's bias."""
    stacked = bound.tensors.get(name)
    return None if stacked is None else ops.rows_of(r, stacked, ids)


def grouped(
    ctx: Context, x: Tensor, weight: Tensor, ends: Tensor, biases: Tensor | None, module: MoE
) -> Tensor:
    r = ctx.r
    if is_stored(weight):
        return stored.grouped(r, x, weight, ends, ctx.job.router_skew)
    out = ops.grouped(
        r, plain.cast(r, x, weight.format), weight, ends, transposed=module.transposed
    )
    return out if biases is None else ops.added_into(r, out, biases)


def added_up(apart: Tensor, ctx: Context) -> Tensor:
    """The sum over a token's experts; autocast asks for it in fp32."""
    return ops.total(ctx.r, apart, 1, kept=False, format=FP32 if ctx.autocast is not None else None)


def decoding(
    x: Tensor, weights: Tensor, places: Tensor, module: MoE, bound: Bound, ctx: Context, gated: Gate
) -> Tensor:
    """Every row's matrices are gathered: `active` experts' worth for each token, first of the one
    stack, then of the other."""
    r, rows = ctx.r, places.count
    name = f"{module.name}.{module.experts_name}"
    selected = r.tensor((rows, x.shape[-1]), x.format, "repeat_interleave")
    ids = places.view(rows)
    others = ops.flags(r, (rows,), "ge") if module.local else None
    if others is not None:
        ids = r.tensor((rows,), ids.format, "clamp")
    biases: Tensor | None = None
    matrices: Tensor | None = None
    out = selected
    for stack in ("gate_up_proj", "down_proj"):
        weight = bound[f"{name}.{stack}"]
        matrices = (
            None if is_stored(weight) else ops.rows_of(r, weight, ids)
        )  # kernels for stored ones read them in place
        biases = bias(r, bound, f"{name}.{stack}_bias", ids)
        out = r.tensor(
            (rows, weight.shape[2] if module.transposed else weight.shape[1]), out.format, "matmul"
        )
        values = rows * weight.count // module.held
        r.compute("matmul", 2 * values, weight.format.bytes(values), out.format.math)
        if stack == "gate_up_proj":
            out = gated(out, module, ctx)
    weights = weights.view(rows) if others is None else ops.masked(r, weights.view(rows), others)
    weighted = plain.mul(r, out, weights.view(rows, 1))
    final = added_up(
        views.reshape(r, weighted, rows // module.active, module.active, weighted.shape[-1]), ctx
    )
    del selected, biases, matrices, others, ids
    return plain.cast(r, final, x.format)
