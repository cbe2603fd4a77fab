"""One published benchmark of a kernel, as its script runs it: inputs that stay, and a call that is
repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any

from memfit.errors import InputError
from memfit.formats import BF16, FP32, Format
from memfit.hardware import find_gpu
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.lower import views
from memfit.lower.bound import Bound
from memfit.lower.context import Context, context
from memfit.lower.frameworks import TRANSFORMERS
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Tensor
from memfit.model.families import build
from memfit.program import Program, placed
from memfit.truth.case import Unfit
from memfit.truth.rows import Row

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
DTYPES = {"torch.bfloat16": BF16, "torch.float32": FP32}

Step = Callable[[], None]


@dataclass(kw_only=True)
class Bench:
    """`kept` are the tensors that the script holds; what a kernel's function returns is the call
    that is measured."""

    row: Row
    r: Recorder = field(default_factory=Recorder)
    kept: list[Any] = field(default_factory=list)

    @property
    def shapes(self) -> dict[str, Any]:
        return dict(self.row.extra)

    @property
    def provider(self) -> str:
        return str(self.row.more("provider"))

    @property
    def liger(self) -> bool:
        return self.provider == "liger"

    @property
    def dtype(self) -> Format:
        """As the row says; the scripts that say nothing take fp32."""
        return DTYPES[self.shapes.get("dtype", "torch.float32")]

    @property
    def ctx(self) -> Context:
        version = ".".join(str(self.row.engine_version).split()[-1].split(".")[:2])
        job = Job(versions=f"liger-kernel={version}")
        model = build(CONFIG)
        program = Program(
            model=model, job=job, entries=placed(model.layers, False), weights="bfloat16"
        )
        return context(self.r, program, TRANSFORMERS, (1, 1), keys=1, training=True)

    @property
    def version(self) -> tuple[int, int]:
        return self.ctx.job.version("liger-kernel")

    @property
    def processors(self) -> int:
        return machine(self.row)[0]

    def tensor(self, shape: tuple[int, ...], format: Format, needs: bool = False) -> Tensor:
        one = self.r.leaf(shape, format, "", "inputs", needs)
        self.kept.append(one)
        return one

    def backward(self, out: Tensor, gradient: Tensor | None = None, *, retain: bool = True) -> None:
        """`out.backward(gradient)`; `retain`: the graph and all that it saved stay until the call
        is over."""
        seed = gradient if gradient is not None else self.r.like(out, "ones_like")
        if seed.format is not out.format:
            seed = self.r.tensor(seed.shape, out.format, "to")
        saved = list(everything(out.node)) if retain else []
        self.r.backward(out, seed)
        saved.clear()

    def bound(self, **weights: Tensor) -> Bound:
        bound = Bound(self.r, self.ctx.program, "")
        bound.tensors.update({f"{name}.weight": weight for name, weight in weights.items()})
        return bound

    def passes(self, forward: Callable[[], Tensor]) -> Step:
        """One of three: forward alone; forward, and backward from a random gradient over a graph
        that is retained; `backward` is the latter part over a graph that stands, whose peak is the
        same."""

        def full() -> None:
            out = forward()
            self.backward(out, self.r.like(out, "randn_like"))

        def only() -> None:
            forward()

        return {"forward": only, "backward": full, "full": full}[self.shapes["pass"]]


def everything(root: Node | None) -> Iterator[Any]:
    """What the nodes of a graph saved."""
    waiting: list[Any] = [root]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, Node) and node not in seen:
            seen.add(node)
            waiting += node.inputs
            yield node.saved


def machine(row: Row) -> tuple[int, tuple[int, int]]:
    """Multiprocessors and compute capability of the row's GPU."""
    try:
        gpu = find_gpu(str(row.gpu))
    except InputError:
        raise Unfit("the GPU is not named", row.gpu) from None
    if gpu.sms is None or gpu.sm is None:
        raise Unfit("the GPU's multiprocessors are not on record", row.gpu)
    return gpu.sms, gpu.sm


# ------------------------------------------------------------------------------- operations that no
# model needs and scripts do
def total(r: Recorder, x: Tensor) -> Tensor:
    """`x.sum()`: its gradient is one number seen in the shape of x."""
    return r.node("sum", r.tensor((1,), x.format, "sum"), (x,), back_total, extra=x.shape)


def back_total(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (spread(g, node.extra),)


def spread(g: Tensor, shape: tuple[int, ...]) -> Tensor:
    return views.seen(g, shape, (0,) * len(shape))


def summed(r: Recorder, x: Tensor) -> Tensor:
    """`x.sum(dim=-1)`."""
    return r.node("sum", r.tensor(x.shape[:-1], x.format, "sum"), (x,), back_summed, extra=x.shape)


def back_summed(r: Recorder, node: Node, g: Tensor) -> Grads:
    strides = views.lying(g)
    return (views.seen(g, node.extra, (*strides, 0)),)


def exp(r: Recorder, x: Tensor) -> Tensor:
    """Keeps its result; one product in the backward (tools/autograd/derivatives.yaml exp: grad *
    result)."""
    out = r.like(x, "exp")
    return r.node("exp", out, (x,), back_same, (out.detach(),))


def log(r: Recorder, x: Tensor) -> Tensor:
    """Keeps its input (derivatives.yaml log: grad.div(self.conj()))."""
    return r.node("log", r.like(x, "log"), (x,), back_same, (x,))


def back_same(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.tensor(g.shape, g.format, node.op),)


def lerp(r: Recorder, a: Tensor, b: Tensor) -> Tensor:
    """Between two, by a number: nothing is saved, each side's gradient is a product
    (derivatives.yaml lerp.Scalar)."""
    return r.node("lerp", r.like(a, "lerp"), (a, b), back_both)


def back_both(r: Recorder, node: Node, g: Tensor) -> Grads:
    return [
        None if target is None else r.tensor(g.shape, g.format, node.op) for target in node.inputs
    ]


__all__ = [
    "Bench",
    "Step",
    "everything",
    "exp",
    "lerp",
    "log",
    "machine",
    "spread",
    "summed",
    "total",
]
