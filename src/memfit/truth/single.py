"""Published measurements of a single kernel (Liger-Kernel's), beside the formulas of that kernel alone.

Each benchmark is run as its script does (benchmark/scripts/benchmark_<kernel>.py, tag v0.4.2): the inputs stay, the call is repeated, and
the second call's peak is compared, since gradients are there from then on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from memfit import kernels
from memfit.errors import InputError
from memfit.formats import BF16, FP32, INT64, Format
from memfit.hardware import find_gpu
from memfit.job import Job
from memfit.lower import liger, norms, ops, views
from memfit.lower.attention.rotary import half_turned, with_tables
from memfit.lower.bound import Bound
from memfit.lower.context import Context, context
from memfit.lower.frameworks import TRANSFORMERS
from memfit.lower.fused_loss import Call, fused_linear_cross_entropy
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Node, Tensor
from memfit.model.families import build
from memfit.model.modules import Norm
from memfit.program import Program, placed
from memfit.tape import Alloc, Free
from memfit.truth.case import Unfit
from memfit.truth.rows import Row, count

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A row about one kernel: what was called, whose, and the peak in bytes."""

    id: str
    source: str
    confidence: str
    name: str
    value: int
    row: Row


@dataclass(kw_only=True)
class Bench:
    """One benchmark: `kept` are the tensors that the script holds, `step` is the call that it measures."""

    row: Row
    r: Recorder = field(default_factory=Recorder)
    kept: list[Any] = field(default_factory=list)

    @property
    def shapes(self) -> dict[str, Any]:
        return dict(self.row.extra)

    @property
    def liger(self) -> bool:
        return bool(self.row.more("provider") == "liger")

    @property
    def ctx(self) -> Context:
        version = ".".join(str(self.row.engine_version).split()[-1].split(".")[:2])
        job = Job(versions=f"liger-kernel={version}")
        model = build(CONFIG)
        program = Program(model=model, job=job, entries=placed(model.layers, False), weights="bfloat16")
        return context(self.r, program, TRANSFORMERS, (1, 1), keys=1, training=True)

    @property
    def processors(self) -> int:
        return machine(self.row)[0]

    def tensor(self, shape: tuple[int, ...], format: Format, needs: bool = False) -> Tensor:
        one = self.r.leaf(shape, format, "", "inputs", needs)
        self.kept.append(one)
        return one

    def backward(self, out: Tensor, gradient: Tensor | None = None, *, retain: bool = True) -> None:
        """`out.backward(gradient)`; `retain`: the graph and all that it saved stay until the call is over."""
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


Step = Callable[[], None]


def rms_norm(bench: Bench) -> Step:
    """Both modules' fp32 weights exist; the one that is not used stays idle."""
    rows, width = bench.shapes["M"], bench.shapes["H"]
    weight, _ = bench.tensor((width,), FP32, True), bench.tensor((width,), FP32, True)
    x, g = bench.tensor((rows, width), BF16, True), bench.tensor((rows, width), BF16)

    def step() -> None:
        if bench.liger:
            out = liger.rms_norm(bench.r, x, weight, bench.processors)
        else:
            out = norms.llama(x, Norm(name="norm", width=width), bench.bound(norm=weight), bench.ctx)
        bench.backward(out, g)

    return step


def layer_norm(bench: Bench) -> Step:
    rows, width = bench.shapes["M"], bench.shapes["N"]
    weight, bias = bench.tensor((width,), FP32, True), bench.tensor((width,), FP32, True)
    bench.tensor((width,), FP32, True), bench.tensor((width,), FP32, True)
    x, g = bench.tensor((rows, width), FP32, True), bench.tensor((rows, width), FP32)

    def step() -> None:
        out = liger.layer_norm(bench.r, x, weight, bias, bench.processors) if bench.liger else ops.layer_norm(bench.r, x, weight, bias)
        bench.backward(out, g)

    return step


