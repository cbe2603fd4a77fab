"""Benchmarks of gated feed-forwards: whole, in tiles of tokens, and Megatron's activation alone
(benchmark_swiglu.py, benchmark_geglu.py, benchmark_tiled_mlp.py, benchmark_megatron_swiglu.py)."""

from __future__ import annotations

from collections.abc import Callable

from memfit.formats import BF16
from memfit.libraries.liger import kernels as liger
from memfit.lower import ops, views
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.truth.single.bench import Bench, Step, total

Run = Callable[[Tensor], Tensor]


def gated(bench: Bench) -> Step:
    shapes = bench.shapes
    width, inner = shapes["hidden_size"], shapes["intermediate_size"]
    x = bench.tensor(
        (shapes["bsz"] if "bsz" in shapes else shapes["B"], shapes["T"], width), BF16, True
    )
    run = feed_forward(bench, width, inner)
    return bench.passes(lambda: run(x))


def feed_forward(bench: Bench, width: int, inner: int) -> Run:
    """Three matrices: LlamaMLP, or Liger's product of the two halves in one kernel, which keeps
    both."""
    r = bench.r
    gate, up, down = (
        bench.tensor(shape, BF16, True)
        for shape in ((inner, width), (inner, width), (width, inner))
    )

    def ours(x: Tensor) -> Tensor:
        halves = ops.linear(r, x, gate, None, inner), ops.linear(r, x, up, None, inner)
        out = ops.linear(r, liger.product(r, *halves), down, None, width)
        del halves
        return out

    def plain(x: Tensor) -> Tensor:
        opened = ops.activation(r, ops.linear(r, x, gate, None, inner), "silu")
        between = ops.mul(r, opened, ops.linear(r, x, up, None, inner))
        del opened
        return ops.linear(r, between, down, None, width)

    return ours if bench.provider in ("liger", "liger_tiled") else plain


# ------------------------------------------------------------------------------------------- tiles
def tiled(bench: Bench) -> Step:
    """A tile of tokens at a time, forward without a graph; the backward runs each tile again
    (ops/tiled_mlp.py LigerTiledMLPFunction, and deepspeed/runtime/sequence_parallel/ulysses_sp.py
    TiledMLP, v0.18.2, which it follows)."""
    shapes = bench.shapes
    width = shapes["hidden_size"]
    x = bench.tensor((shapes["bsz"], shapes["T"], width), BF16, True)
    run = feed_forward(bench, width, shapes["intermediate_size"])
    if bench.provider in ("liger", "huggingface"):
        return bench.passes(lambda: run(x))
    return bench.passes(lambda: in_tiles(bench.r, x, run, shapes["num_shards"]))


def in_tiles(r: Recorder, x: Tensor, run: Run, tiles: int) -> Tensor:
    """Tiles of a batch of several sequences do not lie together: each product copies its own."""
    grad, r.grad = r.grad, False
    outs = [run(views.narrow(r, x, 1, x.shape[1] // tiles)) for _ in range(tiles)]
    out = r.tensor(x.shape, x.format, "cat")
    r.grad = grad
    del outs
    return r.node("tiled", out, (x,), back_tiles, (x,), (run, tiles))


def back_tiles(r: Recorder, node: Node, g: Tensor) -> Grads:
    """Tokens are flattened, so tiles are views; gradients of the input are written into one
    tensor."""
    x, (run, tiles) = node.saved[0], node.extra
    whole = r.tensor(x.shape, x.format, "zeros")
    shape = (x.count // x.shape[-1] // tiles, x.shape[-1])
    for _ in range(tiles):
        piece = Tensor(shape, x.format, x.storage, None, True)
        piece.grad = Tensor(shape, x.format, whole.storage)
        out = run(piece)
        r.backward(out, Tensor(shape, g.format, g.storage))
        del out, piece
    return (whole,)


# --------------------------------------------------------------------------- Megatron's activation
def megatron(bench: Bench) -> Step:
    """Both halves in one tensor, as `linear_fc1` puts them out; `y.sum().backward()`, and x's
    gradient goes before each call."""
    shapes, r = bench.shapes, bench.r
    x = bench.tensor((shapes["S"], shapes["B"], 2 * shapes["ffn_local"]), BF16, True)
    run = {"torch": halved, "megatron": compiled}.get(bench.provider)

    def step() -> None:
        x.grad = None
        out = (
            run(r, x)
            if run is not None
            else fused_gate_up(r, x, bench.provider == "liger_in_place")
        )
        bench.backward(total(r, out), retain=False)

    return step


def halved(r: Recorder, x: Tensor) -> Tensor:
    """`F.silu(y_1) * y_2` of `torch.chunk(y, 2, -1)`."""
    gate, up = views.split(r, x, -1, x.shape[-1] // 2, x.shape[-1] // 2)
    return ops.mul(r, ops.activation(r, gate, "silu"), up)


def compiled(r: Recorder, x: Tensor) -> Tensor:
    """Megatron keeps the input; its forward and backward are one fused kernel each (megatron-core
    0.16.1 fusions/fused_bias_swiglu.py SwiGLUFunction, @jit_fuser), which read a gradient that is
    one number where it lies."""
    out = r.tensor((*x.shape[:-1], x.shape[-1] // 2), x.format, "swiglu")
    return r.node("swiglu", out, (x,), back_whole, (x,), (False, False))


def fused_gate_up(r: Recorder, x: Tensor, in_place: bool) -> Tensor:
    """Keeps the input; the gradient is made contiguous and the input's is new, or overwrites it
    (ops/swiglu.py LigerFusedGateUpSiLUMulFunction, 2120862)."""
    out = r.tensor((*x.shape[:-1], x.shape[-1] // 2), x.format, "liger_glu")
    return r.node("liger_glu", out, (x,), back_whole, (x,), (True, in_place))


def back_whole(r: Recorder, node: Node, g: Tensor) -> Grads:
    (x,), (copies, in_place) = node.saved, node.extra
    g = liger.contiguous(r, g) if copies else g
    return (x.detach() if in_place else r.tensor(x.shape, x.format, node.op),)
