"""Published measurements of a single kernel (Liger-Kernel's), beside the formulas of that kernel
alone.

Each benchmark is run as its script does (benchmark/scripts/benchmark_<kernel>.py, at the commit
that added the figures): the inputs stay, the call is repeated, and the last call's peak is
compared, since gradients are there from then on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from memfit import kernels
from memfit.lazy_dataclass import dataclass
from memfit.simulate.replay import replay
from memfit.tape import Event
from memfit.truth.case import Unfit
from memfit.truth.rows import Row, count
from memfit.truth.single import losses, mlps, moe, norms
from memfit.truth.single.bench import Bench, Step, machine


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A row about one kernel: what was called, whose, and the peak in bytes."""

    id: str
    source: str
    confidence: str
    name: str
    value: int
    row: Row


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """`threads`: cuBLAS workspaces that the process has by then: of both threads, once another
    provider's backward has run; rotary tables take one product. `until`: the version from which a
    provider's formula does not hold."""

    run: Callable[[Bench], Step]
    providers: tuple[str, ...] = ("liger", "huggingface")
    threads: int = 0
    until: tuple[str, tuple[int, int]] = ("", (0, 0))


PLAIN = ("liger", "torch")
BENCHMARKS: dict[str, Benchmark] = {
    "rms_norm": Benchmark(run=norms.rms_norm),
    "layer_norm": Benchmark(run=norms.layer_norm),
    "fused_add_rms_norm": Benchmark(
        run=norms.fused_add_rms_norm,
        providers=("liger_fused_add_rms_norm", "liger_rms_norm", "huggingface"),
    ),
    "rope": Benchmark(run=norms.rope, threads=1),
    "llama4_rope": Benchmark(run=norms.llama4_rope, threads=1),
    "swiglu": Benchmark(run=mlps.gated, threads=2),
    "geglu": Benchmark(run=mlps.gated, threads=2),
    "tiled_swiglu": Benchmark(
        run=mlps.tiled,
        threads=2,
        providers=("liger", "huggingface", "liger_tiled", "deepspeed_tiled"),
    ),
    "tiled_geglu": Benchmark(
        run=mlps.tiled,
        threads=2,
        providers=("liger", "huggingface", "liger_tiled", "deepspeed_tiled"),
    ),
    "megatron_swiglu": Benchmark(
        run=mlps.megatron, providers=("liger", "liger_in_place", "torch", "megatron")
    ),
    "cross_entropy": Benchmark(run=losses.cross_entropy),
    "fused_linear_cross_entropy": Benchmark(run=losses.fused_linear, threads=2),
    "jsd": Benchmark(
        run=losses.jsd, providers=PLAIN, until=("liger", (0, 8))
    ),  # whether Triton's kernel ran or cuTile's is not stated
    "fused_linear_jsd": Benchmark(run=losses.fused_linear_jsd, providers=PLAIN, threads=2),
    "fused_linear_grpo_loss_token": Benchmark(run=losses.grpo, providers=("torch",), threads=2),
    "fused_linear_grpo_loss_sequence": Benchmark(run=losses.grpo, providers=("torch",), threads=2),
    "fused_moe": Benchmark(run=moe.fused_moe, threads=2),
}
# Liger's losses of a head are compiled (chunked_loss/*.py, `torch.compile`). Their scripts measure
# torch's own after them in one process, and until 0.6 that one's figures hold two heads more than
# it makes: the compiled functions' closures are still there.
COMPILED = {
    "fused_linear_orpo_loss": ("liger", "huggingface"),
    "fused_linear_simpo_loss": ("liger", "huggingface"),
    "kto_loss": ("liger", "huggingface"),
    "distill_jsd_loss": ("liger", "torch"),
    "fused_linear_grpo_loss_token": ("liger",),
    "fused_linear_grpo_loss_sequence": ("liger",),
    "fused_linear_dpo_loss": ("liger", "huggingface"),
    "fused_linear_cpo_loss": ("liger", "huggingface"),
    "dpo_loss": ("liger", "huggingface"),
    "cpo_loss": ("liger", "huggingface"),
}
CALLS = 2
LARGEST = 2**24  # of one size; the published ones end at 2**18
MOST = {"E": 2**12, "num_shards": 2**12}  # of what is done one after the other
NUMBERS = (
    "eps",
    "p",
    "ignore_index",
    "beta",
    "weight_hard_loss",
    "weight_soft_loss",
)  # that are no sizes


def read(row: Row) -> Kernel:
    """The row, if there is a formula for it."""
    check(row)
    name = f"{kernel_of(row)}, {row.more('provider')}, {row.engine_version}"
    return Kernel(
        id=row.id,
        source=row.origin,
        confidence=str(row.confidence or ""),
        name=name[:80],
        value=row.bytes or 0,
        row=row,
    )


def check(row: Row) -> None:
    """Raise for what has no formula, and for sizes that are none."""
    kernel, provider, shapes = kernel_of(row), row.more("provider"), row.extra
    if provider in COMPILED.get(kernel, ()):
        raise Unfit(
            "a compiled kernel, or measured behind one: what inductor keeps is in no source",
            f"{kernel}, {provider}",
        )
    if kernel not in BENCHMARKS:
        raise Unfit("a kernel without formula", kernel)
    known = BENCHMARKS[kernel]
    if provider not in known.providers:
        raise Unfit("a kernel's provider without formula", provider)
    machine(row)
    version = str(row.engine_version).split()[-1:]
    read = re.fullmatch(r"(\d{1,3})\.(\d{1,3})(\.\w{1,9})*", version[0]) if version else None
    if not read:
        raise Unfit("the versions are not known", row.engine_version)
    if provider == known.until[0] and (int(read[1]), int(read[2])) >= known.until[1]:
        raise Unfit("a kernel of a version without formula", f"{kernel} of {version[0]}")
    if not row.bytes:
        raise Unfit("the unit or the value is not settled", f"{row.value} {row.unit}")
    for name, value in shapes.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if (
            number
            and name not in NUMBERS
            and (count(value) or LARGEST + 1) > MOST.get(name, LARGEST)
        ):
            raise Unfit("the kernel's sizes are not stated", shapes)


def peak(one: Kernel) -> int:
    """The highest allocation during the last call, as the allocator counts: a block that is nearly
    large enough is given whole."""
    try:
        events = ran(one.row)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as missing:
        raise Unfit("the kernel's sizes are not stated", missing) from None
    return replay(events).phases["forward", CALLS - 1].allocated


def ran(row: Row) -> list[Event]:
    """The events of all calls, each a step of its own."""
    bench, known = Bench(row=row), BENCHMARKS[kernel_of(row)]
    bench.r.mark("load")
    sms, capability = machine(row)
    bench.r.sums = partial(kernels.column_sum, sms=sms, capability=capability)
    workspace = kernels.cublas_workspace(capability)
    bench.kept.append([bench.r.scratch(workspace, "cublas") for _ in range(known.threads)])
    step = known.run(bench)
    for number in range(CALLS):
        bench.r.mark("forward", "", number)
        step()
    return list(bench.r.events)


def kernel_of(row: Row) -> str:
    return str(row.model).removeprefix("single kernel ").partition(" ")[0]