def rope(bench: Bench) -> Step:
    """`torch.autograd.grad`: gradients are returned and dropped, not gathered."""
    shapes, r = bench.shapes, bench.r
    tokens = shapes.get("seq_len") or shapes["T"]
    head = (shapes.get("hidden_size") or shapes["H"]) // shapes["num_q_heads"]
    heads = shapes["num_q_heads"], shapes["num_kv_heads"]
    given = [views.permuted(bench.tensor((1, tokens, count, head), BF16), (0, 2, 1, 3)) for count in heads]
    gradients = [views.permuted(bench.tensor((1, tokens, count, head), BF16), (0, 2, 1, 3)) for count in heads]
    bench.tensor((1, tokens), INT64)
    cos, sin = bench.tensor((1, tokens, head), BF16), bench.tensor((1, tokens, head), BF16)
    for one in given:
        one.needs = True

    def step() -> None:
        q, k = given
        turned = (
            liger.rope(r, q, k, cos, sin)
            if bench.liger
            else (with_tables(r, q, cos, sin, half_turned), with_tables(r, k, cos, sin, half_turned))
        )
        root = r.node("outputs", turned[0].detach(), turned, lambda r, node, g: tuple(gradients))
        bench.backward(root, gradients[0])
        q.grad = k.grad = None

    return step


def gated(bench: Bench) -> Step:
    shapes, r = bench.shapes, bench.r
    width, inner = shapes["hidden_size"], shapes["intermediate_size"]
    x = bench.tensor((shapes["bsz"] if "bsz" in shapes else shapes["B"], shapes["T"], width), BF16, True)
    gate, up, down = (
        bench.tensor((inner, width), BF16, True),
        bench.tensor((inner, width), BF16, True),
        bench.tensor((width, inner), BF16, True),
    )

    def forward() -> Tensor:
        if bench.liger:
            between = liger.product(r, ops.linear(r, x, gate, None, inner), ops.linear(r, x, up, None, inner))
        else:
            opened = ops.activation(r, ops.linear(r, x, gate, None, inner), "silu")
            between = ops.mul(r, opened, ops.linear(r, x, up, None, inner))
            del opened
        return ops.linear(r, between, down, None, width)

    def full() -> None:
        out = forward()
        bench.backward(out, r.like(out, "randn_like"))

    def only() -> None:
        forward()

    return {"forward": only, "backward": full, "full": full}[shapes["pass"]]  # the retained graph of `backward` is what `full` holds


def cross_entropy(bench: Bench) -> Step:
    rows, vocabulary = bench.shapes["B"] * bench.shapes["T"], bench.shapes["V"]
    x, labels = bench.tensor((rows, vocabulary), FP32, True), bench.tensor((rows,), INT64)

    def step() -> None:
        bench.backward(liger.cross_entropy(bench.r, x) if bench.liger else ops.cross_entropy(bench.r, x, labels), retain=False)

    return step


def fused_linear(bench: Bench) -> Step:
    """Both modules hold a head of their own."""
    rows, width, vocabulary = bench.shapes["BT"], bench.shapes["H"], bench.shapes["V"]
    weight, _ = bench.tensor((vocabulary, width), BF16, True), bench.tensor((vocabulary, width), BF16, True)
    x, labels = bench.tensor((rows, width), BF16, True), bench.tensor((rows,), INT64)

    def step() -> None:
        if bench.liger:
            out = fused_linear_cross_entropy(Call(ctx=bench.ctx, hidden=x, weight=weight))
        else:
            out = ops.cross_entropy(bench.r, ops.linear(bench.r, x, weight, None, vocabulary), labels)
        bench.backward(out, retain=False)

    return step


BENCHES: dict[str, Callable[[Bench], Step]] = {
    "rms_norm": rms_norm, "layer_norm": layer_norm, "rope": rope, "swiglu": gated, "geglu": gated, "cross_entropy": cross_entropy,
    "fused_linear_cross_entropy": fused_linear,
}  # fmt: skip
CALLS = 2
# cuBLAS workspaces that the process has by then: of both threads, once another provider's backward has run; rotary tables take one product.
MULTIPLYING = {"rope": 1, "swiglu": 2, "geglu": 2, "fused_linear_cross_entropy": 2}


