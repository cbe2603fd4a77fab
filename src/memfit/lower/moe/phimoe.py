"""Phi-MoE's router: the first expert is drawn, then the second among the rest, and only their
weights carry a gradient."""

from __future__ import annotations

from memfit.formats import FP32, INT64
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.moe import ops
from memfit.lower.moe.routers import Routed, logits_of
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.modules import MoE


def phimoe(x: Tensor, module: MoE, bound: Bound, ctx: Context) -> Routed:
    """modeling_phimoe.py PhimoeTopKRouter, sparsemixer (transformers 5.23)."""
    r = ctx.r
    # before transformers 5 the block alone had noise (4.57 PhimoeSparseMoeBlock)
    noise = module.jitter and ctx.training and not module.each
    logits = logits_of(ops.jittered(r, x, noise), module, bound, ctx)
    scores = logits.detach()
    first, first_place, top = drawn(logits, scores, ctx)
    rest = r.like(scores, "scatter")
    second, second_place, _ = drawn(logits, rest, ctx)
    multiplier = r.tensor((x.shape[0], 2), logits.format, "cat")
    multiplier = r.node("cat", multiplier, (first, second), back_pair)
    places = r.tensor((x.shape[0], 2), INT64, "cat")
    del top, first_place, second_place, rest
    return logits, multiplier, places


def drawn(logits: Tensor, scores: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
    """One of two choices: scores far below the best are masked; training draws by noise, and keeps
    some weights at a third."""
    r = ctx.r
    threshold, top = best(r, scores, kept=True)
    magnitude = r.like(scores, "abs")
    factor = r.like(scores, "clamp")
    del magnitude
    distance = r.like(scores, "sub")
    share = r.like(scores, "div")
    del distance
    mask = ops.flags(r, scores.shape, "gt")
    del share, threshold
    gates = r.like(scores, "masked_fill")
    place = noisy_best(r, gates) if ctx.training else top
    gates = r.like(gates, "softmax")
    multiplier = r.tensor((scores.shape[0], 1), scores.format, "gather")
    if ctx.training:
        kept = weights_kept(r, gates)
        out = r.like(multiplier, "mul")
        del kept, factor
        return (
            r.node(
                "multiplier",
                out,
                (logits,),
                back_multiplier,
                (multiplier, place, gates, mask),
                logits.shape,
            ),
            place,
            top,
        )
    return multiplier, place, top


def best(r: Recorder, scores: Tensor, *, kept: bool) -> tuple[Tensor, Tensor]:
    """`max(dim=-1)` outside the graph."""
    return ops.largest(r, scores.detach(), kept=kept)


def noisy_best(r: Recorder, gates: Tensor) -> Tensor:
    """The largest after noise of an exponential distribution is taken off."""
    noise = r.like(gates, "empty_like")
    logs = r.like(noise, "log")
    del noise
    noisy = r.like(gates, "sub")
    del logs
    return best(r, noisy, kept=False)[1]


def weights_kept(r: Recorder, gates: Tensor) -> Tensor:
    """Which weights stay whole: those of the largest, and a quarter of the others."""
    values, place = best(r, gates, kept=True)
    same = ops.flags(r, values.shape, "eq")
    chance = r.like(values, "rand_like")
    lucky = ops.flags(r, values.shape, "gt")
    del chance
    either = ops.flags(r, values.shape, "logical_or")
    del same, lucky
    wide = r.tensor(values.shape, FP32, "add")
    out = r.tensor(values.shape, values.format, "to")
    del wide, either, place
    return out


def back_multiplier(r: Recorder, node: Node, g: Tensor) -> Grads:
    """PhimoeMultiplier.backward."""
    g = r.like(g, "mul")
    negated = r.like(g, "mul")
    out = r.tensor(node.extra, g.format, "mul")
    del negated
    return (out,)


def back_pair(r: Recorder, node: Node, g: Tensor) -> Grads:
    return [g.view(g.shape[0], 1) if target is not None else None for target in node.inputs]
