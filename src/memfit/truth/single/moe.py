"""Benchmark of a mixture of experts (benchmark_fused_moe.py, 1faa013): Liger's grouped products,
and a loop over experts.

Routing is random there; here every expert gets an equal share, which changes sizes by a fraction of
one expert's.
"""

from __future__ import annotations

from memfit.formats import BF16, INT32, INT64
from memfit.lower import ops, views
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.truth.single.bench import Bench, Step

TILE = 64  # tokens of a tile (ops/fused_moe.py BLOCK_M_TOKEN)
BLOCK = 1024  # of routing kernels


def fused_moe(bench: Bench) -> Step:
    """Both stacks are products of a random leaf with a number, so that the leaves stay, too, and
    get the gradients."""
    shapes, r = bench.shapes, bench.r
    tokens, experts, width, inner, chosen = (
        int(shapes[name]) for name in ("T", "E", "H", "intermediate_dim", "K")
    )
    x = bench.tensor((tokens, width), BF16, True)
    up, down = (
        ops.scale(r, bench.tensor(shape, BF16, True))
        for shape in ((experts, 2 * inner, width), (experts, width, inner))
    )
    index, weights = (
        bench.tensor((tokens, chosen), INT32),
        bench.tensor((tokens, chosen), BF16, True),
    )
    bench.kept += [up, down, index]
    if bench.liger:
        return bench.passes(lambda: grouped(r, (x, up, down, weights)))
    return bench.passes(lambda: one_by_one(r, (x, up, down, weights)))


# -------------------------------------------------------------------------------- grouped products
def grouped(r: Recorder, given: tuple[Tensor, ...]) -> Tensor:
    """Keeps the products before the activation and the routing; what comes behind is made again
    (ops/fused_moe.py LigerFusedMoEFunction)."""
    x, up, down, weights = given
    pairs, inner = weights.count, down.shape[-1]
    routing = routed(r, weights.shape, up.shape[0])
    before = r.tensor((pairs, 2 * inner), x.format, "liger_moe")
    after = r.tensor((pairs, inner), x.format, "liger_moe")
    each = r.tensor((pairs, x.shape[-1]), x.format, "liger_moe")
    out = r.tensor(x.shape, x.format, "liger_moe")
    del after, each
    return r.node("liger_moe", out, given, back_grouped, (x, up, down, before, weights, *routing))


def routed(r: Recorder, shape: tuple[int, ...], experts: int) -> tuple[Tensor, ...]:
    """compute_routing_metadata: what it returns, but for the counts, is kept."""
    tokens, chosen = shape
    blocks = -(-tokens // max(1, BLOCK // (1 << (chosen - 1).bit_length())))
    counts = r.tensor((experts, blocks), INT32, "liger_moe")
    count = r.tensor((experts,), INT32, "sum")
    starts, offsets = (
        r.tensor((experts + 1,), INT32, "liger_moe"),
        r.tensor((experts + 1,), INT32, "liger_moe"),
    )
    tiles = experts * -(-tokens * chosen // experts // TILE)
    kept = [
        r.tensor((size,), INT32, "liger_moe") for size in (tiles, tiles, *[tokens * chosen] * 3)
    ]
    del counts, count, offsets
    return starts, *kept


def back_grouped(r: Recorder, node: Node, g: Tensor) -> Grads:
    x, up, down, before, weights = node.saved[:5]
    to_before = r.like(before, "liger_moe")
    weighed = r.tensor((weights.count, down.shape[-1]), g.format, "liger_moe")
    to_weights = r.tensor(weights.shape, g.format, "zeros")
    to_down = r.like(down, "zeros")
    each = r.tensor((weights.count, x.shape[-1]), g.format, "liger_moe")
    to_x = r.like(x, "zeros")
    to_up = r.like(up, "zeros")
    del to_before, weighed, each
    return to_x, to_up, to_down, to_weights


# ----------------------------------------------------------------------------- expert after expert
def one_by_one(r: Recorder, given: tuple[Tensor, ...]) -> Tensor:
    """transformers' loop as the script has it: names hold what they hold there. The masks are
    one-hot integers of 8 bytes."""
    x, up, down, weights = given
    tokens, chosen = weights.shape
    experts = up.shape[0]
    final = r.like(x, "zeros")
    wide = r.tensor(weights.shape, INT64, "to")
    mask = r.tensor((tokens, chosen, experts), INT64, "one_hot")
    del wide
    share = -(-tokens * chosen // experts)
    for _ in range(experts):
        places = r.tensor((share, 2), INT64, "nonzero")
        hidden = taken(r, x, places, share)
        gate, opened = views.split(
            r,
            ops.linear(r, hidden, views.select(r, up, 0), None, up.shape[1]),
            -1,
            *[up.shape[1] // 2] * 2,
        )
        hidden = ops.mul(r, ops.activation(r, gate, "silu"), opened)
        hidden = ops.linear(r, hidden, views.select(r, down, 0), None, down.shape[1])
        hidden = ops.mul(r, hidden, taken(r, weights, places, share))
        final = r.node(
            "index_add",
            final.view(*final.shape),
            (final, hidden),
            back_added,
            (places, hidden),
            hidden.shape,
        )
        del gate, opened
    del mask
    return final


def taken(r: Recorder, x: Tensor, places: Tensor, rows: int) -> Tensor:
    """`x[i]`, or `w[i, j, None]`."""
    width = x.shape[-1] if x.shape[-1] != places.count // rows and len(x.shape) == 2 else 1
    return views.indexed(r, x, (rows, width), places)


def back_added(r: Recorder, node: Node, g: Tensor) -> Grads:
    """`grad` as it is, and the rows that were added."""
    return g.view(*g.shape) if node.inputs[0] is not None else None, r.tensor(
        node.extra, g.format, "index_select"
    )