LARGEST = 2**24  # of one size; the published ones end at 2**18
PROVIDERS = ("liger", "huggingface")
SINCE = {("rms_norm", "liger"): (0, 3)}  # before that the weight's gradient was kept for every row (ops/rms_norm.py, 0.2.1)


def read(row: Row) -> Kernel:
    """The row, if there is a formula for it."""
    check(row)
    name = f"{kernel_of(row)}, {row.more('provider')}, {row.engine_version}"
    return Kernel(id=row.id, source=row.origin, confidence=str(row.confidence or ""), name=name[:80], value=row.bytes or 0, row=row)


def check(row: Row) -> None:
    """Raise for what has no formula, and for sizes that are none."""
    kernel, provider, shapes = kernel_of(row), row.more("provider"), row.extra
    if kernel not in BENCHES:
        raise Unfit("a kernel without formula", kernel)
    if provider not in PROVIDERS:
        raise Unfit("a kernel's provider without formula", provider)
    machine(row)
    version = str(row.engine_version).split()[-1:]
    known = re.fullmatch(r"(\d{1,3})\.(\d{1,3})(\.\w{1,9})*", version[0]) if version else None
    if not known:
        raise Unfit("the versions are not known", row.engine_version)
    if (kernel, provider) in SINCE and (int(known[1]), int(known[2])) < SINCE[kernel, provider]:
        raise Unfit("a kernel of a version without formula", f"{kernel} of {version[0]}")
    if not row.bytes:
        raise Unfit("the unit or the value is not settled", f"{row.value} {row.unit}")
    sizes = [
        value for name, value in shapes.items() if isinstance(value, (int, float)) and name not in ("eps", "p", "ignore_index", "beta")
    ]
    if any((count(size) or LARGEST + 1) > LARGEST for size in sizes):
        raise Unfit("the kernel's sizes are not stated", shapes)


def machine(row: Row) -> tuple[int, tuple[int, int]]:
    """Multiprocessors and compute capability of the row's GPU."""
    try:
        gpu = find_gpu(str(row.gpu))
    except InputError:
        raise Unfit("the GPU is not named", row.gpu) from None
    if gpu.sms is None or gpu.sm is None:
        raise Unfit("the GPU's multiprocessors are not on record", row.gpu)
    return gpu.sms, gpu.sm


def peak(one: Kernel) -> int:
    """The highest allocation during the last call."""
    try:
        return highest(*ran(one.row))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as missing:
        raise Unfit("the kernel's sizes are not stated", missing) from None


def ran(row: Row) -> tuple[list[Any], int]:
    """The events of all calls, and where the last one begins."""
    bench = Bench(row=row)
    bench.r.cublas = kernels.cublas_workspace(machine(row)[1])
    bench.r.mark("load")
    if kernel_of(row) in MULTIPLYING:
        threads = [bench.r.scratch(bench.r.cublas, "cublas") for _ in range(MULTIPLYING[kernel_of(row)])]
        bench.kept.append(threads)
    bench.r.cublas = 0
    step = BENCHES[kernel_of(row)](bench)
    for number in range(CALLS):
        bench.r.mark("forward", "", number)
        step()
    return list(bench.r.events), bench.r.marks[-1]


def highest(events: list[Any], begin: int) -> int:
    """The live peak from event `begin` on, blocks rounded up to 512 bytes."""
    live: dict[int, int] = {}
    total = found = 0
    for index, event in enumerate(events):
        if isinstance(event, Alloc):
            live[event.id] = kernels.up(event.size, 512)
            total += live[event.id]
        elif isinstance(event, Free):
            total -= live.pop(event.id)
        found = max(found, total) if index >= begin else 0
    return found


def kernel_of(row: Row) -> str:
    return str(row.model).removeprefix("single kernel ").partition(" ")[0]
